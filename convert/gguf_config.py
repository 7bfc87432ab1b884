"""A ModelConfig read back from the keys of a kimi-k3 or kimi-k31 GGUF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert.config import Arch, DsaConfig, KdaConfig, LayerKind, MlaConfig, ModelConfig, MoeConfig
from quant.gguf_cursor import StringArray
from quant.gguf_parser import GgufValue

_FEWEST_TENSORS_PER_LAYER = 10
_MOST_LAYERS = 512
_GATINGS = {1: "softmax", 2: "sigmoid"}


def kind_of(value: Any) -> str:
    """Type of a metadata value in words: ``UINT32``, ``array of INT32``."""
    return str(value.type.name) if value.element is None else f"array of {value.element.name}"


class KeyReader:
    """The keys of one architecture, read as a config; what is absent or of another kind is collected in ``faults``.

    Args:
        arch: the architecture; its keys begin with this word.
        metadata: all keys of the file.
        n_tensors: tensors in the file, which bound the number of layers that a key may claim.
    """

    def __init__(self, arch: Arch, metadata: Mapping[str, GgufValue], n_tensors: int) -> None:
        self.arch = arch
        self.metadata = metadata
        self.n_tensors = n_tensors
        self.faults: list[str] = []

    def config(self, *, latent_norm: bool) -> ModelConfig | None:
        """The config that the keys state; None when ``faults`` holds a reason.

        Args:
            latent_norm: the file has the optional norm of the routed experts' sum.
        """
        kinds = self._layer_kinds()
        kv_lora = self._integer("attention.kv_lora_rank")
        rope = self._integer("rope.dimension_count")
        heads = self._integer("attention.head_count")
        gating = _GATINGS.get(self._integer("expert_gating_func"))
        if gating is None:
            self._note("expert_gating_func", "is neither 1 (softmax) nor 2 (sigmoid)")
        config = ModelConfig(
            arch=self.arch,
            n_layers=len(kinds),
            hidden=self._integer("embedding_length"),
            vocab_size=self._vocab_size(),
            context_length=self._integer("context_length"),
            rms_norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            layer_kinds=kinds,
            dense_layers=self._integer("leading_dense_block_count"),
            ffn_dense=self._integer("feed_forward_length"),
            kda=KdaConfig(
                heads=heads,
                head_dim=self._integer("kda.head_dim"),
                conv_kernel=self._integer("ssm.conv_kernel"),
                gate_lower_bound=self._optional_number("kda.gate_lower_bound"),
                full_rank_gate=True,
            ),
            mla=MlaConfig(
                heads=heads,
                q_lora=self._integer("attention.q_lora_rank"),
                kv_lora=kv_lora,
                nope=self._integer("attention.key_length_mla") - rope,
                rope=rope,
                v=self._integer("attention.value_length_mla"),
                output_gate=True,
            ),
            moe=self._moe(latent_norm, "softmax" if gating == "softmax" else "sigmoid"),
            situ_beta=self._number("activation.situ_beta"),
            situ_linear_beta=self._number("activation.situ_linear_beta"),
            attn_res_block=self._integer("attn_res.block_size"),
            dsa=self._dsa(kinds),
            bos=None,
            eos=None,
            pad=None,
            tie_embeddings=False,
        )
        return None if self.faults else config

    def _moe(self, latent_norm: bool, gating: Any) -> MoeConfig:
        norm = self._get("expert_weights_norm")
        return MoeConfig(
            experts=self._integer("expert_count"),
            used=self._integer("expert_used_count"),
            shared=self._integer("expert_shared_count"),
            width=self._integer("expert_feed_forward_length"),
            latent=self._integer("expert_latent_length"),
            latent_norm=latent_norm,
            renormalize=norm.value is True if norm else True,
            scaling=self._optional_number("expert_weights_scale") or 1.0,
            gating=gating,
            groups=self._optional_integer("expert_group_count"),
            groups_used=self._optional_integer("expert_group_used_count"),
        )

    def _dsa(self, kinds: Sequence[LayerKind]) -> DsaConfig | None:
        if self.arch != "kimi-k31":
            return None
        types = self._get("attention.indexer.types")
        flags = [True] * len(kinds) if types is None else self._array(types)
        if flags is None or len(flags) != len(kinds):
            self.faults.append(
                f"the key {self.arch}.attention.indexer.types is not one flag for each of {len(kinds)} layers"
            )
            flags = [True] * len(kinds)
        layers = tuple(i for i, kind in enumerate(kinds) if kind == "mla" and flags[i])
        return DsaConfig(
            heads=self._integer("attention.indexer.head_count"),
            head_dim=self._integer("attention.indexer.key_length"),
            top_k=self._integer("attention.indexer.top_k"),
            layers=layers,
        )

    def _layer_kinds(self) -> tuple[LayerKind, ...]:
        count = self._integer("block_count")
        if count * _FEWEST_TENSORS_PER_LAYER > self.n_tensors or count > _MOST_LAYERS:
            self.faults.append(f"{self.n_tensors} tensors cannot be {count} layers; llama.cpp takes {_MOST_LAYERS}")
            return ()
        heads = self._get("attention.head_count_kv")
        flags = None if heads is None else self._array(heads)
        if flags is None or len(flags) != count:
            self.faults.append(
                f"the key {self.arch}.attention.head_count_kv is not one number for each of {count} layers"
            )
            return ()
        return tuple("mla" if flag else "kda" for flag in flags)

    def _vocab_size(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        count = len(tokens.value) if tokens is not None and isinstance(tokens.value, StringArray) else 0
        return self._optional_integer("vocab_size") or count

    def _note(self, key: str, what: str) -> None:
        self.faults.append(f"the key {self.arch}.{key} {what}")

    def _get(self, key: str) -> GgufValue | None:
        return self.metadata.get(f"{self.arch}.{key}")

    def _array(self, value: GgufValue) -> list[Any] | None:
        return value.value.tolist() if isinstance(value.value, np.ndarray) else None

    def _integer(self, key: str) -> int:
        """The integer under ``key``; a stand-in of 1, after noting it, when there is none."""
        value = self._optional_integer(key)
        if value is None:
            found = self._get(key)
            what = "is missing" if found is None else f"is {kind_of(found)}, llama.cpp expects UINT32"
            self._note(key, what)
        return 1 if value is None else value

    def _optional_integer(self, key: str) -> int | None:
        found = self._get(key)
        if found is None or isinstance(found.value, bool) or not isinstance(found.value, int):
            return None
        return found.value

    def _number(self, key: str) -> float:
        value = self._optional_number(key)
        if value is None:
            self._note(key, "is missing or no FLOAT32")
        return 1.0 if value is None else value

    def _optional_number(self, key: str) -> float | None:
        found = self._get(key)
        return found.value if found is not None and isinstance(found.value, float) else None
