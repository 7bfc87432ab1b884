"""Importance matrices: both forms as libgguf reads them, per-expert slices, neutral experts, and hostile files."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import gguf
import libgguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quant.errors import InputError
from quant.imatrix import Imatrix
from quant.imatrix_file import MAX_NAME_BYTES

EXPS = "blk.1.ffn_down_exps.weight"
DENSE = "blk.0.attn_q.weight"
HEADS = "blk.3.attn_k_b.weight"
Entries = dict[str, tuple[np.ndarray, np.ndarray]]


def entries() -> Entries:
    """A dense matrix, a stack of 3 experts of which the second was never hit, and a flat stack of 4 heads."""
    rng = np.random.default_rng(0)
    sums = rng.random((3, 64), dtype=np.float32) * 100
    sums[1] = 0
    return {
        EXPS: (sums, np.array([7, 0, 512], np.float32)),
        DENSE: (rng.random((1, 32), dtype=np.float32), np.array([3], np.float32)),
        HEADS: (rng.random((1, 4 * 16), dtype=np.float32), np.array([5], np.float32)),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "imatrix.gguf"
    Imatrix.save(path, entries(), datasets=["a.txt", "b.txt"], chunk_count=12, chunk_size=512)
    return path


def legacy(content: dict[str, tuple[int, np.ndarray]], chunks: int | None = 9, dataset: bytes = b"wiki.txt") -> bytes:
    out = struct.pack("<i", len(content))
    for name, (calls, values) in content.items():
        raw = name.encode()
        out += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", calls, len(values))
        out += values.astype("<f4").tobytes()
    return out if chunks is None else out + struct.pack("<ii", chunks, len(dataset)) + dataset


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_the_gguf_form_reads_back_with_its_facts(saved: Path) -> None:
    imatrix = Imatrix.load(saved)
    assert imatrix.datasets == ("a.txt", "b.txt") and imatrix.chunk_count == 12
    assert sorted(imatrix.names) == sorted([DENSE, EXPS, HEADS]) and EXPS in imatrix and "x" not in imatrix
    assert imatrix.sha256 == hashlib.sha256(saved.read_bytes()).hexdigest()


def test_sums_are_divided_by_counts_per_expert(saved: Path) -> None:
    sums, counts = entries()[EXPS]
    importance = Imatrix.load(saved).importance(EXPS, (3, 128, 64))
    assert importance is not None and importance.shape == (3, 64) and importance.dtype == np.float32
    np.testing.assert_array_equal(importance[0], sums[0] / counts[0])
    np.testing.assert_array_equal(importance[2], sums[2] / counts[2])


def test_an_expert_that_was_never_hit_gets_neutral_weights_and_is_counted(saved: Path) -> None:
    imatrix = Imatrix.load(saved)
    importance = imatrix.importance(EXPS, (3, 128, 64))
    assert importance is not None and (importance[1] == 1).all()
    coverage = imatrix.coverage
    assert (coverage.tensors, coverage.experts, dict(coverage.neutral)) == (3, 3, {EXPS: 1})


def test_an_expert_without_any_activation_is_neutral_whatever_its_count(tmp_path: Path) -> None:
    Imatrix.save(tmp_path / "i", {EXPS: (np.zeros((2, 32), np.float32), np.array([4, 4], np.float32))})
    imatrix = Imatrix.load(tmp_path / "i")
    assert dict(imatrix.coverage.neutral) == {EXPS: 2}
    assert (imatrix.importance(EXPS, (2, 8, 32)) == 1).all()  # type: ignore[union-attr]


def test_one_count_may_stand_for_all_heads_of_a_flat_stack(saved: Path) -> None:
    sums, _ = entries()[HEADS]
    importance = Imatrix.load(saved).importance(HEADS, (4, 512, 16))
    np.testing.assert_array_equal(importance, sums.reshape(4, 16) / np.float32(5))


def test_one_expert_can_be_read_alone(saved: Path) -> None:
    imatrix = Imatrix.load(saved)
    for name, shape in ((EXPS, (3, 128, 64)), (HEADS, (4, 512, 16)), (DENSE, (8, 32))):
        whole = imatrix.importance(name, shape)
        assert whole is not None
        for expert, row in enumerate(whole):
            np.testing.assert_array_equal(imatrix.importance_of(name, shape, expert), row)


def test_libgguf_reads_the_same_importance(saved: Path, tmp_path: Path) -> None:
    old = write(tmp_path / "old.dat", legacy({DENSE: (4, np.arange(32.0)), EXPS: (2, np.arange(192.0))}))
    for path in (saved, old):
        ours, judged = Imatrix.load(path), libgguf.load_imatrix(path)
        assert sorted(judged) == sorted(ours.names)
        for name, shape in ((EXPS, (3, 128, 64)), (HEADS, (4, 512, 16)), (DENSE, (8, 32))):
            if name in judged:
                np.testing.assert_array_equal(ours.importance(name, shape), judged[name].reshape(-1, shape[-1]))


def test_the_gguf_form_is_what_llama_imatrix_writes(saved: Path) -> None:
    reader = gguf.GGUFReader(saved)
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["a.txt", "b.txt"]
    assert (reader.fields["imatrix.chunk_count"].contents(), reader.fields["imatrix.chunk_size"].contents()) == (
        12,
        512,
    )
    shapes = {t.name: t.shape.tolist() for t in reader.tensors}
    assert shapes[f"{EXPS}.in_sum2"] == [64, 3] and shapes[f"{EXPS}.counts"] == [1, 3]


def test_the_legacy_form_divides_by_its_calls(tmp_path: Path) -> None:
    path = write(tmp_path / "i.dat", legacy({DENSE: (4, np.arange(32.0)), EXPS: (0, np.arange(1.0, 65.0))}))
    imatrix = Imatrix.load(path)
    assert (imatrix.datasets, imatrix.chunk_count) == (("wiki.txt",), 9)
    assert imatrix.importance(DENSE, (8, 32))[0, 4] == 1.0  # type: ignore[index]
    np.testing.assert_array_equal(imatrix.importance_of(EXPS, (2, 8, 32), 1), np.arange(33.0, 65.0))


def test_the_trailer_of_the_legacy_form_is_optional(tmp_path: Path) -> None:
    imatrix = Imatrix.load(write(tmp_path / "i.dat", legacy({DENSE: (1, np.ones(32))}, chunks=None)))
    assert (imatrix.datasets, imatrix.chunk_count) == ((), 0)


def test_a_tensor_without_entry_has_no_importance(saved: Path) -> None:
    imatrix = Imatrix.load(saved)
    assert imatrix.importance("blk.7.attn_q.weight", (8, 32)) is None
    assert imatrix.importance_of("blk.7.attn_q.weight", (8, 32), 0) is None


def test_a_wrong_length_names_the_tensor_and_both_numbers(saved: Path) -> None:
    with pytest.raises(InputError, match=f"{EXPS} has 192 values, but the tensor has 256"):
        Imatrix.load(saved).check(EXPS, (4, 128, 64))


def test_an_embedding_entry_of_another_length_is_left_aside(tmp_path: Path) -> None:
    Imatrix.save(tmp_path / "i", {"token_embd.weight": (np.ones((1, 8), np.float32), np.ones(1, np.float32))})
    assert Imatrix.load(tmp_path / "i").importance("token_embd.weight", (100, 64)) is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.5])
def test_a_value_that_cannot_be_names_tensor_expert_and_column(tmp_path: Path, value: float) -> None:
    content = entries()
    content[EXPS][0][2, 40] = value
    Imatrix.save(tmp_path / "i.gguf", content)
    with pytest.raises(InputError, match=f"{EXPS}, expert 2, column 40: "):
        Imatrix.load(tmp_path / "i.gguf")
    flat = content[EXPS][0].reshape(-1)
    old = write(tmp_path / "i.dat", legacy({EXPS: (1, flat)}))
    with pytest.raises(InputError, match=f"{EXPS}, expert 2, column 40: "):
        Imatrix.load(old, columns={EXPS: 64})


@pytest.mark.parametrize("count", [np.nan, np.inf, -1.0])
def test_a_count_that_cannot_be_is_refused(tmp_path: Path, count: float) -> None:
    content = entries()
    content[EXPS][1][1] = count
    Imatrix.save(tmp_path / "i.gguf", content)
    with pytest.raises(InputError, match=f"the count of {EXPS}, expert 1, is"):
        Imatrix.load(tmp_path / "i.gguf")


def gguf_with(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "anything")
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x.weight": np.ones(32, np.float32)}, "holds no importance matrix"),
        ({"x.in_sum2": np.ones(32, np.float32)}, "has no F32 tensor x.counts beside it"),
        ({"x.in_sum2": np.ones(32, np.float32), "x.counts": np.ones(1, np.float16)}, "has no F32 tensor x.counts"),
        ({"x.in_sum2": np.ones(32, np.float32), "x.counts": np.ones(5, np.float32)}, "5 counts do not divide"),
    ],
)
def test_gguf_files_that_are_no_importance_matrix_are_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Imatrix.load(gguf_with(tmp_path / "x.gguf", tensors))


GOOD = legacy({DENSE: (4, np.arange(32.0))})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "needs 4 bytes at offset 0"),
        (struct.pack("<i", -1), "not an importance matrix"),
        (struct.pack("<i", 0) + GOOD, "not an importance matrix"),
        (struct.pack("<i", 2**31 - 1) + GOOD, "not an importance matrix"),
        (struct.pack("<ii", 1, 2**31 - 1) + GOOD, f"up to {MAX_NAME_BYTES} are allowed"),
        (struct.pack("<ii", 1, -5) + GOOD, "has -5 bytes"),
        (struct.pack("<ii1sii", 1, 1, b"x", 1, 2**31 - 1) + GOOD, "the values of x needs 8589934588 bytes"),
        (struct.pack("<ii1sii", 1, 1, b"x", 1, -1) + GOOD, "x claims -1 values"),
        (struct.pack("<ii1siif", 2, 1, b"x", 1, 1, 1) * 2, "called ''|called 'x'|needs|bytes"),
        (GOOD[:-1], "the name of the data set needs 8 bytes"),
    ],
)
def test_hostile_legacy_files_are_refused_without_trusting_a_length(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Imatrix.load(write(tmp_path / "i.dat", data))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD)))
def test_a_damaged_legacy_file_is_read_or_refused_but_never_crashes(
    tmp_path: Path, place: int, byte: int, end: int
) -> None:
    data = bytearray(GOOD)
    data[place] = byte
    path = write(tmp_path / "fuzz.dat", bytes(data[:end]))
    try:
        imatrix = Imatrix.load(path)
        imatrix.importance(DENSE, (8, 32))
    except InputError as error:
        assert str(path.name) in str(error)


def test_what_is_not_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "missing"):
        with pytest.raises(InputError, match="is not a file"):
            Imatrix.load(path)


def test_a_file_that_changes_after_it_was_checked_is_not_used(saved: Path) -> None:
    imatrix = Imatrix.load(saved)
    content = entries()
    content[DENSE][0][0, 0] = -1
    Imatrix.save(saved, content)
    with pytest.raises(InputError, match="changed since it was opened"):
        imatrix.importance(DENSE, (8, 32))
