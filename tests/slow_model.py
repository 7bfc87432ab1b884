"""K3.1 once more, in float64 numpy and one token at a time: an oracle that shares no code with the reference.

Weights come through the safetensors library and a decoder of its own; configuration from the raw JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

F64 = npt.NDArray[np.float64]
LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def load_tensors(directory: Path) -> dict[str, F64]:
    """Every tensor of a checkpoint as float64; packed experts decoded under the name of the plain weight."""
    raw: dict[str, npt.NDArray[Any]] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name)
                raw[name] = tensor.numpy() if str(tensor.dtype) == "torch.uint8" else tensor.double().numpy()
    out: dict[str, F64] = {}
    for name, value in raw.items():
        if name.endswith(".weight_packed"):
            scale = raw[name.replace("_packed", "_scale")].astype(int)
            codes = np.stack([value & 15, value >> 4], axis=-1).reshape(len(value), -1)
            out[name.removesuffix("_packed")] = np.array(LEVELS)[codes] * np.repeat(2.0 ** (scale - 127), 32, axis=1)
        elif not name.endswith(".weight_scale"):
            out[name] = value.astype(np.float64)
    return out


def sigmoid(x: F64) -> F64:
    return np.asarray(1 / (1 + np.exp(-x)))


def softmax(x: F64) -> F64:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def norm(x: F64, weight: F64, eps: float = 1e-5) -> F64:
    return np.asarray(weight * x / np.sqrt((x * x).mean() + eps))


def mlp(x: F64, gate: F64, up: F64, down: F64) -> F64:
    g, u = gate @ x, up @ x
    return np.asarray(down @ (4 * np.tanh(g / 4) * sigmoid(g) * 25 * np.tanh(u / 25)))


class SlowModel:
    """The model over one sequence; ``step`` takes a token and returns its logits.

    Attributes:
        chosen: experts of each (layer, token), in no order.
        selected: keys of each (layer, token) with an indexer.
    """

    def __init__(self, directory: Path) -> None:
        self.text = json.loads((directory / "config.json").read_text())["text_config"]
        self.tensors = load_tensors(directory)
        self.memory: dict[tuple[int, str], list[F64]] = {}
        self.states: dict[tuple[int, int], F64] = {}
        self.chosen: list[tuple[int, set[int]]] = []
        self.selected: list[tuple[int, set[int]]] = []

    def weight(self, name: str) -> F64:
        return self.tensors[f"language_model.model.{name}"]

    def past(self, layer: int, what: str) -> list[F64]:
        return self.memory.setdefault((layer, what), [])

    def mix(self, values: list[F64], name: str) -> F64:
        score = self.weight(f"{name}_norm.weight") * self.weight(f"{name}_proj.weight")[0]
        scores = np.array([score @ v / np.sqrt((v * v).mean() + 1e-5) for v in values])
        return np.asarray(sum(w * v for w, v in zip(softmax(scores), values, strict=True)))

    def step(self, token: int) -> F64:
        text = self.text
        r: F64 | None = self.weight("embed_tokens.weight")[token]
        blocks: list[F64] = []
        for i in range(text["num_hidden_layers"]):
            base = f"layers.{i}."
            assert r is not None
            h = self.mix([*blocks, r], f"{base}self_attention_res") if blocks else r
            if i % text["attn_res_block_size"] == 0:
                blocks.append(r)
                r = None
            x = norm(h, self.weight(f"{base}input_layernorm.weight"))
            y = self.kda(i, x) if i + 1 in text["linear_attn_config"]["kda_layers"] else self.mla(i, x)
            r = y if r is None else r + y
            h = norm(self.mix([*blocks, r], f"{base}mlp_res"), self.weight(f"{base}post_attention_layernorm.weight"))
            r = r + self.ffn(i, h)
        assert r is not None
        h = norm(self.mix([*blocks, r], "output_attn_res"), self.weight("norm.weight"))
        return np.asarray(self.tensors["language_model.lm_head.weight"] @ h)

    def kda(self, layer: int, x: F64) -> F64:
        base = f"layers.{layer}.self_attn."
        config = self.text["linear_attn_config"]
        heads, width = config["num_heads"], config["head_dim"]
        parts = {}
        for name in "qkv":
            history = self.past(layer, name)
            history.append(self.weight(f"{base}{name}_proj.weight") @ x)
            taps = self.weight(f"{base}{name}_conv1d.weight")[:, 0]
            total = np.zeros(heads * width)
            for back in range(min(4, len(history))):
                total += taps[:, 3 - back] * history[-1 - back]
            parts[name] = total * sigmoid(total)
        a = self.weight(f"{base}f_b_proj.weight") @ (self.weight(f"{base}f_a_proj.weight") @ x)
        beta = sigmoid(self.weight(f"{base}b_proj.weight") @ x)
        gate = sigmoid(self.weight(f"{base}g_proj.weight") @ x)
        out = np.zeros(heads * width)
        for h in range(heads):
            at = slice(h * width, (h + 1) * width)
            q, k, v = (parts[name][at] for name in "qkv")
            q = q / np.sqrt((q * q).sum() + 1e-6) * width**-0.5
            k = k / np.sqrt((k * k).sum() + 1e-6)
            shifted = a[at] + self.weight(f"{base}dt_bias")[at]
            decay = np.exp(self.weight(f"{base}A_log")[h])
            bound = config.get("gate_lower_bound")
            g = -decay * np.logaddexp(0, shifted) if bound is None else bound * sigmoid(decay * shifted)
            state = self.states.get((layer, h), np.zeros((width, width))) * np.exp(g)[:, None]
            state = state + beta[h] * np.outer(k, v - state.T @ k)
            self.states[layer, h] = state
            out[at] = norm(state.T @ q, self.weight(f"{base}o_norm.weight")) * gate[at]
        return np.asarray(self.weight(f"{base}o_proj.weight") @ out)

    def mla(self, layer: int, x: F64) -> F64:
        base = f"layers.{layer}.self_attn."
        text = self.text
        heads, rank = text["num_attention_heads"], text["kv_lora_rank"]
        nope, rope, width = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
        latent = norm(self.weight(f"{base}q_a_proj.weight") @ x, self.weight(f"{base}q_a_layernorm.weight"), 1e-6)
        q = (self.weight(f"{base}q_b_proj.weight") @ latent).reshape(heads, nope + rope)
        kv = self.weight(f"{base}kv_a_proj_with_mqa.weight") @ x
        expanded = self.weight(f"{base}kv_b_proj.weight") @ norm(
            kv[:rank], self.weight(f"{base}kv_a_layernorm.weight"), 1e-6
        )
        keys, shared = self.past(layer, "keys"), self.past(layer, "shared")
        keys.append(expanded.reshape(heads, nope + width))
        shared.append(kv[rank:])
        seen = self.select(layer, x, latent, len(keys))
        out = []
        for h in range(heads):
            logits = [(q[h, :nope] @ keys[s][h, :nope] + q[h, nope:] @ shared[s]) * (nope + rope) ** -0.5 for s in seen]
            weights = softmax(np.array(logits))
            out.append(sum(w * keys[s][h, nope:] for w, s in zip(weights, seen, strict=True)))
        gate = sigmoid(self.weight(f"{base}g_proj.weight") @ x)
        return np.asarray(self.weight(f"{base}o_proj.weight") @ (np.concatenate(out) * gate))

    def select(self, layer: int, x: F64, latent: F64, count: int) -> list[int]:
        if "dsa_config" not in self.text:
            return list(range(count))
        base = f"layers.{layer}.self_attn.indexer."
        heads = self.text["dsa_config"]["index_n_heads"]
        k = self.weight(f"{base}wk.weight") @ x
        k = (k - k.mean()) / np.sqrt(k.var() + 1e-5)
        keys = self.past(layer, "index")
        keys.append(k * self.weight(f"{base}k_norm.weight") + self.weight(f"{base}k_norm.bias"))
        q = (self.weight(f"{base}wq_b.weight") @ latent).reshape(heads, -1)
        w = self.weight(f"{base}weights_proj.weight") @ x
        scores = [sum(w[h] * max(0.0, q[h] @ key) for h in range(heads)) for key in keys]
        best = sorted(range(count), key=lambda s: -scores[s])[: self.text["dsa_config"]["index_topk"]]
        self.selected.append((layer, set(best)))
        return sorted(best)

    def ffn(self, layer: int, x: F64) -> F64:
        base = f"layers.{layer}."
        if layer < self.text["first_k_dense_replace"]:
            return mlp(x, *(self.weight(f"{base}mlp.{p}_proj.weight") for p in ("gate", "up", "down")))
        base += "block_sparse_moe."
        scores = sigmoid(self.weight(f"{base}gate.weight") @ x)
        biased = scores + self.weight(f"{base}gate.e_score_correction_bias")
        chosen = np.argsort(-biased)[: self.text["num_experts_per_token"]]
        self.chosen.append((layer, set(chosen.tolist())))
        z = self.weight(f"{base}routed_expert_down_proj.weight") @ x
        total = np.zeros_like(z)
        for e in chosen:
            expert = [self.weight(f"{base}experts.{e}.{part}.weight") for part in ("w1", "w3", "w2")]
            total += scores[e] / scores[chosen].sum() * mlp(z, *expert)
        y = self.weight(f"{base}routed_expert_up_proj.weight") @ norm(
            total, self.weight(f"{base}routed_expert_norm.weight")
        )
        shared = (self.weight(f"{base}shared_experts.{p}_proj.weight") for p in ("gate", "up", "down"))
        return np.asarray(y + mlp(x, *shared))
