#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Models with multi-head latent attention through the command: greedy text, logits and perplexity as the float64 pass has them, in every form of the
cache, on 1 to 4 ranks.  test_mla.py DCP_ATTN FOLDER_OF_make_mla_cases.py"""
import json, math, os, struct, subprocess, sys, tempfile

MODELS = ["mla-deepseek", "mla-lite", "mla-experts"]
SHAPES = [(1, "threads", 1, 512), (2, "shm", 1, 5), (3, "threads", 4, 8), (4, "shm", 1, 512)]  # ranks, comm, interleave, chunk
TOLERANCE = 6e-4  # test_mla.c says why


def load(path):
    with open(path, "rb") as f:
        data = f.read()
    n = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, t in json.loads(data[8 : 8 + n]).items():
        a, b = (8 + n + x for x in t["data_offsets"])
        out[name] = list(struct.unpack(f"<{(b - a) // 4}{'f' if t['dtype'] == 'F32' else 'i'}", data[a:b]))
    return out


def nll(logits, i):
    most = max(logits)
    return math.log(sum(math.exp(x - most) for x in logits)) + most - logits[i]


def run(*args):
    p = subprocess.run(args, capture_output=True, text=True, timeout=200)
    assert p.returncode == 0, p.stderr
    return json.loads(p.stdout)


def main():
    exe, folder = sys.argv[1:]
    if not os.path.exists(os.path.join(folder, "mla-lite.safetensors")):
        return 77
    for name in MODELS:
        want = load(os.path.join(folder, name + ".safetensors"))
        ids, n = want["ids"], want["prompt"][0]
        vocab = len(want["logits"]) // len(ids)
        rows = [want["logits"][i * vocab : (i + 1) * vocab] for i in range(len(ids))]
        base = ["-m", os.path.join(folder, name + ".gguf"), "--kv-dtype", "f32", "--compute", "f32", "--json", "-t", "1", "-p", bytes(ids[:n]).decode()]
        kv = {}
        for ranks, comm, interleave, chunk in SHAPES:
            for form in ("absorbed", "projected", "expanded"):
                shape = ["-n", str(ranks), "--comm", comm, "--interleave", str(interleave), "--chunk", str(chunk), "--mla", form]
                with tempfile.TemporaryDirectory() as tmp:
                    path = os.path.join(tmp, "logits.safetensors")
                    said = run(exe, "generate", "--raw", "--temp", "0", "--max-tokens", str(len(ids) - n), "--logits", path, *base, *shape)
                    seen = load(path)["logits"]
                assert said["prompt_ids"] == ids[:n], said["prompt_ids"]
                assert said["ids"] == ids[n:], (name, shape, said["ids"], ids[n:])
                off = max(abs(a - b) for a, b in zip(seen, want["logits"][(n - 1) * vocab :]))
                assert len(seen) == (len(ids) - n) * vocab and off <= TOLERANCE, (name, shape, off)
                kv[form] = sum(r["kv_bytes"] for r in said["table"]) if ranks == 1 else kv[form]
                said = run(exe, "perplexity", *base, *shape)
                off = max(abs(a - nll(rows[i], ids[i + 1])) for i, a in enumerate(said["nll"]))
                assert len(said["nll"]) == n - 1 and off <= TOLERANCE, (name, shape, off)
        print(f"{name}: KV of a page, absorbed {kv['absorbed']} bytes, expanded {kv['expanded']}")
        assert kv["absorbed"] == kv["projected"] < kv["expanded"]
    print("ok")


if __name__ == "__main__":
    sys.exit(main())
