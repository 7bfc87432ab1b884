"""Headers written by us, as gguf.GGUFReader, libgguf and our own parser read them."""

from __future__ import annotations

from pathlib import Path

import gguf
import libgguf
import numpy as np
import pytest

from convert.gguf_file import (
    MetadataEntry,
    TensorEntry,
    ValueType,
    cut,
    header_bytes,
    lay_out,
    lay_out_split,
    padded,
    split_keys,
)
from quant.errors import InputError, UsageError
from quant.gguf_parser import parse_gguf
from quant.gguf_split import read_gguf_set, split_name
from quant.types import QuantType

SCALARS = [
    MetadataEntry("general.architecture", ValueType.STRING, "kimi-k31"),
    MetadataEntry("a.u8", ValueType.UINT8, 255),
    MetadataEntry("a.i8", ValueType.INT8, -128),
    MetadataEntry("a.u16", ValueType.UINT16, 65535),
    MetadataEntry("a.i16", ValueType.INT16, -32768),
    MetadataEntry("a.u32", ValueType.UINT32, 2**32 - 1),
    MetadataEntry("a.i32", ValueType.INT32, -(2**31)),
    MetadataEntry("a.u64", ValueType.UINT64, 2**64 - 1),
    MetadataEntry("a.i64", ValueType.INT64, -(2**63)),
    MetadataEntry("a.f32", ValueType.FLOAT32, -5.0),
    MetadataEntry("a.f64", ValueType.FLOAT64, 1e-300),
    MetadataEntry("a.bool", ValueType.BOOL, True),
    MetadataEntry("a.text", ValueType.STRING, "<|open|> é"),
]
ARRAYS = [
    MetadataEntry("b.i32", ValueType.ARRAY, [0, 0, 0, 1], ValueType.INT32),
    MetadataEntry("b.bool", ValueType.ARRAY, [True, False, True], ValueType.BOOL),
    MetadataEntry("b.text", ValueType.ARRAY, ["", "a", "Ġthe", b"\xc4\xa0"], ValueType.STRING),
    MetadataEntry("b.f32", ValueType.ARRAY, np.array([1.5, -2.0], np.float32), ValueType.FLOAT32),
    MetadataEntry("b.none", ValueType.ARRAY, [], ValueType.INT32),
]
TENSORS = [
    TensorEntry("blk.0.attn_norm.weight", (40,), QuantType.F32),
    TensorEntry("blk.0.ssm_beta.weight", (3, 33), QuantType.BF16),
    TensorEntry("blk.0.ffn_up_exps.weight", (3, 5, 64), QuantType.MXFP4),
    TensorEntry("blk.0.ssm_conv1d_q.weight", (1, 8, 1, 4), QuantType.F32),
]


def write(path: Path, metadata: list[MetadataEntry], tensors: list[TensorEntry]) -> None:
    layout = lay_out(metadata, tensors)
    path.write_bytes(layout.header.ljust(layout.nbytes, b"\0"))


def test_three_readers_see_the_same_metadata(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", SCALARS + ARRAYS, TENSORS)
    ours = parse_gguf(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    for entry in SCALARS:
        assert ours.metadata[entry.key].value == entry.value
        assert ours.metadata[entry.key].type is entry.type
        assert reader.fields[entry.key].contents() == pytest.approx(entry.value)
    for entry in ARRAYS:
        expected = [v.decode() if isinstance(v, bytes) else v for v in entry.value]
        assert list(ours.metadata[entry.key].value) == expected
        assert ours.metadata[entry.key].element is entry.element
        if expected:
            assert reader.fields[entry.key].contents() == expected


def test_three_readers_see_the_same_tensors_and_the_last_byte_is_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, SCALARS, TENSORS)
    layout = lay_out(SCALARS, TENSORS)
    ours = parse_gguf(path)
    theirs = gguf.GGUFReader(path).tensors
    assert [t.name for t in ours.tensors] == [t.name for t in theirs] == [t.name for t in TENSORS]
    for entry, offset, mine, other in zip(TENSORS, layout.offsets, ours.tensors, theirs, strict=True):
        assert mine.shape == entry.shape == tuple(int(n) for n in reversed(other.shape))
        assert mine.qtype == entry.qtype == other.tensor_type
        assert mine.offset == offset == other.data_offset
        assert mine.nbytes == entry.nbytes == other.n_bytes
    assert layout.offsets[0] == len(layout.header)
    assert layout.nbytes == layout.offsets[-1] + padded(TENSORS[-1].nbytes)
