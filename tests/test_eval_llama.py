"""The llama engine as a source of observations: the two engines agree, and RPC changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_support import rpc_workers

import kimi_gguf
from kimi_gguf import convert
from kimi_gguf.cli import run
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from kimi_gguf.reference.options import preset
from kimi_gguf.verify.comparison import Comparison
from kimi_gguf.verify.listeners import Compare, Quiet
from kimi_gguf.verify.llama_run import run_llama
from kimi_gguf.verify.models import open_model
from kimi_gguf.verify.observations import FullLogits, LayerObservation, Place, TokenSet
from kimi_gguf.verify.stream import StreamSettings, run_stream
from kimi_gguf.verify.text import read_tokens
from quant.errors import OutputError, UsageError

pytestmark = pytest.mark.runtime

TRAINED = Path(kimi_gguf.__file__).parent / "data" / "tiny-k31"
WORDS = ("river", "ran", "over", "stones", "and", "under", "the", "old", "bridge", "where", "nobody", "walked")


class Keep(Quiet):
    """Keeps what is seen of one model."""

    def __init__(self) -> None:
        self.layers: dict[tuple[Place, int], LayerObservation] = {}
        self.outputs: dict[Place, FullLogits] = {}

    def layer(self, place: Place, layer: int, seen: Sequence[LayerObservation]) -> None:
        self.layers[place, layer] = seen[0]

    def output(self, place: Place, logits: Sequence[FullLogits]) -> None:
        self.outputs[place] = logits[0]


def compare_engines(model: Path, text: Path, runtime: Runtime, *, tokens: int, context: int) -> Comparison:
    """llama.cpp compared with the stream engine as baseline, in llama.cpp's conventions."""
    opened = open_model(model)
    seen = read_tokens(text, opened.vocabulary, opened.store.config.vocab_size, context=context, tokens=tokens)
    stream, llama = Keep(), Keep()
    run_stream([opened], seen, stream, StreamSettings(options=replace(preset("llama.cpp"), absorbed=False)))
    run_llama([model], seen, llama, threads=1, runtime=runtime)
    comparison = Comparison(seen, opened.identity, opened.identity)
    assert stream.layers.keys() == llama.layers.keys() and stream.outputs.keys() == llama.outputs.keys()
    for (place, layer), observation in stream.layers.items():
        comparison.layer(place, layer, observation, llama.layers[place, layer])
    for place, logits in stream.outputs.items():
        comparison.output(place, logits, llama.outputs[place])
    return comparison


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    random = np.random.default_rng(2)
    path = folder / "text.txt"
    path.write_text(" ".join(random.choice(WORDS, 2000)))
    return path


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    return make_checkpoint(folder / "checkpoint", TinyShape(vision=False), seed=4)


@pytest.fixture(scope="module")
def exact(source: Path, folder: Path) -> Path:
    convert(source, quant="F32", outfile=folder / "F32.gguf")
    return folder / "F32.gguf"


@pytest.fixture(scope="module")
def tokens(exact: Path, text: Path) -> TokenSet:
    opened = open_model(exact)
    return read_tokens(text, opened.vocabulary, opened.store.config.vocab_size, context=40, tokens=130)


def test_on_float32_weights_both_engines_see_the_same(exact: Path, text: Path, runtime: Runtime) -> None:
    comparison = compare_engines(exact, text, runtime, tokens=130, context=40)
    routing, output = comparison.routing(), comparison.output_result()
    assert routing is not None and output is not None and routing.router_kl is not None
    assert routing.overlap.value >= 0.999
    assert output.perplexity_ratio.value == pytest.approx(1.0, abs=1e-3)
    assert routing.router_kl.value < 1e-6
    for layer in comparison.layers():
        assert layer.hidden_error is not None and layer.hidden_error.value < 1e-3
        assert (layer.indexer_overlap is not None) == (layer.kind == "mla")
        assert layer.indexer_overlap is None or layer.indexer_overlap.value >= 0.999
    # The last chunk of 10 tokens counts too: 4 chunks, 126 positions have a next token.
    assert comparison.scored == 126


@pytest.mark.parametrize(
    ("quant", "overlap", "ratio"),
    [("F32", 0.999, 1e-3), ("MXFP4", 0.985, 2e-3), ("Q6_K", 0.985, 2e-3), ("Q4_K_M", 0.985, 2e-3)],
)
def test_on_the_trained_model_the_engines_agree(
    quant: str, overlap: float, ratio: float, runtime: Runtime, tmp_path: Path
) -> None:
    """llama.cpp multiplies blocks with 8-bit activations, so other types agree a little less than float32."""
    model = tmp_path / "model.gguf"
    convert(TRAINED, quant=quant, outfile=model)
    comparison = compare_engines(model, TRAINED / "heldout.txt", runtime, tokens=1024, context=256)
    routing, output = comparison.routing(), comparison.output_result()
    assert routing is not None and output is not None
    assert routing.overlap.value >= overlap
    assert output.perplexity_ratio.value == pytest.approx(1.0, abs=ratio)


def test_a_chunk_longer_than_a_batch_goes_on_where_it_stopped(exact: Path, text: Path, runtime: Runtime) -> None:
    opened = open_model(exact)
    seen = read_tokens(text, opened.vocabulary, opened.store.config.vocab_size, context=560, tokens=560)
    stream, llama = Keep(), Keep()
    run_stream([opened], seen, stream, StreamSettings(options=replace(preset("llama.cpp"), absorbed=False)))
    run_llama([exact], seen, llama, threads=1, runtime=runtime)
    assert [(place.begin, place.end) for place in llama.outputs] == [(0, 512), (512, 560)]
    ours = np.concatenate([logits.values for logits in llama.outputs.values()])
    (theirs,) = (logits.values for logits in stream.outputs.values())
    assert ours.shape == theirs.shape == (559, opened.store.config.vocab_size)
    assert np.median(np.abs(ours - theirs)) < 1e-3
    second = llama.layers[Place(0, 512, 560), 3]
    assert second.selected is not None and second.selected.shape == (48, 560)
    assert (second.selected.sum(axis=1) == 16).all() and second.selected[:, :512].any()


def test_a_model_compared_with_itself_differs_nowhere(exact: Path, tokens: TokenSet, runtime: Runtime) -> None:
    identity = open_model(exact).identity
    comparison = Comparison(tokens, identity, identity)
    settings = run_llama([exact, exact], tokens, Compare(comparison), threads=1, runtime=runtime)
    routing, output = comparison.routing(), comparison.output_result()
    assert routing is not None and output is not None
    assert routing.exact.value == 1.0 and output.kl.value == 0.0 and output.perplexity_ratio.value == 1.0
    assert settings["llama_cpp"] == runtime.facts.commit and settings["rpc"] == []


def test_over_rpc_models_run_one_after_the_other_with_the_same_result(
    exact: Path, source: Path, tokens: TokenSet, runtime: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder / "Q8_0.gguf"
    convert(source, quant="Q8_0", outfile=other)
    base, model = open_model(exact).identity, open_model(other).identity
    local, remote = Comparison(tokens, base, model), Comparison(tokens, base, model)
    run_llama([exact, other], tokens, Compare(local), threads=1, runtime=runtime)
    monkeypatch.chdir(folder)
    notes: list[str] = []
    with rpc_workers(runtime, 1, folder / "worker.log") as workers:
        rpc = [endpoint for endpoint, _ in workers]
        run_llama([exact, other], tokens, Compare(remote), rpc=rpc, threads=1, note=notes.append, runtime=runtime)
    assert "one after the other" in notes[0]
    assert not list(folder.glob(".kimi-gguf-base-*"))
    here, there = local.routing(), remote.routing()
    assert here is not None and there is not None
    assert there.overlap.value == pytest.approx(here.overlap.value, abs=0.01)
    assert remote.output_result() is not None and remote.scored == local.scored == 126
    # Hidden states do not wait on disk; all else does.
    assert all(layer.hidden_error is None for layer in remote.layers())
    overlaps = [layer.indexer_overlap for layer in remote.layers() if layer.kind == "mla"]
    assert all(found is not None for found in overlaps)


def test_a_baseline_that_finds_no_room_is_refused_before_it_runs(
    exact: Path, tokens: TokenSet, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kimi_gguf.verify.llama_run.free_bytes", lambda path: 1000)
    identity = open_model(exact).identity
    listener = Compare(Comparison(tokens, identity, identity))
    with pytest.raises(OutputError, match=r"take .* bytes here, 1,000 are free"):
        run_llama([exact, exact], tokens, listener, rpc=["127.0.0.1:9"], runtime=runtime)


def test_a_text_of_another_vocabulary_is_refused(exact: Path, tokens: TokenSet, runtime: Runtime) -> None:
    with pytest.raises(UsageError, match="768 tokens, the text was read with 800"):
        run_llama([exact], replace(tokens, vocab_size=800), Keep(), threads=1, runtime=runtime)


def test_the_verb_runs_the_llama_engine(
    exact: Path, source: Path, text: Path, runtime: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("KIMI_GGUF_RUNTIME", str(runtime.root))
    page = folder / "page.html"
    arguments = ["eval", str(exact), "--baseline", str(exact), "--text", str(text), "--engine", "llama"]
    assert run([*arguments, "--tokens", "80", "--context", "40", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "llama engine" in out and "100 %" in out
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert run([*arguments[:3], str(source), *arguments[4:]]) == 2
