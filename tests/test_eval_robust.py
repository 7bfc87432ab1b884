"""Evaluation and imatrix under hostile or unlucky circumstances: nothing that a long run has found is lost, and what
would spoil it is named before or early."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verify_support import CONTEXT, SHAPE, identity, make_pair, token_set

from convert.shapes import released_config
from kimi_gguf import convert, evaluate, imatrix, record
from kimi_gguf.cli import run
from kimi_gguf.reference.checkpoint_maker import make_checkpoint
from kimi_gguf.verify import importance, stream, text
from kimi_gguf.verify.comparison import Comparison
from kimi_gguf.verify.models import open_model
from kimi_gguf.verify.observations import LayerObservation, Place
from kimi_gguf.verify.stream_plan import plan_memory
from kimi_gguf.verify.stream_state import StateFolder
from kimi_gguf.verify.text import read_tokens
from kimi_gguf.verify.trace import TraceWriter, trace_header
from quant.errors import InputError, OutputError, UsageError
from quant.gguf_parser import parse_gguf
from quant.imatrix import Imatrix


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("robust"))


@pytest.fixture(scope="module")
def gguf(pair: tuple[Path, Path]) -> Path:
    path = pair[0].parent / "F32.gguf"
    convert(pair[0], quant="F32", outfile=path)
    return path


def spoiled(path: Path, gguf: Path, tensor: str, value: float) -> Path:
    """A copy of ``gguf`` whose ``tensor`` begins with ``value``."""
    data = bytearray(gguf.read_bytes())
    offset = parse_gguf(gguf).by_name[tensor].offset
    data[offset : offset + 4] = np.float32(value).tobytes()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "tensor",
    ["blk.2.exp_probs_b.bias", "blk.2.ffn_gate_inp.weight", "blk.3.indexer.attn_k.weight", "output_norm.weight"],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_named(
    pair: tuple[Path, Path], gguf: Path, tmp_path: Path, tensor: str, value: float
) -> None:
    # In a router's bias or an indexer it would misroute tokens and leave every logit finite.
    bad = spoiled(tmp_path / "bad.gguf", gguf, tensor, value)
    with pytest.raises(InputError, match=f"tensor {tensor} holds values that are NaN or infinite"):
        evaluate(bad, baseline=pair[0], text=pair[1], context=CONTEXT, tokens=60)


def test_router_scores_and_hidden_states_that_are_no_numbers_fail_the_run() -> None:
    bad = np.full((10, 8), np.nan, np.float32)
    for what in ({"router_probs": bad}, {"expert_weights": bad[:, :2]}, {"hidden": bad}):
        comparison = Comparison(token_set(20, 10), identity(), identity())
        with pytest.raises(InputError, match=r"tiny, layer 1, chunk 1: .* are NaN or infinite"):
            comparison.layer(Place(1, 0, 10), 1, LayerObservation(), LayerObservation(**what))


def test_models_of_other_widths_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    wide = make_checkpoint(tmp_path / "wide", replace(SHAPE, hidden=512), seed=7)
    for teacher_forced in (False, True):
        with pytest.raises(InputError, match="differ in width of hidden states: 256 and 512"):
            evaluate(wide, baseline=pair[0], text=pair[1], tokens=60, teacher_forced=teacher_forced)


@pytest.mark.parametrize("flags", [{"scratch": "s"}, {"resume": True}, {"device": "cuda"}, {"preset": "llama.cpp"}])
def test_flags_that_llama_cpp_would_ignore_are_refused(
    gguf: Path, flags: dict[str, Any], pair: tuple[Path, Path]
) -> None:
    with pytest.raises(UsageError, match="needs --engine stream"):
        evaluate(gguf, baseline=gguf, text=pair[1], engine="llama", **flags)


def test_context_zero_is_not_the_default(pair: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="--context 0"):
        evaluate(pair[0], baseline=pair[0], text=pair[1], context=0)


def test_memory_is_that_of_the_text_where_the_context_is_longer() -> None:
    config = released_config("k3.1-pro")
    plans = [plan_memory(config, token_set(256, n), 8 * 10**9, lanes=2, on_disk=False) for n in (256, 10**6)]
    assert plans[0].work_bytes == plans[1].work_bytes


@pytest.mark.parametrize("memory", [0, "0G", "-1", "much"])
def test_an_amount_of_memory_that_is_none(pair: tuple[Path, Path], memory: str | int) -> None:
    with pytest.raises(UsageError, match=f"--memory {memory} is no amount"):
        evaluate(pair[0], baseline=pair[0], text=pair[1], memory=memory)


def test_a_result_that_could_not_be_written_is_refused_first(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        record(pair[0], text=pair[1], outfile=tmp_path)
    with pytest.raises(UsageError, match="is a folder"):
        imatrix(pair[0], text=pair[1], outfile=tmp_path)
    with pytest.raises(UsageError, match="--top 4097"):
        record(pair[0], text=pair[1], outfile=tmp_path / "t.kgtrace", top=4097)


def test_a_result_replaces_nothing_but_its_like(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "precious.gguf"
    precious.write_bytes(b"GGUF" + b"\0" * 100)
    device = Path("/dev/zero")
    for path, what in ((precious, "is there already, and is no"), (device, "is no regular file")):
        with pytest.raises(UsageError, match=what):
            record(pair[0], text=pair[1], outfile=path)
        with pytest.raises(UsageError, match=what):
            imatrix(pair[0], text=pair[1], outfile=path)
        for flag in ("--report", "--html"):
            flags = ["--baseline", str(pair[0]), "--text", str(pair[1]), flag, str(path)]
            assert run(["eval", str(pair[0]), *flags]) == 2
            assert what in capsys.readouterr().err
    assert precious.stat().st_size == 104 and device.is_char_device()
    # The same command twice is no accident.
    for _ in range(2):
        record(pair[0], text=pair[1], outfile=tmp_path / "t.kgtrace", context=CONTEXT, tokens=30)
        imatrix(pair[0], text=pair[1], outfile=tmp_path / "i.gguf", context=CONTEXT, tokens=30)
        flags = ["--baseline", str(pair[0]), "--text", str(pair[1]), "--context", str(CONTEXT), "--tokens", "30"]
        flags += ["--report", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
        assert run(["eval", str(pair[0]), *flags]) == 0


@pytest.mark.parametrize("mode", ["--json", "--quiet"])
def test_an_evaluation_whose_report_cannot_be_written_is_shown_all_the_same(
    mode: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(self: Path, *_: object, **__: object) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    flags = ["--baseline", str(pair[0]), "--text", str(pair[1]), "--context", str(CONTEXT), "--tokens", "30"]
    assert run(["eval", str(pair[0]), *flags, "--report", str(tmp_path / "r.json"), mode]) == 1
    out, err = capsys.readouterr()
    assert "the disk is full" in err and list(tmp_path.iterdir()) == []
    assert json.loads(out)["tokens"] == 30 if mode == "--json" else out.startswith("routing 1.0")


def test_a_disk_without_room_is_refused_before_anything_runs(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("kimi_gguf.verify.imatrix", "kimi_gguf.verify.trace", "kimi_gguf.verify.stream_state"):
        monkeypatch.setattr(f"{module}.free_bytes", lambda _: 1000)
    monkeypatch.setattr(stream, "forecast", lambda *_: pytest.fail("it ran"))
    with pytest.raises(OutputError, match="1,000 are free"):
        imatrix(pair[0], text=pair[1], outfile=tmp_path / "i.gguf", context=CONTEXT)
    with pytest.raises(OutputError, match="1,000 are free"):
        record(pair[0], text=pair[1], outfile=tmp_path / "t.kgtrace", context=CONTEXT)
    with pytest.raises(OutputError, match="1,000 are free"):
        StateFolder(tmp_path / "s", "k", resume=False, needed=2000)
    assert not (tmp_path / "s").exists()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size] == []
    assert not list(tmp_path.glob("*.partial"))


def test_a_torch_device_without_values_is_refused() -> None:
    with pytest.raises(UsageError, match="--device meta"):
        stream.open_device("meta")


def test_only_as_much_of_a_text_is_read_as_is_run(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = open_model(pair[0]).vocabulary
    long = tmp_path / "long.txt"
    long.write_text(pair[1].read_text() * 400)
    whole = vocabulary.encode(long.read_text())
    part = vocabulary.encode(long.read_text(), 100)
    assert 100 <= len(part) < len(whole) and part == whole[: len(part)]
    monkeypatch.setattr(text, "MAX_TEXT_BYTES", 1000)
    with pytest.raises(UsageError, match="over 1,000 bytes of text"):
        read_tokens(long, vocabulary, SHAPE.vocab, context=CONTEXT, tokens=10)
    # A text without an end is no more than one that is too long.
    with pytest.raises(UsageError, match="over 1,000 bytes of text"):
        read_tokens(Path("/dev/zero"), vocabulary, SHAPE.vocab, context=CONTEXT, tokens=10)


def test_one_trace_is_recorded_by_one_process(tmp_path: Path) -> None:
    tokens = token_set(20, 10)
    header = trace_header("stream", "official", identity(), tokens)
    first = TraceWriter(tmp_path / "t.kgtrace", header, tokens)
    with pytest.raises(OutputError, match="another process records"):
        TraceWriter(tmp_path / "t.kgtrace", header, tokens)
    first.close()
    TraceWriter(tmp_path / "t.kgtrace", header, tokens).close()


def stopped_at(monkeypatch: pytest.MonkeyPatch, layer: int, run: Callable[[], object]) -> None:
    with monkeypatch.context() as patched:
        original = stream._Driver._layer

        def stops(self: stream._Driver, at: int) -> None:
            if at == layer:
                raise Stop
            original(self, at)

        patched.setattr(stream._Driver, "_layer", stops)
        with pytest.raises(Stop):
            run()


def test_a_trace_is_resumed_under_its_own_name_only(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: dict[str, Any] = {"text": pair[1], "context": CONTEXT, "tokens": 110, "scratch": tmp_path / "s"}
    record(pair[0], outfile=tmp_path / "whole.kgtrace", **flags)
    stopped_at(monkeypatch, 3, lambda: record(pair[0], outfile=tmp_path / "a.kgtrace", **flags))
    with pytest.raises(InputError, match=r"b.kgtrace.partial is not what the interrupted run wrote"):
        record(pair[0], outfile=tmp_path / "b.kgtrace", resume=True, **flags)
    record(pair[0], outfile=tmp_path / "a.kgtrace", resume=True, **flags)
    assert (tmp_path / "a.kgtrace").read_bytes() == (tmp_path / "whole.kgtrace").read_bytes()


def kept_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Which layers are run from now on."""
    ran: list[int] = []
    original = stream._Driver._layer

    def notes(self: stream._Driver, layer: int) -> None:
        ran.append(layer)
        original(self, layer)

    with monkeypatch.context() as patched:
        patched.setattr(stream._Driver, "_layer", notes)
        yield ran


def test_a_result_that_cannot_be_stored_costs_no_layer(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: dict[str, Any] = {"text": pair[1], "context": CONTEXT, "tokens": 110, "scratch": tmp_path / "s"}
    imatrix(pair[0], outfile=tmp_path / "whole.gguf", **flags)

    def full(*args: object, **kwargs: object) -> None:
        raise OutputError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Imatrix, "save", full)
        with pytest.raises(OutputError, match="the disk is full"):
            imatrix(pair[0], outfile=tmp_path / "m.gguf", **flags)
    for ran in kept_layers(monkeypatch):
        imatrix(pair[0], outfile=tmp_path / "m.gguf", resume=True, **flags)
        assert ran == []
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_a_removal_that_is_cut_short_leaves_a_folder_that_a_run_can_use(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def begun() -> StateFolder:
        return StateFolder(tmp_path / "s", "key", resume=True, needed=1)

    held = begun()
    held.rows("m0.residual", 4, 4).write(0, np.ones((4, 4), np.float32))
    held.commit({"layer": 0}, {})
    with monkeypatch.context() as patched:

        def stops(self: StateFolder) -> None:
            raise Stop

        patched.setattr(StateFolder, "_empty", stops)
        with pytest.raises(Stop):
            held.remove()
    held.close()
    again = begun()
    assert again.journal == {}, "half a run is no run"
    again.remove()
    assert not (tmp_path / "s").exists()


def test_a_run_that_was_killed_before_it_wrote_its_key_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "kimi-gguf-run").touch()
    folder = StateFolder(tmp_path, "key", resume=True, needed=1)
    assert folder.journal == {}
    folder.close()


def test_importance_of_a_matrix_that_the_model_has_not_is_refused() -> None:
    mine = {"blk.0.attn_q.weight": importance.Sums(np.ones((1, 4)), np.ones(1))}
    theirs = {"blk.5.attn_q.weight": importance.Sums(np.ones((1, 4)), np.ones(1))}
    with pytest.raises(InputError, match=r"this model has no blk\.5\.attn_q\.weight"):
        importance.merge(mine, theirs, "other.gguf")
