#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes small models with random weights in the attention shape of DeepSeek V2 and V3, as GGUF.

  python3 scripts/make_mla_model.py NAME FILE.gguf [SEED]       needs numpy; NAME as in MODELS below

Tensors and metadata are named as llama.cpp's converter names them (architecture deepseek2). The same
NAME and SEED give the same bytes.
"""
import struct
import sys

import numpy as np

U32, I32, F32T, BOOL, STR, ARR = 4, 5, 6, 7, 8, 9  # value types of GGUF
F32, F16, Q8_0 = 0, 1, 8  # tensor types


def value(kind, v):
    if kind == STR:
        raw = v.encode()
        return struct.pack("<Q", len(raw)) + raw
    return struct.pack({U32: "<I", I32: "<i", F32T: "<f", BOOL: "<?"}[kind], v)


class Writer:
    def __init__(self):
        self.keys, self.infos, self.blobs, self.at = [], [], [], 0

    def key(self, name, kind, v):
        self.keys.append(value(STR, name) + struct.pack("<I", kind) + value(kind, v))

    def array(self, name, kind, vs):
        head = value(STR, name) + struct.pack("<IIQ", ARR, kind, len(vs))
        self.keys.append(head + b"".join(value(kind, v) for v in vs))

    def tensor(self, name, x, kind):
        """x: numpy array whose last axis is contiguous in the file."""
        x = np.ascontiguousarray(x, np.float32)
        dims = x.shape[::-1]
        if kind == F16:
            raw = x.astype(np.float16).tobytes()
        elif kind == Q8_0:
            blocks = x.reshape(-1, 32)
            d = (np.abs(blocks).max(1) / 127).astype(np.float16)
            inverse = np.where(d > 0, 1 / np.where(d > 0, d, 1).astype(np.float32), 0)
            q = np.clip(np.rint(blocks * inverse[:, None]), -127, 127).astype(np.int8)
            raw = np.concatenate([d[:, None].view(np.uint8), q.view(np.uint8)], 1).tobytes()
        else:
            raw = x.tobytes()
        self.infos.append(value(STR, name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, self.at))
        raw += b"\0" * (-len(raw) % 32)
        self.blobs.append(raw)
        self.at += len(raw)

    def write(self, path):
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.infos), len(self.keys)) + b"".join(self.keys) + b"".join(self.infos)
        with open(path, "wb") as f:
            f.write(head + b"\0" * (-len(head) % 32) + b"".join(self.blobs))


def add_tokenizer(w):
    """A token a byte, two control tokens, a few merges; -> size of the vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, spare = [], 256
    for b in range(256):
        letters.append(chr(b) if b in plain else chr(spare))
        spare += b not in plain
    merges = ["t h", "h e", "i n"]
    tokens = letters + ["<|begin|>", "<|end|>"] + [m.replace(" ", "") for m in merges]
    w.key("tokenizer.ggml.model", STR, "gpt2")
    w.key("tokenizer.ggml.pre", STR, "gpt-2")
    w.array("tokenizer.ggml.tokens", STR, tokens)
    w.array("tokenizer.ggml.token_type", I32, [1] * 256 + [3, 3] + [1] * len(merges))
    w.array("tokenizer.ggml.merges", STR, merges)
    w.key("tokenizer.ggml.bos_token_id", U32, 256)
    w.key("tokenizer.ggml.eos_token_id", U32, 257)
    w.key("tokenizer.ggml.add_bos_token", BOOL, False)
    return len(tokens)


def make(path, seed, *, layers, d, heads, q_rank, kv_rank, nope, rope, v, ffn, kind, split, yarn=None, moe=None,
         context=4096, is_old=False):
    """split: attn_k_b and attn_v_b, not attn_kv_b. yarn: (factor, original context, mscale_all_dim).
    is_old: the keys of files without ..._mla ones."""
    w, rng = Writer(), np.random.default_rng(seed)
    a = "deepseek2."

    def key(name, v, t=U32):
        w.key(a + name, t, v)

    def matrix(name, shape, gain=1.0, t=None):
        w.tensor(name, rng.standard_normal(shape) * gain / np.sqrt(shape[-1]), kind if t is None else t)

    def vector(name, n, mean=1.0, spread=0.2):
        w.tensor(name, mean + spread * rng.standard_normal(n), F32)

    w.key("general.architecture", STR, "deepseek2")
    key("block_count", layers)
    key("context_length", context)
    key("embedding_length", d)
    key("feed_forward_length", ffn)
    key("attention.head_count", heads)
    key("attention.head_count_kv", heads if is_old else 1)
    key("attention.layer_norm_rms_epsilon", 1e-6, F32T)
    if q_rank:
        key("attention.q_lora_rank", q_rank)
    key("attention.kv_lora_rank", kv_rank)
    key("attention.key_length", nope + rope if is_old else kv_rank + rope)
    key("attention.value_length", v if is_old else kv_rank)
    if not is_old:
        key("attention.key_length_mla", nope + rope)
        key("attention.value_length_mla", v)
    key("rope.dimension_count", rope)
    key("rope.freq_base", 10000.0, F32T)
    if yarn:
        key("rope.scaling.type", "yarn", STR)
        key("rope.scaling.factor", yarn[0], F32T)
        key("rope.scaling.original_context_length", yarn[1])
        key("rope.scaling.yarn_log_multiplier", 0.1 * yarn[2], F32T)
    n_dense = layers
    if moe:
        n_dense = moe["dense"]
        key("expert_count", moe["n"])
        key("expert_used_count", moe["used"])
        key("expert_shared_count", moe["shared"])
        key("expert_feed_forward_length", moe["ffn"])
        key("expert_weights_scale", moe["scale"], F32T)
        key("expert_weights_norm", moe["norm"], BOOL)
        key("expert_gating_func", moe["gating"])
        if moe.get("groups"):
            key("expert_group_count", moe["groups"])
            key("expert_group_used_count", moe["groups_used"])
    key("leading_dense_block_count", n_dense)
    vocab = add_tokenizer(w)

    matrix("token_embd.weight", (vocab, d), np.sqrt(d) * 0.5)
    for l in range(layers):
        b = f"blk.{l}."
        vector(b + "attn_norm.weight", d)
        if q_rank:
            matrix(b + "attn_q_a.weight", (q_rank, d))
            vector(b + "attn_q_a_norm.weight", q_rank)
            matrix(b + "attn_q_b.weight", (heads * (nope + rope), q_rank), 1.5)
        else:
            matrix(b + "attn_q.weight", (heads * (nope + rope), d), 1.5)
        matrix(b + "attn_kv_a_mqa.weight", (kv_rank + rope, d))
        vector(b + "attn_kv_a_norm.weight", kv_rank)
        if split:
            matrix(b + "attn_k_b.weight", (heads, kv_rank, nope), 1.5 * np.sqrt(nope / kv_rank))
            matrix(b + "attn_v_b.weight", (heads, v, kv_rank))
        else:
            matrix(b + "attn_kv_b.weight", (heads * (nope + v), kv_rank), 1.5)
        matrix(b + "attn_output.weight", (d, heads * v))
        vector(b + "ffn_norm.weight", d)
        if l < n_dense:
            matrix(b + "ffn_gate.weight", (ffn, d), 1.5)
            matrix(b + "ffn_up.weight", (ffn, d))
            matrix(b + "ffn_down.weight", (d, ffn))
            continue
        matrix(b + "ffn_gate_inp.weight", (moe["n"], d), 2.0, F32)
        if moe.get("bias"):
            vector(b + "exp_probs_b.bias", moe["n"], 0.0, 0.1)
        matrix(b + "ffn_gate_exps.weight", (moe["n"], moe["ffn"], d), 1.5)
        matrix(b + "ffn_up_exps.weight", (moe["n"], moe["ffn"], d))
        matrix(b + "ffn_down_exps.weight", (moe["n"], d, moe["ffn"]))
        if moe["shared"]:
            n = moe["shared"] * moe["ffn"]
            matrix(b + "ffn_gate_shexp.weight", (n, d), 1.5)
            matrix(b + "ffn_up_shexp.weight", (n, d))
            matrix(b + "ffn_down_shexp.weight", (d, n))
    vector("output_norm.weight", d)
    matrix("output.weight", (vocab, d), 2.0)
    w.write(path)


V3 = dict(q_rank=192, kv_rank=512, nope=128, rope=64, v=128)  # a head as DeepSeek V2 and V3 have it
MODELS = {
    # the published sizes of a head and of the latent; the tensors that today's converter writes
    "mla-deepseek": dict(layers=4, d=256, heads=16, ffn=512, kind=F32, split=True, yarn=(40.0, 64, 1.0), **V3),
    # quantised, no low rank of q, the one tensor and the keys of older files
    "mla-lite": dict(layers=3, d=64, heads=6, q_rank=0, kv_rank=64, nope=32, rope=16, v=64, ffn=96, kind=Q8_0, split=False, is_old=True),
    # widths that differ from each other, five heads
    "mla-uneven": dict(layers=2, d=80, heads=5, q_rank=48, kv_rank=72, nope=24, rope=8, v=20, ffn=56, kind=F16, split=False, yarn=(4.0, 16, 0.707)),
    # experts as in V3: sigmoid, groups, a bias for the choice, one shared
    "mla-experts": dict(layers=3, d=64, heads=4, q_rank=32, kv_rank=64, nope=32, rope=16, v=32, ffn=96, kind=Q8_0, split=True, yarn=(8.0, 32, 1.0),
                        moe=dict(dense=1, n=16, used=4, shared=1, ffn=32, scale=2.5, norm=True, gating=2, groups=4, groups_used=2, bias=True)),
    # experts as in V2 Lite: softmax, two shared, weights as they are
    "mla-experts-softmax": dict(layers=2, d=64, heads=3, q_rank=0, kv_rank=32, nope=16, rope=8, v=16, ffn=64, kind=F32, split=False,
                                moe=dict(dense=0, n=7, used=3, shared=2, ffn=24, scale=1.0, norm=False, gating=1)),
}


if __name__ == "__main__":
    make(sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1, **MODELS[sys.argv[1]])
