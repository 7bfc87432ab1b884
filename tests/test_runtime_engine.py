"""The engine: the same numbers in every way of running, and errors instead of crashes."""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from runtime_support import EXACT, check_close, choices_differ, divergence, run_engine, run_reference, top_difference

from convert.config import LayerKind
from convert.gguf_file import MetadataEntry
from kimi_gguf.cluster.errors import RuntimeFault
from kimi_gguf.cluster.generate import generate
from kimi_gguf.cluster.llama_engine import Decoded, EngineOptions, LlamaEngine, check_model
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference.checkpoint_shape import TinyShape
from kimi_gguf.reference.gguf_maker import byte_text, make_gguf
from kimi_gguf.reference.gguf_store import GgufStore
from kimi_gguf.reference.oracle import CASES, OracleCase
from quant.errors import InputError, UsageError
from quant.tensors import TensorClass
from quant.types import QuantType

pytestmark = pytest.mark.runtime

TOP_8 = next(case for case in CASES if case.name == "k31_top8")
LENGTH = 620


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TOP_8.make(tmp_path_factory.mktemp("engine") / "model.gguf")


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return list(byte_text(LENGTH, 3).encode())


@pytest.fixture(scope="module")
def plain(model: Path, ids: list[int], runtime: Runtime) -> Decoded:
    """The whole sequence, in graphs of 512 tokens, float32."""
    return run_engine(model, ids, runtime)


@pytest.mark.parametrize(
    "options",
    [
        replace(EXACT, n_ubatch=1),
        replace(EXACT, n_ubatch=7),
        replace(EXACT, n_ubatch=64),
        replace(EXACT, n_batch=96, n_ubatch=32),
        replace(EXACT, fused_indexer=False),
        replace(EXACT, n_ctx=2048, n_seq=2, unified=False),
        replace(EXACT, repack=False),
    ],
    ids=["ubatch 1", "ubatch 7", "ubatch 64", "batch 96", "plain indexer", "two streams", "no repacking"],
)
def test_every_way_of_running_gives_the_same(
    options: EngineOptions, model: Path, ids: list[int], plain: Decoded, runtime: Runtime
) -> None:
    check_close(run_engine(model, ids, runtime, options), plain, 2e-3)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (replace(EXACT, flash_attn="on"), 1e-4),
        (replace(EXACT, cache_type="f16"), 3e-3),
        (replace(EXACT, cache_type="f16", flash_attn="on"), 3e-3),
    ],
    ids=["flash attention", "f16 caches", "both"],
)
def test_half_precision_attention_stays_close(
    options: EngineOptions, limit: float, model: Path, ids: list[int], plain: Decoded, runtime: Runtime
) -> None:
    """Keys in 10-bit fractions move scores, so a few choices flip; elsewhere the difference is small."""
    other = run_engine(model, ids, runtime, options)
    kept = ~choices_differ(other, plain)
    assert divergence(other.logits, plain.logits).mean() <= limit
    assert kept.mean() >= 0.9
    assert np.quantile(top_difference(other.logits, plain.logits)[kept], 0.99) <= 0.05


def test_an_engine_leaves_nothing_behind_even_when_its_process_is_killed(
    model: Path, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with LlamaEngine(model, EXACT, runtime=runtime) as engine:
        assert "llama_model_loader" in engine.said()
        assert list(tmp_path.iterdir()) == []


def test_token_by_token_after_a_chunked_prompt(model: Path, ids: list[int], plain: Decoded, runtime: Runtime) -> None:
    with LlamaEngine(model, replace(EXACT, n_ubatch=128), runtime=runtime) as engine:
        parts = [engine.decode(ids[:300]), engine.decode(ids[300:580])]
        parts += [engine.decode([token]) for token in ids[580:]]
    logits = np.concatenate([part.logits for part in parts])
    assert np.quantile(top_difference(logits, plain.logits), 0.99) <= 2e-3


def test_a_saved_state_continues_as_if_nothing_had_happened(model: Path, ids: list[int], runtime: Runtime) -> None:
    with LlamaEngine(model, EXACT, runtime=runtime) as engine:
        engine.decode(ids[:300], outputs="none")
        state = engine.save_state()
        first = engine.decode(ids[300:320]).logits
        engine.clear()
        engine.decode(ids[50:90], outputs="none")
        engine.clear()
        engine.restore_state(state, length=300)
        again = engine.decode(ids[300:320]).logits
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("unified", [True, False], ids=["one cache", "a cache each"])
def test_two_sequences_do_not_see_each_other(
    unified: bool, model: Path, ids: list[int], plain: Decoded, runtime: Runtime
) -> None:
    options = replace(EXACT, n_ctx=2048, n_seq=2, unified=unified)
    with LlamaEngine(model, options, runtime=runtime) as engine:
        first = engine.decode_together({0: ids[:200], 1: ids[400:600]})
        second = engine.decode_together({0: ids[200:240], 1: ids[600:620]})
        engine.clear()
        alone = engine.decode(ids[400:620], sequence=1).logits
    both = np.concatenate([first[1], second[1]])
    assert np.quantile(top_difference(both, alone), 0.98) <= 2e-3
    assert np.quantile(top_difference(np.concatenate([first[0], second[0]]), plain.logits[:240]), 0.98) <= 2e-3


def test_a_copied_sequence_goes_its_own_way(model: Path, ids: list[int], plain: Decoded, runtime: Runtime) -> None:
    with LlamaEngine(model, replace(EXACT, n_ctx=2048, n_seq=2, unified=False), runtime=runtime) as engine:
        engine.decode(ids[:200], sequence=0, outputs="none")
        engine.copy(0, 1)
        engine.decode(ids[300:340], sequence=0, outputs="none")
        copied = engine.decode(ids[200:240], sequence=1).logits
    assert np.quantile(top_difference(copied, plain.logits[200:240]), 0.95) <= 2e-3


def test_top_k_below_the_length_is_sparse_and_selects_what_the_reference_selects(
    model: Path, ids: list[int], plain: Decoded, runtime: Runtime, tmp_path: Path
) -> None:
    reference = run_reference(GgufStore(model), ids)
    check_close(plain, reference, 2e-3)
    for layer, rows in plain.selections.items():
        assert [len(row) for row in rows[:12]] == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8]
        same = [np.array_equal(a, b) for a, b in zip(rows, reference.selections[layer], strict=True)]
        assert np.mean(same) >= 0.99
    dense_shape = replace(TOP_8.shape, index_topk=2048)
    dense_model = OracleCase("dense", dense_shape, TOP_8.seed).make(tmp_path / "dense.gguf")
    dense = run_engine(dense_model, ids, runtime)
    assert divergence(plain.logits, dense.logits)[:8].max() < 1e-6
    assert divergence(plain.logits, dense.logits)[100:].mean() > 1e-2


def test_a_top_k_beyond_the_length_is_kimi_k3(ids: list[int], runtime: Runtime, tmp_path: Path) -> None:
    shape = replace(TOP_8.shape, index_topk=2048)
    sparse = OracleCase("sparse", shape, 5).make(tmp_path / "k31.gguf")
    dense = OracleCase("dense", replace(shape, k31=False), 5).make(tmp_path / "k3.gguf")
    a, b = run_engine(sparse, ids, runtime), run_engine(dense, ids, runtime)
    np.testing.assert_array_equal(a.logits, b.logits)


@pytest.mark.parametrize("kind", ["kda", "mla"])
def test_one_layer_of_896_experts(kind: LayerKind, runtime: Runtime, tmp_path: Path) -> None:
    shape = TinyShape(
        layers=1,
        layer_kinds=(kind,),
        dense_layers=0,
        vocab=512,
        experts=896,
        used=16,
        expert_width=64,
        latent=128,
        index_topk=32,
    )
    case = OracleCase("wide", shape, 7)

    def packed(spec: object) -> QuantType:
        return QuantType.MXFP4 if getattr(spec, "cls", None) is TensorClass.ROUTED_EXPERT else QuantType.F32

    model = make_gguf(tmp_path / "wide.gguf", case.config, seed=7, qtype=packed)
    ids = list(byte_text(200, 8).encode())
    engine, reference = run_engine(model, ids, runtime), run_reference(GgufStore(model), ids)
    assert engine.experts[0].shape == (200, 16)
    assert len(np.unique(engine.experts[0])) > 400
    np.testing.assert_array_equal(np.sort(engine.experts[0], 1)[:20], np.sort(reference.experts[0], 1)[:20])
    # llama.cpp rounds the experts' inputs to 8 bits.
    assert divergence(engine.logits, reference.logits).mean() <= 1e-3


def test_routing_weights_belong_to_the_experts(model: Path, ids: list[int], plain: Decoded, runtime: Runtime) -> None:
    assert sorted(plain.experts) == [1, 2, 3, 4]
    for layer, weights in plain.expert_weights.items():
        assert weights.shape == plain.experts[layer].shape == (LENGTH, 4)
        np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-5)
    with LlamaEngine(model, EXACT, runtime=runtime) as engine:
        one = engine.decode(ids[:1], trace=("experts", "selections", "hidden"))
        more = engine.decode(ids[1:4], outputs="last", trace=("experts", "selections", "hidden"))
    np.testing.assert_array_equal(one.experts[2], plain.experts[2][:1])
    assert more.logits.shape == (1, TOP_8.shape.vocab)
    assert [rows.tolist() for rows in more.selections[3]] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert one.hidden[0].shape == (1, TOP_8.shape.hidden)
    assert more.hidden[4].shape == (3, TOP_8.shape.hidden)


def test_end_of_msg_ends_generation_whatever_the_eos(runtime: Runtime, tmp_path: Path) -> None:
    eos = MetadataEntry("tokenizer.ggml.eos_token_id", gguf.GGUFValueType.UINT32, 129)
    path = make_gguf(tmp_path / "eos.gguf", TOP_8.config, seed=1, keys={eos.key: eos})
    with LlamaEngine(path, EXACT, runtime=runtime) as engine:
        # [EOS] and <|end_of_msg|> of the maker's vocabulary.
        assert engine.model.end_tokens == (129, 130)


def test_generation_follows_the_likeliest_tokens_and_a_seed(model: Path, ids: list[int], runtime: Runtime) -> None:
    with LlamaEngine(model, EXACT, runtime=runtime) as engine:
        greedy = list(generate(engine, ids[:50], 6, temperature=0))
        engine.clear()
        logits = engine.decode([*ids[:50], *greedy]).logits[49:]
        assert greedy == logits.argmax(axis=1)[: len(greedy)].tolist()
        engine.clear()
        drawn = list(generate(engine, ids[:50], 6, seed=1))
        engine.clear()
        assert drawn == list(generate(engine, ids[:50], 6, seed=1))


def test_a_full_context_and_foreign_tokens_are_errors(model: Path, runtime: Runtime) -> None:
    with LlamaEngine(model, replace(EXACT, n_ctx=256), runtime=runtime) as engine:
        engine.decode([65] * 250, outputs="last")
        with pytest.raises(RuntimeFault, match="context is full"):
            engine.decode([65] * 20)
        with pytest.raises(UsageError, match="token 512 is not in the vocabulary of 512"):
            engine.decode([512])
        with pytest.raises(UsageError, match="no token"):
            engine.decode([])


def test_a_dead_or_silent_process_is_an_error(model: Path, ids: list[int], runtime: Runtime) -> None:
    with LlamaEngine(model, EXACT, runtime=runtime) as engine:
        os.kill(engine.pid, signal.SIGABRT)
        with pytest.raises(RuntimeFault, match="ended by SIGABRT"):
            engine.decode(ids[:4])
    with LlamaEngine(model, replace(EXACT, timeout=1.0), runtime=runtime) as engine:
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeFault, match="no answer within 1 s"):
            engine.decode(ids[:4])


def rename(path: Path, old: bytes, new: bytes) -> Path:
    """A copy of a model with one tensor's name changed in place."""
    data = path.read_bytes()
    assert data.count(old) == 1
    copy = path.with_name("renamed.gguf")
    copy.write_bytes(data.replace(old, new))
    return copy


def test_a_missing_and_an_extra_tensor_are_named_before_loading(model: Path, runtime: Runtime) -> None:
    wrong = rename(model, b"blk.3.indexer.k_norm.bias", b"blk.3.indexer.k_norm.bios")
    with pytest.raises(InputError) as caught:
        LlamaEngine(wrong, EXACT, runtime=runtime)
    assert "missing: blk.3.indexer.k_norm.bias" in caught.value.message
    assert "blk.3.indexer.k_norm.bios" in caught.value.message


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    key = "kimi-k31.attention.indexer.key_length"
    width = MetadataEntry(key, gguf.GGUFValueType.UINT32, 16)
    path = make_gguf(tmp_path / "narrow.gguf", TOP_8.config, seed=1, keys={key: width})
    with pytest.raises(InputError, match=r"blk\.3\.indexer\.attn_k\.weight is \[32, 128\].*\[16, 128\]"):
        check_model(path)


def test_llama_cpp_itself_refuses_with_a_reason(model: Path, runtime: Runtime) -> None:
    wrong = rename(model, b"blk.3.indexer.k_norm.bias", b"blk.3.indexer.k_norm.bios")
    with pytest.raises(RuntimeFault, match=r"tensor 'blk\.3\.indexer\.k_norm\.bias' not found"):
        LlamaEngine(wrong, replace(EXACT, check_structure=False), runtime=runtime)
