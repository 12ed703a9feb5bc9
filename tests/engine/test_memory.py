#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A prompt of 6,000 tokens on 4 ranks (processes): each rank's memory is its share of the KV cache, its weights, its workspace, its activations
and a rest that is bounded and does not grow with the prompt.  test_memory.py DCP_ATTN"""
import json, os, subprocess, sys, tempfile

MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "gguf", "llama-f32.gguf")
RANKS, PAGE_TOKENS = 4, 64
REST = 24 << 20  # program, libraries, stacks, tokenizer, control blocks; 14 MiB seen
COUNTED_REST = 1 << 20  # of the counted allocator: dense scratch, tables, the tokenizer; 0.33 MiB seen
GROWTH = 2 << 20  # of the rest, from 600 tokens to 6,000: the prompt itself and its ids


def run(exe, n_tokens):
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as f:
        f.write("abcde " * (n_tokens // 6))  # this model's vocabulary: a token a byte
        f.flush()
        command = [exe, "generate", "-m", MODEL, "--raw", "-f", f.name, "-n", str(RANKS), "-t", "1", "--comm", "shm", "--context", "8192"]
        done = subprocess.run(command + ["--max-tokens", "1", "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["table"]


def main():
    tables = {n: run(sys.argv[1], n) for n in (600, 6000)}
    for n, table in tables.items():
        assert len(table) == RANKS
        token_bytes = table[0]["kv_bytes"] // (-(-table[0]["kv_tokens"] // PAGE_TOKENS) * PAGE_TOKENS)
        for row in table:
            assert n // RANKS <= row["kv_tokens"] <= n // RANKS + 2, row
            pages = -(-row["kv_tokens"] // PAGE_TOKENS)
            assert row["kv_bytes"] == pages * PAGE_TOKENS * token_bytes, row
            assert 0 <= row["kv_huge_bytes"] <= row["kv_bytes"], row
            known = row["kv_bytes"] + row["weight_bytes"] + row["workspace_bytes"] + row["activation_bytes"]
            counted_rest, rest = row["peak_counted_bytes"] - known, row["peak_rss_bytes"] - known
            print(f"{n} tokens, rank {row['rank']}: {known} explained, {counted_rest} more counted, {rest} more resident")
            assert 0 <= counted_rest <= COUNTED_REST, row
            assert rest <= REST, row
    for short, long in zip(tables[600], tables[6000]):
        for key in ("workspace_bytes", "activation_bytes", "weight_bytes"):
            assert short[key] == long[key], (key, short, long)
        grown = (long["peak_rss_bytes"] - long["kv_bytes"]) - (short["peak_rss_bytes"] - short["kv_bytes"])
        assert grown <= GROWTH, f"rank {long['rank']}: {grown} bytes more than the longer KV cache"
    print("ok")


if __name__ == "__main__":
    main()
