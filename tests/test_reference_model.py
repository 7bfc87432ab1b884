"""The whole reference: against an independent float64 model, between its own forms, and from both kinds of file."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from slow_model import SlowModel
from torch import Tensor

from convert.pipeline import convert
from kimi_gguf.reference import layer
from kimi_gguf.reference.attn_res import Stream
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from kimi_gguf.reference.checkpoint_store import open_checkpoint
from kimi_gguf.reference.gguf_store import GgufStore
from kimi_gguf.reference.layer import Trace
from kimi_gguf.reference.model import ModelCache, logits
from kimi_gguf.reference.options import Options, preset
from kimi_gguf.reference.stores import open_store
from kimi_gguf.reference.weights import WeightStore
from quant.errors import InputError

SHAPE = TinyShape(hidden=64, kda_heads=2, kda_head_dim=32, heads=2, q_lora=64, kv_lora=32, nope=32, rope=16, v=32,
                  ffn_dense=64, expert_width=32, latent=64, index_head_dim=16, index_topk=8, vision=False)  # fmt: skip
TOKENS = 40


def tokens(count: int = TOKENS, batch: int = 1) -> Tensor:
    return torch.randint(512, (batch, count), generator=torch.Generator().manual_seed(5))


def run(store: WeightStore, ids: Tensor, options: Options | None = None, cache: ModelCache | None = None) -> Tensor:
    with torch.inference_mode():
        return logits(store, ids, options or Options(), cache=cache)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("reference") / "tiny", SHAPE, seed=4)


@pytest.fixture(scope="module")
def store(folder: Path) -> WeightStore:
    return open_store(folder)


@pytest.mark.parametrize(
    "shape",
    [SHAPE, replace(SHAPE, k31=False), replace(SHAPE, gate_lower_bound=None, attn_res_block=3, shared=1)],
    ids=["k3.1", "k3", "softplus decay"],
)
def test_logits_and_choices_equal_those_of_a_float64_model(shape: TinyShape, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", shape, seed=9)
    slow = SlowModel(folder)
    ids = tokens(24)
    expected = np.stack([slow.step(token) for token in ids[0].tolist()])
    chosen: dict[int, Trace] = {}

    def observe(index: int, _stream: Stream, trace: Trace) -> None:
        chosen[index] = trace

    with torch.inference_mode():
        found = logits(open_checkpoint(folder), ids, Options(), observe=observe)[0]
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=2e-4)
    for at, trace in chosen.items():
        if trace.routing is not None:
            ours = [set(row.tolist()) for row in trace.routing.ids[0]]
            assert ours == [experts for i, experts in slow.chosen if i == at]
        if trace.index_scores is not None and trace.selection is not None:
            keys = [set(row.nonzero().flatten().tolist()) for row in trace.selection[0]]
            assert keys == [selected for i, selected in slow.selected if i == at]


@pytest.mark.parametrize(
    "options",
    [Options(kda_form="sequential"), Options(kda_form="centred"), Options(absorbed=True)],
    ids=["sequential", "centred", "absorbed"],
)
def test_forms_of_the_same_computation_agree(store: WeightStore, options: Options) -> None:
    torch.testing.assert_close(run(store, tokens(), options), run(store, tokens()), rtol=0, atol=1e-4)


def test_attention_in_slices_equals_attention_at_once(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(store, tokens())
    monkeypatch.setattr(layer, "_LOGITS_AT_ONCE", 1)
    torch.testing.assert_close(run(store, tokens()), whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cuts", [(0, 17, 40), (0, 1, 2, 20, 21, 40)])
def test_a_sequence_in_pieces_equals_the_sequence_at_once(store: WeightStore, cuts: tuple[int, ...]) -> None:
    cache = ModelCache()
    parts = [run(store, tokens()[:, a:b], cache=cache) for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts, dim=1), run(store, tokens()), rtol=0, atol=1e-4)


def test_sequences_of_a_batch_do_not_see_each_other(store: WeightStore) -> None:
    ids = tokens(20, batch=2)
    both = run(store, ids)
    for b in range(2):
        torch.testing.assert_close(both[b : b + 1], run(store, ids[b : b + 1]), rtol=0, atol=1e-4)


def test_sparse_attention_is_dense_until_more_keys_are_visible_than_top_k(store: WeightStore) -> None:
    sparse, dense = run(store, tokens()), run(store, tokens(), Options(sparse=False))
    top_k = SHAPE.index_topk
    torch.testing.assert_close(sparse[:, :top_k], dense[:, :top_k], rtol=0, atol=1e-5)
    assert float((sparse[:, top_k:] - dense[:, top_k:]).abs().max()) > 0.01


def test_presets_differ_by_less_than_the_formula_leaves_open(store: WeightStore) -> None:
    difference = (run(store, tokens(), preset("llama.cpp")) - run(store, tokens())).abs().max()
    assert 0 < float(difference) < 1e-2


def test_a_iwithout_indexer_reuses_the_selection_before_it(folder: Path) -> None:
    class Shared:
        """The store without the second indexer."""

        def __init__(self, inner: WeightStore) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def indexer(self, index: int) -> object:
            return self.inner.indexer(index) if index == 3 else None

    seen: dict[int, Tensor | None] = {}

    def observe(index: int, _stream: Stream, trace: Trace) -> None:
        seen[index] = trace.selection

    with torch.inference_mode():
        logits(Shared(open_store(folder)), tokens(), Options(), observe=observe)  # type: ignore[arg-type]
    assert seen[3] is not None and seen[4] is not None
    assert bool((seen[3] == seen[4]).all())


def test_an_f32_gguf_gives_the_very_logits_of_the_checkpoint(folder: Path, store: WeightStore, tmp_path: Path) -> None:
    result = convert(folder, quant="F32", outfile=tmp_path / "model.gguf")
    found = GgufStore(result.files[0])
    assert torch.equal(run(found, tokens()), run(store, tokens()))
    found.close()


def test_a_gguf_states_the_eps_of_its_indexer(folder: Path, tmp_path: Path) -> None:
    key = "kimi-k31.attention.layer_norm_epsilon"
    result = convert(folder, quant="F32", outfile=tmp_path / "model.gguf", override_kv=[f"{key}=float:0.5"], force=True)
    found = GgufStore(result.files[0])
    assert found.indexer_eps == 0.5
    found.close()


def test_an_expert_of_a_split_mxfp4_gguf_is_that_of_the_checkpoint(
    folder: Path, store: WeightStore, tmp_path: Path
) -> None:
    result = convert(folder, quant="MXFP4", outdir=tmp_path, split_max_size=400_000)
    assert len(result.files) > 1
    found = GgufStore(result.files[-1])
    for name in ("gate", "up", "down"):
        assert torch.equal(getattr(found.expert(2, 11), name), getattr(store.expert(2, 11), name))
    found.close()


def test_names_without_the_language_model_prefix_are_found(folder: Path, store: WeightStore) -> None:
    checkpoint = open_checkpoint(folder)
    tensors = {name.removeprefix("language_model."): tensor for name, tensor in checkpoint.source.tensors.items()}
    checkpoint.source._tensors = tensors  # type: ignore[attr-defined]
    assert torch.equal(checkpoint.dense(0).gate, store.dense(0).gate)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    with pytest.raises(InputError, match=r"no tensor language_model\.model\.layers\.7\.input_layernorm\.weight"):
        checkpoint.norms(7)


def test_a_gguf_of_another_architecture_is_refused(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.add_tensor("x", np.zeros((1, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match="architecture 'llama'"):
        GgufStore(tmp_path / "other.gguf")
