"""What a GGUF of a tiny K3.1 checkpoint must hold, worked out apart from the converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors

from kimi_gguf.reference.checkpoint_maker import TinyShape

SHAPE = TinyShape(layers=3, layer_kinds=("kda", "kda", "mla"), experts=6)


def source_arrays(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of a checkpoint through the safetensors library; BF16 widened to float32."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        raw = safetensors.deserialize(shard.read_bytes())
        for name, entry in raw:
            data, dtype = entry["data"], entry["dtype"]
            if dtype == "BF16":
                values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                values = np.frombuffer(data, {"F32": "<f4", "U8": "u1"}[dtype])
            arrays[name] = values.reshape(entry["shape"])
    return arrays


CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def slow_mxfp4(packed: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    return CODES[codes] * np.exp2(scale.astype(np.float64) - 127).repeat(32, axis=1).astype(np.float32)


def expected_tensors(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """GGUF tensors in float32, written out by hand for the shape above."""
    found = source_arrays(directory)
    prefix = "language_model.model."
    expected = {
        "token_embd.weight": found[f"{prefix}embed_tokens.weight"],
        "output.weight": found["language_model.lm_head.weight"],
        "output_norm.weight": found[f"{prefix}norm.weight"],
        "output_res_score.weight": found[f"{prefix}output_attn_res_norm.weight"]
        * found[f"{prefix}output_attn_res_proj.weight"][0],
    }
    for layer, kind in enumerate(("kda", "kda", "mla")):
        old, new = f"{prefix}layers.{layer}.", f"blk.{layer}."
        attn = old + "self_attn."
        pairs = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        scores = {"attn_res_score": "self_attention_res", "ffn_res_score": "mlp_res"}
        for name, source in scores.items():
            expected[f"{new}{name}.weight"] = (
                found[f"{old}{source}_norm.weight"] * found[f"{old}{source}_proj.weight"][0]
            )
        if kind == "kda":
            for c in "qkv":
                pairs[f"attn_{c}"] = f"self_attn.{c}_proj"
                taps = found[f"{attn}{c}_conv1d.weight"]
                expected[f"{new}ssm_conv1d_{c}.weight"] = taps.reshape(1, -1, 1, 4)
            pairs |= {"ssm_f_a": "self_attn.f_a_proj", "ssm_f_b": "self_attn.f_b_proj", "ssm_beta": "self_attn.b_proj"}
            pairs |= {"ssm_g": "self_attn.g_proj", "ssm_norm": "self_attn.o_norm", "attn_output": "self_attn.o_proj"}
            logs = found[f"{attn}A_log"][: SHAPE.kda_heads].astype(np.float64)
            expected[f"{new}ssm_a"] = (-np.exp(logs)).astype(np.float32)
            expected[f"{new}ssm_dt.bias"] = found[f"{attn}dt_bias"]
        else:
            pairs |= {"attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm"}
            pairs |= {"attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa"}
            pairs |= {"attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_gate": "self_attn.g_proj"}
            pairs |= {"attn_output": "self_attn.o_proj", "indexer.attn_q_b": "self_attn.indexer.wq_b"}
            pairs |= {"indexer.attn_k": "self_attn.indexer.wk", "indexer.k_norm": "self_attn.indexer.k_norm"}
            pairs |= {"indexer.proj": "self_attn.indexer.weights_proj"}
            expected[f"{new}indexer.k_norm.bias"] = found[f"{attn}indexer.k_norm.bias"]
            heads = found[f"{attn}kv_b_proj.weight"].reshape(SHAPE.heads, SHAPE.nope + SHAPE.v, SHAPE.kv_lora)
            expected[f"{new}attn_k_b.weight"] = heads[:, : SHAPE.nope].transpose(0, 2, 1)
            expected[f"{new}attn_v_b.weight"] = heads[:, SHAPE.nope :]
        if layer == 0:
            pairs |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
        else:
            moe = "block_sparse_moe."
            pairs |= {f"ffn_{part}_shexp": f"{moe}shared_experts.{part}_proj" for part in ("gate", "up", "down")}
            pairs |= {f"ffn_routed_{part}": f"{moe}routed_expert_{part}_proj" for part in ("up", "down")}
            pairs |= {"ffn_routed_norm": f"{moe}routed_expert_norm", "ffn_gate_inp": f"{moe}gate"}
            expected[f"{new}exp_probs_b.bias"] = found[f"{old}{moe}gate.e_score_correction_bias"]
            for part, source in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                stem = f"{old}{moe}experts.{{}}.{source}.weight"
                stack = [
                    slow_mxfp4(found[stem.format(e) + "_packed"], found[stem.format(e) + "_scale"])
                    for e in range(SHAPE.experts)
                ]
                expected[f"{new}ffn_{part}_exps.weight"] = np.stack(stack)
        expected |= {f"{new}{name}.weight": found[f"{old}{source}.weight"] for name, source in pairs.items()}
    return expected


def read_back(path: Path) -> dict[str, tuple[Any, np.ndarray[Any, Any]]]:
    """Type and float32 values of every tensor, through the gguf library."""
    return {
        t.name: (t.tensor_type, gguf.dequantize(t.data, t.tensor_type).reshape(tuple(reversed(t.shape.tolist()))))
        for t in gguf.GGUFReader(path).tensors
    }
