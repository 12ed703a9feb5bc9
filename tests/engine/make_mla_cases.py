#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the models that test_mla and test_mla.py run, and beside each what the float64 pass says:
NAME.safetensors with `ids` I32 [T], a prompt and its greedy continuation, `prompt` I32 [1], the
length of the former, and `logits` F32 [T, vocab], row i following ids[i].

  python3 tests/engine/make_mla_cases.py FOLDER

A choice of experts, or of the next token, that float32 could see differently makes no case: the seed
is raised until every one is clear.
"""
import json
import os
import struct
import sys

try:
    import numpy as np
except ImportError:
    sys.exit(77)  # ctest: skipped

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "..", "scripts"), os.path.join(HERE, "..", "ref")]
import make_mla_model  # noqa: E402
import mla_reference  # noqa: E402

N_PROMPT, N_GREEDY = 21, 8
CLEAR = 2e-3  # of a choice: float32 is off by some 1e-5


def save(path, arrays):
    names = {np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}
    header, at = {}, 0
    for k, v in arrays.items():
        header[k] = {"dtype": names[v.dtype], "shape": list(v.shape), "data_offsets": [at, at + v.nbytes]}
        at += v.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(v.tobytes() for v in arrays.values()))


def run(path, seed):
    """-> ids, logits, how clear the closest choice was."""
    model = mla_reference.Reference(path)
    # letters: text that the tokenizer gives back as these very ids
    ids = [int(i) for i in np.random.default_rng(seed).integers(ord("A"), ord("Z"), N_PROMPT)]
    logits = [model.token(i) for i in ids]
    closest = np.inf
    for _ in range(N_GREEDY):
        order = np.argsort(logits[-1])
        closest = min(closest, logits[-1][order[-1]] - logits[-1][order[-2]])
        ids.append(int(order[-1]))
        logits.append(model.token(ids[-1]))
    return np.array(ids, np.int32), np.array(logits, np.float32), min(closest, model.closest)


def main():
    os.makedirs(sys.argv[1], exist_ok=True)
    for name, what in make_mla_model.MODELS.items():
        path = os.path.join(sys.argv[1], name + ".gguf")
        for seed in range(1, 100):
            make_mla_model.make(path, seed, **what)
            ids, logits, clear = run(path, seed)
            if clear > CLEAR and 257 not in ids:
                break
        else:
            sys.exit(f"{name}: no seed gives clear choices")
        save(path[:-5] + ".safetensors", {"ids": ids, "prompt": np.array([N_PROMPT], np.int32), "logits": logits})
        print(f"{name}: seed {seed}, {os.path.getsize(path)} bytes, choices clear by {clear:.2g}, logits' std {logits.std():.2g}")


if __name__ == "__main__":
    main()
