"""The stream engine: equal to the reference in every cut, resumable, and a GGUF beside its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from verify_support import CONTEXT, make_pair

from convert.shapes import released_config
from kimi_gguf import convert, evaluate
from kimi_gguf.cli import run
from kimi_gguf.reference.model import logits
from kimi_gguf.reference.options import Options
from kimi_gguf.verify import stream
from kimi_gguf.verify.bars import Bars
from kimi_gguf.verify.evaluation import _read_tokens
from kimi_gguf.verify.listeners import Quiet
from kimi_gguf.verify.models import OpenModel, open_model
from kimi_gguf.verify.observations import FullLogits, LayerObservation, Place, TokenSet
from kimi_gguf.verify.stream import StreamSettings, run_stream
from kimi_gguf.verify.stream_plan import MemoryPlan, plan_memory, run_bytes, run_flops
from quant.errors import InputError, KimiGgufError, OutputError, UsageError
from quant.gguf_parser import parse_gguf


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("stream"))


@pytest.fixture(scope="module")
def files(pair: tuple[Path, Path]) -> Callable[[str], Path]:
    def make(quant: str) -> Path:
        path = pair[0].parent / f"{quant}.gguf"
        if not path.exists():
            convert(pair[0], quant=quant, outfile=path)
        return path

    return make


class Everything(Quiet):
    """Keeps all that a run of one model tells."""

    def __init__(self) -> None:
        self.layers: dict[tuple[int, int], list[LayerObservation]] = {}
        self.logits: dict[int, list[FullLogits]] = {}

    def layer(self, place: Place, layer: int, seen: object) -> None:
        self.layers.setdefault((place.chunk, layer), []).append(seen[0])  # type: ignore[index]

    def output(self, place: Place, logits: object) -> None:
        self.logits.setdefault(place.chunk, []).append(logits[0])  # type: ignore[index]

    def chunk_logits(self, chunk: int) -> np.ndarray:
        return np.concatenate([one.values for one in self.logits[chunk]])


def tokens_of(model: OpenModel, text: Path, count: int = 110) -> TokenSet:
    return _read_tokens(model, text, CONTEXT, count)


def cut(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Make every memory plan as small as ``sizes`` say."""

    def small(*args: object, **kwargs: object) -> MemoryPlan:
        return replace(plan_memory(*args, **kwargs), **sizes)  # type: ignore[arg-type]

    monkeypatch.setattr(stream, "plan_memory", small)


SMALLEST = {
    "work_bytes": 1,
    "mix_tokens": 5,
    "slice_tokens": 7,
    "segment_tokens": 31,
    "output_tokens": 13,
    "chunks_together": 1,
}


@pytest.mark.parametrize("sizes", [{}, {"chunks_together": 2}, SMALLEST], ids=["whole", "two chunks", "smallest"])
def test_equals_the_reference_in_every_cut(
    pair: tuple[Path, Path], sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, **sizes)
    model = open_model(pair[0])
    tokens = tokens_of(model, pair[1])
    told = Everything()
    run_stream([model], tokens, told, StreamSettings())
    for place in tokens.places():
        seen: dict[int, tuple] = {}
        ids = torch.from_numpy(tokens.chunk_ids(place.chunk).astype(np.int64))[None]
        keep = lambda i, s, t, seen=seen: seen.update({i: (s, t)})  # noqa: E731
        expected = logits(model.store, ids, Options(), observe=keep)[0].numpy()
        assert told.chunk_logits(place.chunk) == pytest.approx(expected[:-1], abs=1e-4)
        for layer, (state, trace) in seen.items():
            parts = told.layers[place.chunk, layer]
            hidden = np.concatenate([part.hidden for part in parts])
            assert hidden == pytest.approx(state.residual[0].numpy(), abs=1e-4)
            if trace.routing is not None:
                mine = np.sort(np.concatenate([part.expert_ids for part in parts]), axis=1)
                assert (mine == np.sort(trace.routing.ids[0].numpy(), axis=1)).all()
            if trace.selection is not None:
                assert parts[0].selected is not None and (parts[0].selected == trace.selection[0].numpy()).all()


def test_mxfp4_is_its_checkpoint(pair: tuple[Path, Path], files: Callable[[str], Path]) -> None:
    report = evaluate(files("MXFP4"), baseline=pair[0], text=pair[1], context=CONTEXT, tokens=200)
    assert report.routing is not None and report.output is not None and report.divergence is not None
    assert (report.routing.exact.value, report.routing.weighted_overlap.value) == (1.0, 1.0)
    assert report.routing.router_kl is not None and report.routing.router_kl.value == 0.0
    assert (report.output.kl.value, report.output.perplexity_ratio.value) == (0.0, 1.0)
    assert report.output.kl_quantiles.p999.value == 0.0 and report.output.top1_agreement.value == 1.0
    assert report.divergence.never == report.tokens == 200
    overlaps = [layer.indexer_overlap for layer in report.layers if layer.kind == "mla"]
    assert [one.value for one in overlaps if one is not None] == [1.0, 1.0]
    assert all(layer.hidden_error is not None and layer.hidden_error.value == 0 for layer in report.layers)
    assert not report.missing and not report.below_bar


def test_rounding_shows_in_every_measure(pair: tuple[Path, Path], files: Callable[[str], Path]) -> None:
    bars = Bars(min_routing=0.999, max_kld=1e-9, max_ppl_ratio=1e9)
    report = evaluate(files("Q4_K_M"), baseline=pair[0], text=pair[1], context=CONTEXT, tokens=200, bars=bars)
    assert report.routing is not None and report.output is not None
    assert 0.1 < report.routing.exact.value < 1 and report.output.kl.value > 1e-4
    errors = [layer.hidden_error.value for layer in report.layers if layer.hidden_error is not None]
    assert len(errors) == 5 and all(0 < error < 2 for error in errors)
    assert [sentence.split()[0] for sentence in report.below_bar] == ["--min-routing", "--max-kld"]
    assert report.bars.keys() >= {"--min-routing", "--max-kld"}
    forced = evaluate(files("Q4_K_M"), baseline=pair[0], text=pair[1], context=CONTEXT, tokens=200, teacher_forced=True)
    own = [layer.hidden_error.value for layer in forced.layers if layer.hidden_error is not None]
    # Layer 0 inherits no more than the embedding's error; the last inherits that of all layers before.
    assert own[-1] < 0.7 * errors[-1]
    assert forced.routing is not None and forced.routing.exact.value > report.routing.exact.value


class Stop(Exception):
    pass


def test_resumes_after_any_layer(
    pair: tuple[Path, Path], files: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(**more: object) -> dict:
        found = evaluate(files("Q4_K_M"), baseline=pair[0], text=pair[1], context=CONTEXT, tokens=110, **more)
        return {key: value for key, value in found.to_dict().items() if key not in ("seconds", "settings")}

    expected = compare()
    for stop_at in (0, 2, 4):
        scratch = tmp_path / str(stop_at)
        with monkeypatch.context() as patched:
            original = stream._Driver._layer

            def fails(self: stream._Driver, layer: int, at: int = stop_at, original: Any = original) -> None:
                if layer == at:
                    # The layer has begun when the power goes: its own arrays are half written.
                    for lane in self.lanes:
                        lane.run_layer(layer)
                    raise Stop
                original(self, layer)

            patched.setattr(stream._Driver, "_layer", fails)
            with pytest.raises(Stop):
                compare(scratch=scratch)
        assert compare(scratch=scratch, resume=True) == expected
        assert not any(scratch.iterdir())


def test_a_run_of_something_else_is_not_resumed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = open_model(pair[0])
    tokens = tokens_of(model, pair[1])
    plan = plan_memory(model.store.config, tokens, 20 * 10**9, lanes=1, on_disk=True)
    held = stream._open_folder([model], tokens, plan, StreamSettings(scratch=tmp_path), False)
    with pytest.raises(OutputError, match="another process works in"):
        run_stream([model], tokens, Everything(), StreamSettings(scratch=tmp_path))
    held.close()
    assert held.folder is not None
    (held.folder / "kimi-gguf-run").write_text("another")
    with pytest.raises(InputError, match="holds a run of other models"):
        run_stream([model], tokens, Everything(), StreamSettings(scratch=tmp_path, resume=True))


def test_foreign_files_in_the_scratch_folder_stay(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = open_model(pair[0])
    tokens = tokens_of(model, pair[1])
    (tmp_path / "mine").write_text("precious")
    run_stream([model], tokens, Everything(), StreamSettings(scratch=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(("memory", "context"), [(8, 512), (20, 4096), (64, 4096)])
def test_the_released_model_fits_a_workstation(memory: int, context: int) -> None:
    config = released_config("k3.1-pro")
    tokens = TokenSet(np.zeros(32768, dtype=np.int32), context, config.vocab_size, "", "", "")
    plan = plan_memory(config, tokens, memory * 10**9, lanes=2, on_disk=False)
    assert plan.needed <= memory * 10**9
    assert plan.segment_tokens == 32768, "every expert is read once"


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    config = released_config("k3.1-pro")
    tokens = TokenSet(np.zeros(32768, dtype=np.int32), 4096, config.vocab_size, "", "", "")
    with pytest.raises(UsageError, match=r"--memory 4 GB is too little.* take \d"):
        plan_memory(config, tokens, 4 * 10**9, lanes=2, on_disk=False)


def test_the_forecast_counts_active_weights(pair: tuple[Path, Path]) -> None:
    config = released_config("k3.1-pro")
    tokens = TokenSet(np.zeros(2, dtype=np.int32), 2, config.vocab_size, "", "", "")
    # 104.4 billion active parameters, a multiplication and an addition each; attention over two keys is little.
    assert run_flops(config, tokens) / 2 == pytest.approx(2 * 104.37e9, rel=0.01)
    model = open_model(pair[0])
    some = tokens_of(model, pair[1])
    plan = plan_memory(model.store.config, some, 20 * 10**9, lanes=1, on_disk=False)
    stored = dict(model.store.stored())
    embedding = sum(size for name, size in stored.items() if "embed_tokens" in name or name.startswith("vision"))
    assert run_bytes(model.store, some, plan) == pytest.approx(sum(stored.values()) - embedding, rel=0.02)


def test_texts_give_the_same_tokens_from_checkpoint_and_gguf(
    pair: tuple[Path, Path], files: Callable[[str], Path]
) -> None:
    ours, theirs = open_model(pair[0]), open_model(files("MXFP4"))
    assert ours.vocabulary.digest == theirs.vocabulary.digest
    text = pair[1].read_text()
    ids = ours.vocabulary.encode(text)
    assert ids == theirs.vocabulary.encode(text)
    assert b"".join(ours.vocabulary.ranks[i] for i in ids).decode() == text


def test_logits_that_are_no_numbers_fail_the_run(
    pair: tuple[Path, Path], files: Callable[[str], Path], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.gguf"
    data = bytearray(files("MXFP4").read_bytes())
    tensor = parse_gguf(files("MXFP4")).by_name["output_norm.weight"]
    # Finite itself; its products are not.
    data[tensor.offset : tensor.offset + 4 * 64] = np.full(64, 3e38, np.float32).tobytes()
    bad.write_bytes(data)
    with pytest.raises(InputError, match=r"bad.gguf, chunk 0: \d+ logits are NaN"):
        evaluate(bad, baseline=pair[0], text=pair[1], context=CONTEXT, tokens=60)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"context": 1}, "--context 1"),
        ({"tokens": 1}, "--tokens 1"),
        ({"device": "warp"}, "--device warp"),
        ({"memory": "1M"}, "too little"),
        ({"rpc": ["h:1"]}, "--rpc needs --engine llama"),
        ({"engine": "magic"}, "unknown engine"),
        ({"text": "nowhere.txt"}, "cannot read the text"),
        ({"preset": "mine"}, "unknown preset"),
        ({"baseline": "nowhere"}, "there is no file or folder nowhere"),
        ({"engine": "llama"}, "is a checkpoint"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_runs(
    pair: tuple[Path, Path], flags: dict[str, object], says: str
) -> None:
    arguments = {"baseline": pair[0], "text": pair[1]} | flags
    with pytest.raises(KimiGgufError, match=says):
        evaluate(pair[0], **arguments)  # type: ignore[arg-type]


def test_the_verb(pair: tuple[Path, Path], files: Callable[[str], Path], tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    words = ["eval", str(files("Q4_K_M")), "--baseline", str(pair[0]), "--text", str(pair[1]), "--json"]
    words += ["--context", str(CONTEXT), "--tokens", "60", "--min-routing", "1", "--report", str(tmp_path / "r.json")]
    assert run(words) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "kimi-gguf eval" and found["engine"] == "stream" and len(found["layers"]) == 5
    assert json.loads((tmp_path / "r.json").read_text()) == found
