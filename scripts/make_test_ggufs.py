#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the small models of tests/data/gguf and the logits that a float64 pass gives for them.

  python3 scripts/make_test_ggufs.py [NAME...]         needs numpy and the PyPI package gguf

Each model turns on something that the real ones do not have. Weights are random with a fixed seed, so
that a second run writes the same bytes. Beside NAME.gguf lies NAME.safetensors: `ids` I32 [T] and
`logits` F32 [T, vocab], row i following ids[i].
"""
import json
import os
import struct
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "..", "tests", "data", "gguf")
sys.path.insert(0, os.path.join(HERE, "..", "tests", "ref"))
import lm_reference  # noqa: E402

N_TOKENS = 40


def byte_letters():
    """The 256 letters that byte-level vocabularies use for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, spare = {}, 256
    for b in range(256):
        letters[b] = chr(b) if b in plain else chr(spare)
        spare += b not in plain
    return [letters[b] for b in range(256)]


def add_tokenizer(w):
    merges = ["t h", "h e", "i n"]
    tokens = byte_letters() + ["<|begin|>", "<|end|>"] + [m.replace(" ", "") for m in merges]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([1] * 256 + [3, 3] + [1] * len(merges))
    w.add_token_merges(merges)
    w.add_bos_token_id(256)
    w.add_eos_token_id(257)
    w.add_add_bos_token(False)
    return len(tokens)


def random_k_blocks(rng, rows, k, qtype, scale):
    """Rows of a K-quant with random bits: the package can read these types but not write them."""
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    raw = rng.integers(0, 256, (rows, k // block, size), dtype=np.uint8)
    # f16 scales at their places in the block; the rest are bits of sub-scales and quants
    places = {Q.Q4_K: [(0, 1 / 500), (2, 1 / 60)], Q.Q5_K: [(0, 1 / 1000), (2, 1 / 60)], Q.Q6_K: [(208, 1 / 2000)]}
    for at, part in places[qtype]:
        d = (rng.uniform(0.5, 1.0, (rows, k // block)) * scale * part).astype(np.float16)
        raw[:, :, at : at + 2] = d.view(np.uint8).reshape(rows, k // block, 2)
    return raw.reshape(rows, -1)


class Model:
    def __init__(self, name, arch, seed):
        self.path = os.path.join(OUT, name + ".gguf")
        self.w = gguf.GGUFWriter(self.path, arch)
        self.rng = np.random.default_rng(seed)
        self.arch = arch

    def matrix(self, name, rows, k, qtype, gain=1.0):
        scale = gain / np.sqrt(k)
        if qtype in (Q.Q4_K, Q.Q5_K, Q.Q6_K):
            self.w.add_tensor(name, random_k_blocks(self.rng, rows, k, qtype, scale), raw_dtype=qtype)
            return
        x = (self.rng.standard_normal((rows, k)) * scale).astype(np.float32)
        if qtype == Q.F32:
            self.w.add_tensor(name, x)
        elif qtype == Q.F16:
            self.w.add_tensor(name, x.astype(np.float16))
        else:
            self.w.add_tensor(name, gguf.quants.quantize(x, qtype), raw_dtype=qtype)

    def vector(self, name, n, mean=1.0, spread=0.2):
        self.w.add_tensor(name, (mean + spread * self.rng.standard_normal(n)).astype(np.float32))

    def build(self, *, layers, d, heads, kv_heads, ffn, types, dk=None, dv=None, context=128, untied=False,
              biases=False, base=10000.0, eps=1e-5, rotating=None, keys=None, divisors=None):
        w = self.w
        default = d // heads
        key, value = dk or default, dv or default
        w.add_context_length(context)
        w.add_embedding_length(d)
        w.add_block_count(layers)
        w.add_feed_forward_length(ffn)
        w.add_head_count(heads)
        w.add_head_count_kv(kv_heads)
        w.add_layer_norm_rms_eps(eps)
        w.add_rope_freq_base(base)
        if dk:
            w.add_key_length(dk)
        if dv:
            w.add_value_length(dv)
        if rotating:
            w.add_rope_dimension_count(rotating)
        for name, (add, v) in (keys or {}).items():
            getattr(w, add)(f"{self.arch}.{name}", v)
        vocab = add_tokenizer(w)

        t = {"embd": Q.F32, "q": Q.F32, "k": Q.F32, "v": Q.F32, "o": Q.F32, "gate": Q.F32, "up": Q.F32,
             "down": Q.F32, **types}
        gemma = self.arch == "gemma3"
        # gemma multiplies its embeddings by sqrt(d)
        self.matrix("token_embd.weight", vocab, d, t["embd"], 1.0 if gemma else np.sqrt(d) * 0.5)
        if divisors is not None:
            w.add_tensor("rope_freqs.weight", np.asarray(divisors, np.float32))
        for l in range(layers):
            b = f"blk.{l}."
            self.vector(b + "attn_norm.weight", d)
            self.matrix(b + "attn_q.weight", heads * key, d, t["q"], 2.0)
            self.matrix(b + "attn_k.weight", kv_heads * key, d, t["k"], 2.0)
            self.matrix(b + "attn_v.weight", kv_heads * value, d, t["v"])
            self.matrix(b + "attn_output.weight", d, heads * value, t["o"])
            if biases:
                for name, n in (("q", heads * key), ("k", kv_heads * key), ("v", kv_heads * value), ("output", d)):
                    self.vector(f"{b}attn_{name}.bias", n, 0.0, 0.5)
            if gemma:
                self.vector(b + "attn_q_norm.weight", key)
                self.vector(b + "attn_k_norm.weight", key)
                self.vector(b + "post_attention_norm.weight", d, 0.5)
                self.vector(b + "post_ffw_norm.weight", d, 0.5)
            self.vector(b + "ffn_norm.weight", d)
            self.matrix(b + "ffn_gate.weight", ffn, d, t["gate"], 1.5)
            self.matrix(b + "ffn_up.weight", ffn, d, t["up"])
            self.matrix(b + "ffn_down.weight", d, ffn, t["down"])
        self.vector("output_norm.weight", d)
        if untied:
            self.matrix("output.weight", vocab, d, t.get("output", Q.F32), 2.0)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        return vocab


def all_of(qtype):
    return dict.fromkeys(("embd", "q", "k", "v", "o", "gate", "up", "down", "output"), qtype)


U32, F32, STR = "add_uint32", "add_float32", "add_string"
LLAMA3_DIVISORS = [1.0, 1.0, 1.0, 1.5, 2.6, 4.1, 8.0, 8.0]

MODELS = {
    # tied, all float, six query heads on two KV heads
    "llama-f32": ("llama", dict(layers=2, d=48, heads=6, kv_heads=2, ffn=80, types={})),
    # positions divided by 4; an output matrix of its own
    "llama-linear-untied": ("llama", dict(layers=2, d=64, heads=4, kv_heads=4, ffn=96, types=all_of(Q.F16), untied=True,
                            keys={"rope.scaling.type": (STR, "linear"), "rope.scaling.factor": (F32, 4.0)})),
    # divisors per frequency, as Llama 3 has them; 15 heads on 5
    "llama3-freqs": ("llama", dict(layers=2, d=64, heads=15, kv_heads=5, ffn=64, dk=16, dv=16, base=500000.0, divisors=LLAMA3_DIVISORS,
                     types=all_of(Q.BF16) | {"down": Q.Q4_0, "o": Q.F16})),
    # Mistral: every layer sees a window
    "mistral-window": ("llama", dict(layers=3, d=64, heads=8, kv_heads=2, ffn=128, types=all_of(Q.Q8_0), untied=True,
                       keys={"attention.sliding_window": (U32, 7)})),
    # biases on q, k, v and the output projection
    "llama-bias": ("llama", dict(layers=2, d=96, heads=3, kv_heads=1, ffn=128, biases=True,
                   types={"embd": Q.Q8_0, "q": Q.Q4_0, "k": Q.Q4_1, "v": Q.Q5_0, "o": Q.Q5_1, "gate": Q.Q4_1, "up": Q.Q5_1, "down": Q.Q5_0})),
    # key and value lengths of their own, half of a head rotates
    "llama-partial-rope": ("llama", dict(layers=2, d=40, heads=7, kv_heads=7, ffn=56, dk=16, dv=12, rotating=8, types={})),
    # window of 5 in all layers but the sixth, which has scaled positions; both softcaps
    "gemma3-softcap": ("gemma3", dict(layers=7, d=64, heads=4, kv_heads=1, ffn=64, dk=24, dv=24, base=1e6, eps=1e-6,
                       types=all_of(Q.Q8_0),
                       keys={"attention.sliding_window": (U32, 5), "rope.scaling.type": (STR, "linear"),
                             "rope.scaling.factor": (F32, 8.0), "final_logit_softcapping": (F32, 6.0),
                             "attn_logit_softcapping": (F32, 4.0)})),
    # K-quants, whose blocks take 256 elements; three query heads on three
    "llama-kquants": ("llama", dict(layers=1, d=256, heads=3, kv_heads=3, ffn=256, dk=32, dv=32,
                      types={"embd": Q.Q4_K, "q": Q.Q5_K, "k": Q.Q6_K, "v": Q.Q4_K, "o": Q.Q8_0, "gate": Q.Q4_K, "up": Q.Q5_K, "down": Q.Q6_K})),
}


def save(path, **arrays):
    names = {np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}
    header, at = {}, 0
    for k, v in arrays.items():
        header[k] = {"dtype": names[v.dtype], "shape": list(v.shape), "data_offsets": [at, at + v.nbytes]}
        at += v.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(v.tobytes() for v in arrays.values()))


def main():
    os.makedirs(OUT, exist_ok=True)
    for seed, (name, (arch, what)) in enumerate(MODELS.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        m = Model(name, arch, 1000 + seed)
        vocab = m.build(**what)
        ids = m.rng.integers(0, vocab, N_TOKENS).astype(np.int32)
        logits = lm_reference.logits_of(m.path, ids)
        save(m.path[:-5] + ".safetensors", ids=ids, logits=logits.astype(np.float32))
        print(name, os.path.getsize(m.path), "bytes; logits", float(logits.min()), "to", float(logits.max()),
              "std", float(logits.std()))


if __name__ == "__main__":
    main()
