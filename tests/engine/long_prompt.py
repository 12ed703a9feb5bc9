#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A long prompt in large chunks: `generate` on real weights, the same text and logits whatever the chunk, memory within the same limit.

  long_prompt.py PATH/TO/dcp-attn [--model gemma3-270m] [--tokens 20000] [--ranks 8] [--chunks 8192,16384] [--memory 64M] [--also "--comm threads"]

The prompt is this repository's own documentation and headers, cut to the number of tokens. Tolerances are those of tests/golden/check_generate.py: the first
logits off by 1.0 at most, Kullback-Leibler divergence under 0.005, the same ids up to the first step whose margin is under 0.5. Prints what each rank took.
Needs python3 and numpy; some minutes. Exits 1 if anything differs, 77 if there is no such model."""
import argparse, glob, json, os, shlex, subprocess, sys, tempfile, time
import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "golden"))
from check import load


def call(cmd):
    p = subprocess.run(cmd, capture_output=True)
    if p.returncode:
        sys.exit(f"{shlex.join(cmd)}: exit {p.returncode}: {p.stderr.decode(errors='replace')[-400:]}")
    return json.loads(p.stdout)


def source_text():
    names = [os.path.join(ROOT, n) for n in ("README.md", "CONTRIBUTING.md")]
    names += sorted(glob.glob(os.path.join(ROOT, "docs", "*.md"))) + sorted(glob.glob(os.path.join(ROOT, "include", "dcpattn", "*.h")))
    return "\n".join(open(n, encoding="utf-8").read() for n in names)


def prompt_of(exe, model, n_tokens, path):
    """Writes the longest beginning of the text that has at most n_tokens tokens; returns how many it has."""
    text = source_text()

    def count(n_chars):
        with open(path, "w", encoding="utf-8") as f:
            f.write(text[:n_chars])
        return len(call([exe, "tokenize", "-m", model, "-f", path, "--json"])["ids"])

    low, high = 0, len(text)
    if count(high) < n_tokens:
        sys.exit(f"the text has fewer than {n_tokens} tokens")
    while high - low > 1:
        mid = (low + high) // 2
        low, high = (mid, high) if count(mid) <= n_tokens else (low, mid)
    return count(low)


def logsoft(x):
    x = x.astype(np.float64) - x.max()
    return x - np.log(np.exp(x).sum())


def mib(n):
    return f"{n / 2 ** 20:.1f}"


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("bin")
    ap.add_argument("--model", default="gemma3-270m")
    ap.add_argument("--tokens", type=int, default=20000)
    ap.add_argument("--ranks", type=int, default=8)
    ap.add_argument("--chunks", default="8192,16384")
    ap.add_argument("--memory", default="64M")
    ap.add_argument("--max-tokens", type=int, default=8)
    ap.add_argument("--also", default="")
    a = ap.parse_args()
    exe = os.path.abspath(a.bin)
    if subprocess.run([exe, "tokenize", "-m", a.model, "-p", "a", "--json"], capture_output=True).returncode:
        print(f"no model {a.model}: skipped")
        return 77
    limit = int(a.memory[:-1]) << {"K": 10, "M": 20, "G": 30}[a.memory[-1]]
    runs, bad = [], 0
    with tempfile.TemporaryDirectory() as tmp:
        prompt = os.path.join(tmp, "prompt.txt")
        n = prompt_of(exe, a.model, a.tokens, prompt)
        print(f"{a.model}, {n} tokens, {a.ranks} ranks, attention's workspace at most {a.memory} a rank")
        print(f"{'chunk':>6} {'workspace':>10} {'activations':>12} {'KV':>8} {'peak RSS':>9} {'prompt':>8}   MiB a rank, the most of all; s")
        for chunk in a.chunks.split(","):
            out = os.path.join(tmp, f"logits-{chunk}.safetensors")
            t0 = time.monotonic()
            r = call([exe, "generate", "-m", a.model, "-f", prompt, "--raw", "--temp", "0", "--max-tokens", str(a.max_tokens), "-n", str(a.ranks), "--chunk", chunk,
                      "--memory", a.memory, "--deadline", "300", "--json", "--logits", out] + shlex.split(a.also))
            most = {k: max(x[k] for x in r["table"]) for k in ("workspace_bytes", "activation_bytes", "kv_bytes", "peak_rss_bytes")}
            print(f"{chunk:>6} {mib(most['workspace_bytes']):>10} {mib(most['activation_bytes']):>12} {mib(most['kv_bytes']):>8} {mib(most['peak_rss_bytes']):>9} {r['prompt_s']:>8.1f}", flush=True)
            if most["workspace_bytes"] > limit:
                print(f"chunk {chunk}: workspace {most['workspace_bytes']} is over the limit {limit}")
                bad += 1
            runs.append((chunk, r["ids"], load(out)["logits"]))
    first = runs[0]
    for chunk, ids, logits in runs[1:]:
        lw, lg = logsoft(first[2][0]), logsoft(logits[0])
        kl, off = float((np.exp(lw) * (lw - lg)).sum()), float(np.abs(first[2][0] - logits[0]).max())
        print(f"chunk {chunk} against {first[0]}: first logits off by {off:.4g}, KL {kl:.3g}, ids {'the same' if ids == first[1] else 'differ'}")
        if off > 1.0 or kl > 0.005:
            bad += 1
        for i, (x, y) in enumerate(zip(first[1], ids)):
            top = np.sort(first[2][i])[-2:]
            if top[1] - top[0] < 0.5:
                break
            if x != y:
                print(f"token {i}: {x} and {y} with a margin of {top[1] - top[0]:.3g}")
                bad += 1
                break
    print("failed" if bad else "passed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
