"""Cases on which upstream's own kimi-k31 was asked for log-probabilities, and its frozen answers.

Each model is made from a seed (see ``gguf_maker``), so only the answers are stored. ``scripts/oracle`` asks upstream.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from convert.config import ModelConfig, parse_config
from convert.gguf_file import MetadataEntry
from kimi_gguf.reference.checkpoint_shape import TinyShape, checkpoint_config
from kimi_gguf.reference.gguf_maker import byte_text, make_gguf
from quant.errors import InputError
from quant.gguf_parser import parse_gguf

PROMPT_TOKENS = 640
ROWS = 8

_SMALL = TinyShape(
    hidden=128,
    vocab=512,
    context=1024,
    kda_heads=4,
    kda_head_dim=64,
    heads=4,
    q_lora=64,
    kv_lora=64,
    nope=32,
    rope=16,
    v=32,
    ffn_dense=256,
    experts=16,
    used=4,
    shared=1,
    expert_width=64,
    latent=64,
    index_heads=8,
    index_head_dim=32,
)
_RELEASED_HEADS = replace(
    _SMALL,
    kda_heads=2,
    kda_head_dim=128,
    heads=2,
    nope=128,
    rope=64,
    v=128,
    kv_lora=128,
    index_heads=32,
    index_head_dim=128,
)


@dataclass(frozen=True, slots=True)
class OracleCase:
    """A model and a prompt.

    Attributes:
        name: of the case, and of its file of answers.
        shape: sizes of the model.
        seed: of weights and prompt.
        indexer_layers: MLA layers that have an indexer; None for all.
        layer_norm_epsilon: of the indexer keys; None leaves the key as ``convert`` writes it.
    """

    name: str
    shape: TinyShape
    seed: int
    indexer_layers: tuple[int, ...] | None = None
    layer_norm_epsilon: float | None = None

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        config = parse_config(json.dumps(checkpoint_config(self.shape)).encode())
        if config.dsa is None or self.indexer_layers is None:
            return config
        return replace(config, dsa=replace(config.dsa, layers=self.indexer_layers))

    @property
    def prompt(self) -> str:
        """ASCII text whose token ids are its byte values."""
        return byte_text(PROMPT_TOKENS, self.seed)

    def make(self, path: Path) -> Path:
        """Write the model, float32."""
        keys: dict[str, MetadataEntry] = {}
        if self.layer_norm_epsilon is not None:
            key = f"{self.config.arch}.attention.layer_norm_epsilon"
            keys[key] = MetadataEntry(key, gguf.GGUFValueType.FLOAT32, self.layer_norm_epsilon)
        return make_gguf(path, self.config, seed=self.seed, keys=keys)


CASES = (
    OracleCase("k3", replace(_SMALL, k31=False), 11),
    OracleCase("k31_top8", replace(_SMALL, index_topk=8), 12),
    OracleCase("k31_top64", replace(_SMALL, index_topk=64), 13),
    OracleCase("k31_top2048", replace(_SMALL, index_topk=2048), 14),
    OracleCase("k31_shared_selection", replace(_SMALL, index_topk=16), 15, indexer_layers=(3,)),
    OracleCase("k31_layer_norm_epsilon", replace(_SMALL, index_topk=16), 16, layer_norm_epsilon=0.5),
    OracleCase("k31_released_heads", replace(_RELEASED_HEADS, index_topk=64), 17),
    OracleCase("k31_nine_layers", replace(_SMALL, layers=9, attn_res_block=3, index_topk=32), 18),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What upstream said: after the prompt, and after each of its likeliest tokens.

    Attributes:
        upstream: the build that was asked.
        model: ``model_digest`` of the model that it ran.
        tokens: the likeliest token of each row, I32 [rows].
        ids: the 64 likeliest tokens of each row, I32 [rows, 64].
        log_probs: their natural log-probabilities, F64 [rows, 64].
    """

    upstream: str
    model: str
    tokens: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float64]

    def to_json(self) -> dict[str, Any]:
        """As plain values; log-probabilities keep six decimals."""
        rounded = [[round(x, 6) for x in row] for row in self.log_probs.tolist()]
        rows = zip(self.tokens.tolist(), self.ids.tolist(), rounded, strict=True)
        return {
            "upstream": self.upstream,
            "model": self.model,
            "rows": [{"token": token, "ids": ids, "log_probs": probs} for token, ids, probs in rows],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Answer:
        """Inverse of ``to_json``."""
        rows = value["rows"]
        return cls(
            value["upstream"],
            value["model"],
            np.array([row["token"] for row in rows], np.int32),
            np.array([row["ids"] for row in rows], np.int32),
            np.array([row["log_probs"] for row in rows], np.float64),
        )


def load_answer(folder: Path, case: OracleCase) -> Answer:
    """The frozen answer of ``case``.

    Raises:
        InputError: it is missing.
    """
    path = folder / f"{case.name}.json"
    if not path.is_file():
        raise InputError(f"{path} is missing", "ask upstream again: see scripts/oracle/freeze.py")
    return Answer.from_json(json.loads(path.read_text(encoding="utf-8")))


def model_digest(path: Path) -> str:
    """SHA-256 over the architecture's keys and all tensors, in order of their names."""
    header = parse_gguf(path)
    arch = header.get_str("general.architecture")
    total = hashlib.sha256()
    for key in sorted(k for k in header.metadata if k.startswith(f"{arch}.")):
        found = header.metadata[key].value
        value = found.tolist() if isinstance(found, np.ndarray) else found
        total.update(f"{key}={value!r}\n".encode())
    with path.open("rb") as file:
        for tensor in sorted(header.tensors, key=lambda t: t.name):
            total.update(f"{tensor.name} {tensor.shape} {tensor.qtype.name}\n".encode())
            file.seek(tensor.offset)
            total.update(file.read(tensor.nbytes))
    return total.hexdigest()
