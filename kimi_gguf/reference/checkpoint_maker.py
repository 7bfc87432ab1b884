"""Makes checkpoints in the released format of Kimi K3 and K3.1 Pro, of any size, with numpy alone.

``make_checkpoint`` writes real values; ``make_sparse_release`` writes the release's own 96 headers over files that
have the right sizes and no data, to plan at real scale on any machine.

Example:
    >>> make_checkpoint(Path("tiny"), TinyShape(layers=8, experts=32), seed=1, sharding="shuffled")  # doctest: +SKIP
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kimi_gguf.reference.checkpoint_files import generation_config, tiktoken_model, tokenizer_config
from kimi_gguf.reference.checkpoint_shape import TinyShape, checkpoint_config, released_shape
from kimi_gguf.reference.checkpoint_tensors import TensorOptions, checkpoint_tensors
from kimi_gguf.reference.checkpoint_writer import (
    LazyTensor,
    Sharding,
    shard_header,
    write_checkpoint,
    write_shard,
)

__all__ = ["TinyShape", "make_checkpoint", "make_sparse_release", "released_shape", "write_sparse_shard"]


def write_sparse_shard(path: Path, tensors: Sequence[LazyTensor]) -> None:
    """Writes a shard's header and extends the file to its true size without data (a hole on most filesystems)."""
    header = shard_header(tensors)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(t.nbytes for t in tensors))


def make_checkpoint(
    directory: Path,
    shape: TinyShape | None = None,
    *,
    seed: int = 0,
    sharding: Sharding = "layer",
    experts: Literal["mxfp4", "bf16"] = "mxfp4",
    a_log_padding: float = 0.0,
    indexer_dtype: Literal["BF16", "F32"] = "BF16",
    scale_dtype: Literal["U8", "F8_E8M0"] = "U8",
    sparse: bool = False,
    drop: Iterable[str] = (),
    config_changes: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint and returns its directory.

    The same ``shape`` and ``seed`` give the same values in every sharding, and ``experts="bf16"`` gives exactly
    the values that the MXFP4 experts decode to. One tensor is in memory at a time.

    Args:
        shape: all sizes; a small K3.1 by default.
        sharding: "layer" as released, a number of payload bytes per shard, or "shuffled".
        experts: packed, or plain BF16 matrices without ``quantization_config``.
        a_log_padding: fills the unused tail of ``A_log``.
        indexer_dtype: of the indexer's ``weights_proj`` and ``k_norm``.
        scale_dtype: of the experts' E8M0 scales.
        sparse: headers and file sizes only.
        drop: names of tensors to leave out.
        config_changes: merged into config.json's ``text_config``; None as a value removes the key.
    """
    shape = shape or TinyShape()
    dropped = frozenset(drop)
    options = TensorOptions(seed, experts, a_log_padding, indexer_dtype, scale_dtype)
    config = checkpoint_config(shape, quantized=experts == "mxfp4")
    text = config["text_config"] | dict(config_changes or {})
    config["text_config"] = {key: value for key, value in text.items() if value is not None}
    return write_checkpoint(
        directory,
        config,
        (t for t in checkpoint_tensors(shape, options) if t.name not in dropped),
        sharding=sharding,
        seed=seed,
        tiktoken_model=tiktoken_model(shape.ranks),
        extra_files={
            "tokenizer_config.json": tokenizer_config(shape),
            "generation_config.json": generation_config(shape),
        },
        write=write_sparse_shard if sparse else write_shard,
    )


def make_sparse_release(directory: Path, model: Literal["k3", "k3.1-pro"] = "k3.1-pro") -> Path:
    """The release's 96 shards as headers (75 MB) over sparse files of 1.56 TB apparent size.

    The filesystem must allow sparse files of 17 GB (ext4, xfs, btrfs, tmpfs do).
    """
    # Half a million tensors alive at once would make each collection slow, and none of them is garbage.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return make_checkpoint(directory, released_shape(model), sparse=True)
    finally:
        if collecting:
            gc.enable()
