"""GGML block types: names, block sizes and byte counts (tables from the ``gguf`` library)."""

from __future__ import annotations

from collections.abc import Sequence

import gguf

from quant.errors import UsageError

QuantType = gguf.GGMLQuantizationType


def block_size(qtype: QuantType) -> int:
    """Number of weights in one block of ``qtype`` (1 for the float types)."""
    return int(gguf.GGML_QUANT_SIZES[qtype][0])


def block_bytes(qtype: QuantType) -> int:
    """Number of bytes of one block of ``qtype``."""
    return int(gguf.GGML_QUANT_SIZES[qtype][1])


def row_bytes(qtype: QuantType, columns: int) -> int:
    """Bytes of one row of ``columns`` weights.

    Raises:
        UsageError: ``columns`` is not a whole number of blocks.
    """
    size = block_size(qtype)
    if columns % size:
        raise UsageError(
            f"a row of {columns} weights is not a whole number of {qtype.name} blocks of {size}",
            "choose a type with smaller blocks",
        )
    return columns // size * block_bytes(qtype)


def nbytes(qtype: QuantType, shape: Sequence[int]) -> int:
    """Bytes of a tensor of ``shape`` (row-major, last axis contiguous) stored as ``qtype``."""
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    return rows * row_bytes(qtype, shape[-1])


def parse_type(name: str) -> QuantType:
    """The type called ``name``, in any case.

    Raises:
        UsageError: no such type; the message lists the names.
    """
    try:
        return gguf.GGMLQuantizationType[name.upper()]
    except KeyError:
        names = ", ".join(t.name for t in QuantType)
        raise UsageError(f"unknown tensor type {name!r}", f"known types: {names}") from None
