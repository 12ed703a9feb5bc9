# SPDX-License-Identifier: Apache-2.0
"""Language-model forward pass in float64, one token after the other: the oracle of the small models.

Written for plainness: every token runs alone through all layers against lists of earlier keys and
values, head by head. No batching, no cache object, no sharding. Weights come dequantised from the
public `gguf` package.

  python3 tests/ref/lm_reference.py MODEL.gguf ID,ID,...     best ids after the last one
"""
import sys

import numpy as np


def read_model(path):
    """-> (metadata dict, tensors as float64 arrays [rows, k])."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {t.name: np.asarray(dequantize(t.data, t.tensor_type), np.float64) for t in reader.tensors}
    return meta, tensors


def rms_norm(x, weight, eps):
    return x * weight / np.sqrt(np.mean(x * x) + eps)


class Reference:
    def __init__(self, path):
        self.meta, self.w = read_model(path)
        self.arch = self.meta["general.architecture"]
        self.gemma = self.arch == "gemma3"
        self.layers = self.key("block_count")
        self.d = self.key("embedding_length")
        self.heads = self.key("attention.head_count")
        self.kv_heads = self.key("attention.head_count_kv", self.heads)
        self.dk = self.key("attention.key_length", self.d // self.heads)
        self.dv = self.key("attention.value_length", self.d // self.heads)
        self.eps = self.key("attention.layer_norm_rms_epsilon")
        self.rotating = self.key("rope.dimension_count", self.dk)
        self.window = self.key("attention.sliding_window", 0)
        self.pattern = self.key("attention.sliding_window_pattern", 6)
        self.final_cap = self.key("final_logit_softcapping", 0.0) if self.gemma else 0.0
        self.attn_cap = self.key("attn_logit_softcapping", 0.0) if self.gemma else 0.0
        linear = self.key("rope.scaling.type", "none") == "linear"
        self.factor = self.key("rope.scaling.factor", 1.0) if linear else 1.0
        self.keys = [[] for _ in range(self.layers)]
        self.values = [[] for _ in range(self.layers)]
        self.position = 0

    def key(self, name, default=None):
        value = self.meta.get(f"{self.arch}.{name}", default)
        if value is None:
            raise KeyError(name)
        return value

    def is_local(self, layer):
        """Does this layer see a window only? Gemma: all but every `pattern`th; llama: all, if set."""
        return (layer + 1) % self.pattern != 0 if self.gemma else True

    def rotate(self, head, layer):
        half = self.rotating // 2
        local = self.gemma and self.is_local(layer)
        base = self.key("rope.freq_base_swa", 10000.0) if local else self.key("rope.freq_base", 10000.0)
        out = head.copy()
        for i in range(half):
            angle = self.position * float(base) ** (-i / half)
            if not local:
                angle /= self.factor
                if "rope_freqs.weight" in self.w:
                    angle /= self.w["rope_freqs.weight"][i]
            a, b = (i, i + half) if self.gemma else (2 * i, 2 * i + 1)
            out[a] = head[a] * np.cos(angle) - head[b] * np.sin(angle)
            out[b] = head[a] * np.sin(angle) + head[b] * np.cos(angle)
        return out

    def project(self, layer, name, x):
        y = self.w[f"blk.{layer}.{name}.weight"] @ x
        bias = f"blk.{layer}.{name}.bias"
        return y + self.w[bias] if bias in self.w else y

    def attention(self, layer, x):
        q = self.project(layer, "attn_q", x).reshape(self.heads, self.dk)
        k = self.project(layer, "attn_k", x).reshape(self.kv_heads, self.dk)
        v = self.project(layer, "attn_v", x).reshape(self.kv_heads, self.dv)
        if f"blk.{layer}.attn_q_norm.weight" in self.w:
            q = [rms_norm(row, self.w[f"blk.{layer}.attn_q_norm.weight"], self.eps) for row in q]
            k = [rms_norm(row, self.w[f"blk.{layer}.attn_k_norm.weight"], self.eps) for row in k]
        self.keys[layer].append([self.rotate(row, layer) for row in k])
        self.values[layer].append(v)
        first = 0
        if self.window and self.is_local(layer):
            first = max(0, self.position - self.window + 1)
        out = []
        for h in range(self.heads):
            g = h * self.kv_heads // self.heads
            rotated = self.rotate(q[h], layer)
            scores = np.array([rotated @ self.keys[layer][p][g] for p in range(first, self.position + 1)])
            scores /= np.sqrt(self.dk)
            if self.attn_cap:
                scores = self.attn_cap * np.tanh(scores / self.attn_cap)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out.append(sum(a * self.values[layer][first + j][g] for j, a in enumerate(weights)))
        return self.project(layer, "attn_output", np.concatenate(out))

    def feed_forward(self, layer, x):
        gate = self.project(layer, "ffn_gate", x)
        if self.gemma:
            gate = gate * 0.5 * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1.0 + np.exp(-gate))
        return self.project(layer, "ffn_down", gate * self.project(layer, "ffn_up", x))

    def token(self, token_id):
        """Logits after one more token."""
        def norm(name, x):
            return rms_norm(x, self.w[name], self.eps)

        x = self.w["token_embd.weight"][token_id].copy()
        if self.gemma:
            x = x * np.sqrt(self.d)
        for layer in range(self.layers):
            y = self.attention(layer, norm(f"blk.{layer}.attn_norm.weight", x))
            x = x + (norm(f"blk.{layer}.post_attention_norm.weight", y) if self.gemma else y)
            y = self.feed_forward(layer, norm(f"blk.{layer}.ffn_norm.weight", x))
            x = x + (norm(f"blk.{layer}.post_ffw_norm.weight", y) if self.gemma else y)
        self.position += 1
        head = self.w.get("output.weight", self.w["token_embd.weight"])
        logits = head @ norm("output_norm.weight", x)
        return self.final_cap * np.tanh(logits / self.final_cap) if self.final_cap else logits


def logits_of(path, ids):
    """-> [len(ids), vocab] float64; row i follows ids[i]."""
    model = Reference(path)
    return np.array([model.token(i) for i in ids])


if __name__ == "__main__":
    last = logits_of(sys.argv[1], [int(i) for i in sys.argv[2].split(",")])[-1]
    for best in np.argsort(last)[::-1][:5]:
        print(best, last[best])
