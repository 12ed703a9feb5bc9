# SPDX-License-Identifier: Apache-2.0
"""Forward pass of a deepseek2 model in float64, one token after the other: the oracle of models with
multi-head latent attention.

Written from the published descriptions of DeepSeek V2 and V3 for plainness: every head's keys and
values are spelled out from the latent vector, a token attends to lists of them, its experts run one
by one. No absorption, no batching, no sharding. It reads the file itself: numpy is all it needs.

  python3 tests/ref/mla_reference.py MODEL.gguf ID,ID,...     best ids after the last one
"""
import math
import struct
import sys

import numpy as np


def read_gguf(path):
    """-> (metadata dict, tensors as float64 arrays, the file's last dimension first)."""
    data = open(path, "rb").read()
    at = 4

    def take(form):
        nonlocal at
        out = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return out[0] if len(out) == 1 else out

    def text():
        nonlocal at
        n = take("Q")
        at += n
        return data[at - n : at].decode()

    forms = ["B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d"]

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            item, n = take("I"), take("Q")
            return [value(item) for _ in range(n)]
        return take(forms[kind])

    version, n_tensors, n_keys = take("I"), take("Q"), take("Q")
    assert data[:4] == b"GGUF" and version == 3
    meta = {}
    for _ in range(n_keys):
        name = text()
        meta[name] = value(take("I"))
    infos = []
    for _ in range(n_tensors):
        name, n_dims = text(), take("I")
        dims = [take("Q") for _ in range(n_dims)]
        infos.append((name, dims, take("I"), take("Q")))
    start = -(-at // 32) * 32
    tensors = {}
    for name, dims, kind, offset in infos:
        n, at = int(np.prod(dims)), start + offset
        if kind == 0:
            x = np.frombuffer(data, "<f4", n, at).astype(np.float64)
        elif kind == 1:
            x = np.frombuffer(data, "<f2", n, at).astype(np.float64)
        elif kind == 8:
            blocks = np.frombuffer(data, np.uint8, n // 32 * 34, at).reshape(-1, 34)
            d = blocks[:, :2].copy().view("<f2").astype(np.float32)  # the product is rounded to f32
            x = (d * blocks[:, 2:].copy().view(np.int8).astype(np.float32)).astype(np.float64).reshape(-1)
        else:
            raise ValueError(f"{name} has type {kind}")
        tensors[name] = x.reshape(dims[::-1])
    return meta, tensors


def rms_norm(x, weight, eps):
    return x * weight / math.sqrt(np.mean(x * x) + eps)


def silu(x):
    return x / (1.0 + np.exp(-x))


class Reference:
    def __init__(self, path):
        self.meta, self.w = read_gguf(path)
        self.layers = self.key("block_count")
        self.heads = self.key("attention.head_count")
        self.kv_rank = self.key("attention.kv_lora_rank")
        self.rope = self.key("rope.dimension_count")
        self.key_dim = self.key("attention.key_length_mla", self.key("attention.key_length"))
        self.v = self.key("attention.value_length_mla", self.key("attention.value_length"))
        self.nope = self.key_dim - self.rope
        self.eps = self.key("attention.layer_norm_rms_epsilon")
        self.frequencies, mscale = self.yarn()
        self.scale = mscale * mscale / math.sqrt(self.key_dim)
        self.keys = [[] for _ in range(self.layers)]
        self.values = [[] for _ in range(self.layers)]
        self.position = 0
        self.closest = math.inf  # smallest distance of a chosen expert or group to one that was not

    def key(self, name, default=None):
        value = self.meta.get(f"deepseek2.{name}", default)
        if value is None:
            raise KeyError(name)
        return value

    def yarn(self):
        """-> (turns per position of each pair, factor of q and k)."""
        n, base = self.rope, self.key("rope.freq_base")
        plain = np.array([base ** (-2.0 * i / n) for i in range(n // 2)])
        if self.key("rope.scaling.type", "none") != "yarn":
            return plain, 1.0
        factor, context = self.key("rope.scaling.factor"), self.key("rope.scaling.original_context_length")

        def pair_with(rotations):
            return n * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(pair_with(32)), 0), min(math.ceil(pair_with(1)), n - 1)
        keep = 1.0 - np.clip((np.arange(n // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        mscale_all_dim = self.key("rope.scaling.yarn_log_multiplier") / 0.1
        return plain / factor * (1.0 - keep) + plain * keep, 0.1 * mscale_all_dim * math.log(factor) + 1.0

    def rotate(self, x):
        """Neighbours turn together."""
        pairs = x.reshape(-1, 2)
        turned = (pairs[:, 0] + 1j * pairs[:, 1]) * np.exp(1j * self.position * self.frequencies)
        return np.stack([turned.real, turned.imag], 1).reshape(-1)

    def head_maps(self, layer, h):
        """-> W_UK [nope, kv_rank], W_UV [v, kv_rank]."""
        both = self.w.get(f"blk.{layer}.attn_kv_b.weight")
        if both is not None:
            rows = both[h * (self.nope + self.v) : (h + 1) * (self.nope + self.v)]
            return rows[: self.nope], rows[self.nope :]
        return self.w[f"blk.{layer}.attn_k_b.weight"][h].T, self.w[f"blk.{layer}.attn_v_b.weight"][h]

    def attention(self, layer, x):
        b = f"blk.{layer}."
        if b + "attn_q_a.weight" in self.w:
            low = rms_norm(self.w[b + "attn_q_a.weight"] @ x, self.w[b + "attn_q_a_norm.weight"], self.eps)
            q = self.w[b + "attn_q_b.weight"] @ low
        else:
            q = self.w[b + "attn_q.weight"] @ x
        latent = self.w[b + "attn_kv_a_mqa.weight"] @ x
        c = rms_norm(latent[: self.kv_rank], self.w[b + "attn_kv_a_norm.weight"], self.eps)
        k_rope = self.rotate(latent[self.kv_rank :])
        maps = [self.head_maps(layer, h) for h in range(self.heads)]
        self.keys[layer].append([np.concatenate([uk @ c, k_rope]) for uk, _ in maps])
        self.values[layer].append([uv @ c for _, uv in maps])
        out = []
        for h in range(self.heads):
            own = q[h * self.key_dim : (h + 1) * self.key_dim]
            own = np.concatenate([own[: self.nope], self.rotate(own[self.nope :])])
            scores = np.array([own @ k[h] for k in self.keys[layer]]) * self.scale
            p = np.exp(scores - scores.max())
            p /= p.sum()
            out.append(sum(a * v[h] for a, v in zip(p, self.values[layer])))
        return self.w[b + "attn_output.weight"] @ np.concatenate(out)

    def top(self, scores, n):
        """The n best, best first; notes how close it was."""
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        if n < len(order):
            self.closest = min(self.closest, scores[order[n - 1]] - scores[order[n]])
        return order[:n]

    def experts(self, b, x):
        logits = self.w[b + "ffn_gate_inp.weight"] @ x
        if self.key("expert_gating_func") == 2:
            p = 1.0 / (1.0 + np.exp(-logits))
        else:
            p = np.exp(logits - logits.max())
            p /= p.sum()
        rank = p + self.w.get(b + "exp_probs_b.bias", np.zeros(len(p)))
        groups = self.key("expert_group_count", 1)
        if groups > 1:
            split = rank.reshape(groups, -1)
            best = self.top([sum(sorted(g)[-2:]) for g in split], self.key("expert_group_used_count"))
            for g in range(groups):
                if g not in best:
                    split[g] = -np.inf
        chosen = self.top(list(rank), self.key("expert_used_count"))
        weights = p[chosen]
        if self.key("expert_weights_norm", False):
            weights = weights / weights.sum()
        weights = weights * self.key("expert_weights_scale", 1.0)
        out = np.zeros(len(x))
        for weight, e in zip(weights, chosen):
            hidden = silu(self.w[b + "ffn_gate_exps.weight"][e] @ x) * (self.w[b + "ffn_up_exps.weight"][e] @ x)
            out += weight * (self.w[b + "ffn_down_exps.weight"][e] @ hidden)
        return out

    def feed_forward(self, layer, x):
        def gated(end):
            hidden = silu(self.w[b + f"ffn_gate{end}.weight"] @ x) * (self.w[b + f"ffn_up{end}.weight"] @ x)
            return self.w[b + f"ffn_down{end}.weight"] @ hidden

        b = f"blk.{layer}."
        if b + "ffn_gate_inp.weight" not in self.w:
            return gated("")
        shared = gated("_shexp") if b + "ffn_gate_shexp.weight" in self.w else 0.0
        return shared + self.experts(b, x)

    def token(self, token_id):
        """Logits after one more token."""
        x = self.w["token_embd.weight"][token_id].copy()
        for layer in range(self.layers):
            b = f"blk.{layer}."
            x = x + self.attention(layer, rms_norm(x, self.w[b + "attn_norm.weight"], self.eps))
            x = x + self.feed_forward(layer, rms_norm(x, self.w[b + "ffn_norm.weight"], self.eps))
        self.position += 1
        return self.w.get("output.weight", self.w["token_embd.weight"]) @ rms_norm(x, self.w["output_norm.weight"], self.eps)


if __name__ == "__main__":
    model = Reference(sys.argv[1])
    last = [model.token(int(i)) for i in sys.argv[2].split(",")][-1]
    for best in np.argsort(last)[::-1][:5]:
        print(best, last[best])
