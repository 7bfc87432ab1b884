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


def test_libgguf_finds_nothing_to_complain_about(tmp_path: Path) -> None:
    keys = [*SCALARS, *ARRAYS, MetadataEntry("general.quantization_version", ValueType.UINT32, 2)]
    write(tmp_path / "m.gguf", keys, TENSORS)
    result = libgguf.validate_gguf(tmp_path / "m.gguf")
    assert [issue.message for issue in result.issues] == []
    assert result.file is not None
    assert [(t.name, t.nbytes) for t in result.file.tensors] == [(t.name, t.nbytes) for t in TENSORS]


def test_a_set_has_all_keys_in_its_first_file_and_three_in_the_others(tmp_path: Path) -> None:
    layouts = lay_out_split(SCALARS, TENSORS, (0, 1, 3))
    for number, layout in enumerate(layouts):
        (tmp_path / split_name("m", number, 3)).write_bytes(layout.header.ljust(layout.nbytes, b"\0"))
    whole = read_gguf_set(tmp_path / "m-00002-of-00003.gguf")
    assert [p.name for p in whole.paths] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert [t.name for t in whole.tensors] == [t.name for t in TENSORS]
    assert len(whole.headers[0].metadata) == len(SCALARS) + 3
    for number, header in enumerate(whole.headers):
        assert [(k, header.metadata[k].type, header.metadata[k].value) for k in list(header.metadata)[-3:]] == [
            ("split.no", ValueType.UINT16, number),
            ("split.count", ValueType.UINT16, 3),
            ("split.tensors.count", ValueType.INT32, 4),
        ]
        assert len(header.metadata) == 3 or number == 0
        assert header.tensors
        gguf.GGUFReader(whole.paths[number])


def test_a_single_file_carries_no_split_keys() -> None:
    (layout,) = lay_out_split(SCALARS, TENSORS, (0,))
    assert b"split." not in layout.header


def test_every_file_stays_within_the_limit_header_included() -> None:
    tensors = [TensorEntry(f"blk.{n}.attn_norm.weight", (64,), QuantType.F32) for n in range(40)]
    for limit in (1000, 1024, 1500, 4096, 20_000):
        layouts = lay_out_split(SCALARS, tensors, cut(SCALARS, tensors, limit))
        assert max(layout.nbytes for layout in layouts) <= limit or limit < 1024
    assert cut(SCALARS, tensors, None) == (0,)


def test_a_tensor_above_the_limit_gets_a_file_of_its_own() -> None:
    sizes = [64, 100_000, 64, 64]
    tensors = [TensorEntry(f"t{n}.weight", (size,), QuantType.F32) for n, size in enumerate(sizes)]
    assert cut(SCALARS, tensors, 2000) == (0, 1, 2)
    assert cut(SCALARS, tensors[1:], 2000) == (0, 1)


def test_a_value_that_does_not_fit_its_type_is_named() -> None:
    for entry in (
        MetadataEntry("k.big", ValueType.UINT16, 65536),
        MetadataEntry("k.text", ValueType.UINT32, "seven"),
        MetadataEntry("k.list", ValueType.ARRAY, [1, -1], ValueType.UINT32),
    ):
        with pytest.raises(UsageError, match=entry.key):
            header_bytes([entry], [], [])


def test_names_that_gguf_cannot_carry_are_refused() -> None:
    with pytest.raises(InputError, match="64 bytes"):
        lay_out([], [TensorEntry("n" * 64, (32,), QuantType.F32)])
    with pytest.raises(InputError, match="occurs twice"):
        lay_out([], [TENSORS[0], TENSORS[0]])
    with pytest.raises(UsageError, match="occurs twice"):
        lay_out([SCALARS[0], SCALARS[0]], [])


def test_a_missing_or_contradicting_file_of_a_set_is_named(tmp_path: Path) -> None:
    layouts = lay_out_split(SCALARS, TENSORS, (0, 2))
    first, second = (tmp_path / split_name("m", n, 2) for n in (0, 1))
    first.write_bytes(layouts[0].header.ljust(layouts[0].nbytes, b"\0"))
    with pytest.raises(InputError, match=r"m-00002-of-00002\.gguf"):
        read_gguf_set(first)
    stale = lay_out([*split_keys(1, 2, 9)], TENSORS[2:])
    second.write_bytes(stale.header.ljust(stale.nbytes, b"\0"))
    with pytest.raises(InputError, match=r"split\.tensors\.count is 9.* 4 tensors"):
        read_gguf_set(first)
    twice = lay_out([*split_keys(1, 2, 4)], TENSORS[1:3])
    second.write_bytes(twice.header.ljust(twice.nbytes, b"\0"))
    with pytest.raises(InputError, match="is also in"):
        read_gguf_set(first)
    renamed = first.rename(tmp_path / "m.gguf")
    with pytest.raises(InputError, match="the name does not"):
        read_gguf_set(renamed)
