"""Traces: what they give, how close, what they refuse, and hostile files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_support import CONTEXT, identity, make_pair, token_set

from convert.shapes import released_config
from kimi_gguf import convert, evaluate, record
from kimi_gguf.verify.measures import log_softmax, output_measures
from kimi_gguf.verify.observations import F32Array, FullLogits, LayerObservation, Place, TokenSet
from kimi_gguf.verify.result import EvalReport
from kimi_gguf.verify.trace import LIVE_ONLY, TraceReader, TraceWriter, trace_header
from kimi_gguf.verify.trace_format import pack_experts, unpack_experts
from quant.errors import InputError, KimiGgufError, UsageError

VOCAB = 3000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Path]:
    """Checkpoint, text, a quantized GGUF, and a trace of the checkpoint."""
    folder = tmp_path_factory.mktemp("trace")
    checkpoint, text = make_pair(folder)
    gguf, trace = folder / "q.gguf", folder / "base.kgtrace"
    convert(checkpoint, quant="Q4_K_M", outfile=gguf)
    record(checkpoint, text=text, outfile=trace, context=CONTEXT, tokens=200)
    return checkpoint, text, gguf, trace


def words(count: int, sharpness: float, seed: int) -> tuple[F32Array, F32Array]:
    """Logits as language has them, few likely tokens and a long tail, and a disturbed copy."""
    rng = np.random.default_rng(seed)
    ranks = np.log(1 + rng.permuted(np.tile(np.arange(VOCAB), (count, 1)), axis=1))
    base = -sharpness * ranks + rng.normal(size=(count, VOCAB)) * 0.5
    model = base + rng.normal(size=(count, VOCAB)) * 0.2
    return base.astype(np.float32), model.astype(np.float32)


def write(folder: Path, tokens: TokenSet, logits: F32Array) -> Path:
    """A trace of a model of one MoE layer; token i has row i of ``logits``."""
    model = identity(layers=2)
    writer = TraceWriter(folder / "t.kgtrace", trace_header("stream", "official", model, tokens), tokens)
    for place in tokens.places():
        n = place.end
        ids = np.tile(np.array([[3, 5]], dtype=np.int32), (n, 1))
        weights = np.tile(np.array([[0.25, 0.75]], dtype=np.float32), (n, 1))
        writer.layer(place, 1, LayerObservation(ids, weights))
        where = tokens.index(place)
        writer.output(place, FullLogits(logits[where.start : where.stop - 1]))
    return writer.finish()


@pytest.mark.parametrize("sharpness", [1.2, 2.0, 4.0])
def test_divergence_from_a_trace_is_that_of_the_whole_vocabulary(tmp_path: Path, sharpness: float) -> None:
    tokens = token_set(400, 100, VOCAB)
    base, model = words(400, sharpness, seed=1)
    trace = TraceReader(write(tmp_path, tokens, base))
    full, kept = [], []
    for place in tokens.places():
        where = tokens.index(place)
        rows = slice(where.start, where.stop - 1)
        targets = tokens.targets(place)
        full.append(output_measures(FullLogits(base[rows]), FullLogits(model[rows]), targets))
        kept.append(output_measures(trace.output(tokens, place), FullLogits(model[rows]), targets))
    a, b = (np.concatenate([found["kl"] for found in side]) for side in (full, kept))
    assert (b >= 0).all()
    # The stated error: 1 % of the mean over a few hundred tokens.
    assert b.mean() == pytest.approx(a.mean(), rel=0.01)
    for name in ("base_nll", "probability_square"):
        assert np.concatenate([x[name] for x in kept]) == pytest.approx(
            np.concatenate([x[name] for x in full]), abs=1e-5
        )
    assert [x["top1"].tolist() for x in kept] == [x["top1"].tolist() for x in full]


def test_a_model_beside_its_own_trace_diverges_by_rounding_only(tmp_path: Path) -> None:
    tokens = token_set(200, 100, VOCAB)
    base, _ = words(200, 2.0, seed=2)
    trace = TraceReader(write(tmp_path, tokens, base))
    found = output_measures(
        trace.output(tokens, Place(0, 0, 100)), FullLogits(base[:99]), tokens.targets(Place(0, 0, 100))
    )
    assert found["kl"].max() < 3e-6


def test_what_a_trace_gives_and_what_needs_a_live_baseline(pair: tuple[Path, Path, Path, Path]) -> None:
    checkpoint, text, gguf, trace = pair
    live = evaluate(gguf, baseline=checkpoint, text=text, context=CONTEXT, tokens=200)
    kept = evaluate(gguf, baseline=trace, text=text)
    assert (kept.baseline_kind, kept.tokens, kept.context) == ("trace", 200, CONTEXT)
    assert kept.divergence == live.divergence
    assert [(a.base_load, a.model_load) for a in kept.layers] == [(a.base_load, a.model_load) for a in live.layers]
    assert kept.routing is not None and live.routing is not None
    for name in ("exact", "overlap", "top1_changed"):
        assert getattr(kept.routing, name) == getattr(live.routing, name)
    assert kept.routing.weighted_overlap.value == pytest.approx(live.routing.weighted_overlap.value, abs=2e-3)
    assert kept.output is not None and live.output is not None and kept.output.from_trace
    assert kept.output.kl.value == pytest.approx(live.output.kl.value, rel=0.02)
    for name in ("base_perplexity", "model_perplexity", "perplexity_ratio", "top1_agreement", "probability_rms"):
        assert getattr(kept.output, name).value == pytest.approx(getattr(live.output, name).value, rel=1e-5)
    assert absent(kept) == {name for name in LIVE_ONLY if name != "teacher_forced"} == set(kept.missing)
    assert not absent(live)


def absent(report: EvalReport) -> set[str]:
    """Measures of layers that no layer has."""
    assert report.routing is not None
    found = {name for name in ("indexer_overlap", "hidden_error", "hidden_cosine")
             if all(getattr(layer, name) is None for layer in report.layers)}  # fmt: skip
    return found | {field.name for field in fields(report.routing) if getattr(report.routing, field.name) is None}


def test_a_token_of_the_released_model_takes_about_4_kb() -> None:
    config = released_config("k3.1-pro")
    model = replace(
        identity(), layers=93, experts=config.moe.experts, used=config.moe.used, moe_layers=tuple(range(1, 93)),
        layer_kinds=tuple(config.layer_kinds),
    )  # fmt: skip
    header = trace_header("stream", "official", model, token_set(100, 10, config.vocab_size))
    assert header.token_bytes == 4084


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_experts_survive_packing(data: st.DataObject) -> None:
    experts = data.draw(st.integers(2, 1000))
    used = data.draw(st.integers(1, min(experts, 20)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    header = trace_header("stream", "official", identity(2, experts, used), token_set(20, 10))
    ids = np.stack([rng.permutation(experts)[:used] for _ in range(9)]).astype(np.int32)
    weights = rng.random((9, used)).astype(np.float32)
    back, shares = unpack_experts(header, pack_experts(header, ids, weights))
    order = np.argsort(-weights, axis=1, kind="stable")
    assert (back == np.take_along_axis(ids, order, axis=1)).all()
    largest = weights.max(axis=1, keepdims=True)
    assert (np.abs(shares - np.take_along_axis(weights, order, axis=1)) <= largest * (1 / 510 + 1e-3)).all()


def test_the_same_run_gives_the_same_bytes(pair: tuple[Path, Path, Path, Path], tmp_path: Path) -> None:
    checkpoint, text, _, trace = pair
    again = tmp_path / "again.kgtrace"
    record(checkpoint, text=text, outfile=again, context=CONTEXT, tokens=200, scratch=tmp_path / "s")
    assert again.read_bytes() == trace.read_bytes()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"vocab_sha256": "x" * 64}, "vocabulary"),
        ({"text_sha256": "x" * 64}, "text"),
        ({"context": 50}, "context"),
        ({"ids": np.arange(90, dtype=np.int32)}, "number of tokens"),
        ({"ids": np.arange(100, dtype=np.int32)}, "sequence of tokens"),
    ],
)
def test_another_text_vocabulary_or_context_is_refused(tmp_path: Path, change: dict, what: str) -> None:
    tokens = token_set(100, 10, VOCAB)
    trace = TraceReader(write(tmp_path, tokens, words(100, 2.0, 3)[0]))
    trace.check_tokens(tokens)
    with pytest.raises(InputError, match=f"recorded with another {what}"):
        trace.check_tokens(replace(tokens, **change))


def test_engines_and_conventions_do_not_mix(pair: tuple[Path, Path, Path, Path]) -> None:
    _, text, gguf, trace = pair
    with pytest.raises(UsageError, match="recorded with the stream engine"):
        evaluate(gguf, baseline=trace, text=text, engine="llama")
    with pytest.raises(UsageError, match="recorded with --preset official"):
        evaluate(gguf, baseline=trace, text=text, preset="llama.cpp")
    with pytest.raises(UsageError, match="--teacher-forced"):
        evaluate(gguf, baseline=trace, text=text, teacher_forced=True)


def test_an_incomplete_trace_gets_no_name(tmp_path: Path) -> None:
    tokens = token_set(20, 10)
    writer = TraceWriter(tmp_path / "t.kgtrace", trace_header("stream", "official", identity(), tokens), tokens)
    with pytest.raises(InputError, match="nothing was seen of 1 for some tokens"):
        writer.finish()
    assert not (tmp_path / "t.kgtrace").exists()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("small")
    return write(folder, token_set(20, 10, VOCAB), words(20, 2.0, 4)[0]).read_bytes()


def test_a_changed_byte_or_a_cut_is_noticed(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.kgtrace"
    for damaged in (small[:-1], small + b"\0", small[:10], small[:-100] + b"\x55" + small[-99:], b"", b"KGTRACE1"):
        path.write_bytes(damaged)
        with pytest.raises(InputError):
            TraceReader(path)


FIELDS = ("layers", "experts", "used", "top", "tokens", "vocab_size", "context", "moe_layers", "label", "engine")
VALUES = st.one_of(st.integers(-(2**70), 2**70), st.none(), st.text(max_size=5), st.lists(st.integers(), max_size=3))


@settings(max_examples=150, deadline=None)
@given(field=st.sampled_from(FIELDS), value=VALUES)
def test_hostile_headers_are_one_message(
    small: bytes, tmp_path_factory: pytest.TempPathFactory, field: str, value: object
) -> None:
    (size,) = struct.unpack_from("<I", small, 8)
    header = json.loads(small[12 : 12 + size])
    (header["model"] if field in header["model"] else header)[field] = value
    text = json.dumps(header).encode()
    body = small[:8] + struct.pack("<I", len(text)) + text
    body = body.ljust(-(-len(body) // 64) * 64, b"\0") + small[-(-(12 + size) // 64) * 64 : -32]
    path = tmp_path_factory.getbasetemp() / "hostile.kgtrace"
    # With a checksum that fits, so that the fields themselves are judged.
    path.write_bytes(body + hashlib.sha256(body).digest())
    tokens = token_set(20, 10, VOCAB)
    with contextlib.suppress(KimiGgufError):
        trace = TraceReader(path)
        trace.check_tokens(tokens)
        for place in tokens.places():
            trace.layer(tokens, place, 1)
            trace.output(tokens, place)


def test_log_softmax_is_normalised() -> None:
    assert np.exp(log_softmax(words(5, 2.0, 5)[0])).sum(axis=1) == pytest.approx(np.ones(5))
