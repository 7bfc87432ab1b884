"""The blocks of the reference, each against the plainest computation of the same formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from convert.config import DsaConfig, MlaConfig, MoeConfig
from kimi_gguf.reference import kda as kda_module
from kimi_gguf.reference.attn_res import mix
from kimi_gguf.reference.conv import short_conv
from kimi_gguf.reference.indexer import IndexerWeights, causal_mask, indexer_keys, indexer_scores, select_keys
from kimi_gguf.reference.kda import log_decay, recurrence_chunked, recurrence_sequential
from kimi_gguf.reference.mla import MlaWeights, attend, attention_logits
from kimi_gguf.reference.moe import route, run_experts
from kimi_gguf.reference.ops import l2_normalize, layer_norm, rms_norm
from kimi_gguf.reference.options import PRESETS, preset
from kimi_gguf.reference.situ import MlpWeights, mlp, situ
from quant.errors import UsageError


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kda_inputs(length: int, decay: float, seed: int = 0) -> tuple[Tensor, ...]:
    q, k, v = (normal(2, 3, length, 8, seed=seed + n) for n in range(3))
    g = decay * torch.sigmoid(normal(2, 3, length, 8, seed=seed + 3) * 3)
    beta = torch.sigmoid(normal(2, 3, length, seed=seed + 4))
    return l2_normalize(q, 1e-6), l2_normalize(k, 1e-6), v, g, beta, normal(2, 3, 8, 8, seed=seed + 5)


def test_rms_norm_divides_by_the_root_of_the_mean_square_plus_eps() -> None:
    x, weight = normal(5, 7), normal(7, seed=1)
    expected = weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 0.3)
    torch.testing.assert_close(rms_norm(x, weight, 0.3), expected)


def test_l2_normalize_adds_eps_to_the_sum() -> None:
    x = normal(5, 7)
    torch.testing.assert_close(l2_normalize(x, 2.0), x / torch.sqrt((x * x).sum(-1, keepdim=True) + 2.0))


def test_layer_norm_subtracts_the_mean_and_adds_the_bias() -> None:
    x, weight, bias = normal(4, 6), normal(6, seed=1), normal(6, seed=2)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-2) * weight + bias
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-2), expected)


def test_situ_bounds_both_branches() -> None:
    g, u = torch.tensor(3.0), torch.tensor(40.0)
    expected = 4 * np.tanh(0.75) / (1 + np.exp(-3.0)) * 25 * np.tanh(1.6)
    assert situ(g, u, 4.0, 25.0).item() == pytest.approx(expected, rel=1e-6)
    assert situ(g, u, 4.0, None).item() == pytest.approx(expected / (25 * np.tanh(1.6)) * 40, rel=1e-6)


def test_the_last_tap_of_the_convolution_multiplies_the_current_token() -> None:
    x = normal(1, 6, 2).numpy()
    weight = normal(2, 4, seed=1).numpy()
    expected = np.zeros((6, 2))
    for t in range(6):
        for j in range(4):
            if t - 3 + j >= 0:
                expected[t] += weight[:, j] * x[0, t - 3 + j]
    expected *= 1 / (1 + np.exp(-expected))
    out, _ = short_conv(torch.from_numpy(x), torch.from_numpy(weight))
    np.testing.assert_allclose(out[0].numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_the_convolution_continues_from_its_tail(cut: int) -> None:
    x, weight = normal(2, 7, 3), normal(3, 4, seed=1)
    whole, last = short_conv(x, weight)
    first, tail = short_conv(x[:, :cut], weight)
    second, end = short_conv(x[:, cut:], weight, tail)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole)
    torch.testing.assert_close(end, last)


@pytest.mark.parametrize("pairwise", [True, False])
@pytest.mark.parametrize(("length", "decay"), [(1, -5.0), (16, -1.0), (40, -5.0), (33, -0.01)])
def test_chunked_recurrence_equals_the_sequential_one(length: int, decay: float, pairwise: bool) -> None:
    inputs = kda_inputs(length, decay)
    expected, state = recurrence_sequential(*inputs)
    found, end = recurrence_chunked(*inputs, pairwise=pairwise)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end, state, rtol=1e-4, atol=1e-4)


def test_pairwise_chunks_survive_decays_that_overflow_the_split_form() -> None:
    q, k, v, g, beta, state = kda_inputs(32, -5.0)
    g = g - 20.0
    expected, _ = recurrence_sequential(q, k, v, g, beta, state)
    found, _ = recurrence_chunked(q, k, v, g, beta, state)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_long_sequences_go_through_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = kda_inputs(70, -5.0)
    expected, state = recurrence_chunked(*inputs)
    monkeypatch.setattr(kda_module, "_PAIRS_AT_ONCE", 1)
    found, end = recurrence_chunked(*inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(end, state)


def test_one_step_of_the_recurrence_decays_then_corrects_then_reads() -> None:
    q, k, v, g, beta, state = (x.double() for x in kda_inputs(1, -2.0))
    old = state[0, 0] * torch.exp(g[0, 0, 0])[:, None]
    new = old + beta[0, 0, 0] * torch.outer(k[0, 0, 0], v[0, 0, 0] - old.T @ k[0, 0, 0])
    out, end = recurrence_sequential(q, k, v, g, beta, state)
    torch.testing.assert_close(end[0, 0], new)
    torch.testing.assert_close(out[0, 0, 0], new.T @ q[0, 0, 0])


def test_gradients_of_the_chunked_recurrence_are_those_of_the_sequential_one() -> None:
    gradients = []
    for form in (recurrence_sequential, recurrence_chunked):
        inputs = [x.requires_grad_() for x in kda_inputs(20, -5.0)]
        out, _ = form(*inputs)
        out.square().sum().backward()  # type: ignore[no-untyped-call]
        gradients.append([x.grad for x in inputs])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_the_lower_bound_replaces_the_softplus_decay() -> None:
    a, decay, bias = normal(3, 2, 4), torch.tensor([0.5, 2.0]), normal(2, 4, seed=1)
    bounded = log_decay(a, decay, bias, -5.0)
    torch.testing.assert_close(bounded, -5.0 / (1 + torch.exp(-decay[:, None] * (a + bias))))
    free = log_decay(a, decay, bias, None)
    torch.testing.assert_close(free, -decay[:, None] * torch.log1p(torch.exp(a + bias)))


MLA = MlaConfig(heads=3, q_lora=5, kv_lora=6, nope=4, rope=2, v=7, output_gate=True)


def mla_weights() -> MlaWeights:
    nothing = torch.zeros(0)
    k_b, v_b = normal(3, 4, 6, seed=10), normal(3, 7, 6, seed=11)
    return MlaWeights(nothing, nothing, nothing, nothing, nothing, k_b, v_b, None, nothing)


def test_absorbed_mla_equals_plain_mla() -> None:
    weights = mla_weights()
    q, latent, shared = normal(2, 5, 18), normal(2, 9, 6, seed=1), normal(2, 9, 2, seed=2)
    allowed = causal_mask(5, 9)
    results = []
    for absorbed in (False, True):
        logits = attention_logits(q, latent, shared, weights, MLA, absorbed=absorbed)
        results.append((logits, attend(logits, allowed, latent, weights, MLA, absorbed=absorbed)))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_mla_logits_add_the_shared_key_part_and_scale_by_both_widths() -> None:
    weights = mla_weights()
    q, latent, shared = normal(1, 1, 18), normal(1, 1, 6, seed=1), normal(1, 1, 2, seed=2)
    found = attention_logits(q, latent, shared, weights, MLA, absorbed=False)
    for h in range(3):
        head = q[0, 0, 6 * h : 6 * h + 6]
        expected = (head[:4] @ weights.k_b[h] @ latent[0, 0] + head[4:] @ shared[0, 0]) * 6**-0.5
        torch.testing.assert_close(found[0, h, 0, 0], expected)


DSA = DsaConfig(heads=8, head_dim=4, top_k=3, layers=(0,))


def indexer_weights() -> IndexerWeights:
    return IndexerWeights(normal(32, 5), normal(4, 6, seed=1), normal(8, 6, seed=2), normal(4, seed=3), normal(4))


def test_indexer_scores_apply_relu_before_the_head_weights() -> None:
    weights = indexer_weights()
    latent, x = normal(1, 2, 5, seed=4), normal(1, 2, 6, seed=5)
    keys = indexer_keys(x, weights, 1e-5)
    found = indexer_scores(latent, x, keys, weights, DSA)[0]
    q = (latent[0] @ weights.wq_b.T).view(2, 8, 4)
    w = x[0] @ weights.weights.T
    for t in range(2):
        for s in range(2):
            total = sum(w[t, h] * torch.relu(q[t, h] @ keys[0, s]) for h in range(8))
            torch.testing.assert_close(found[t, s], total * 32**-0.5)


def test_top_k_of_all_keys_is_the_causal_mask() -> None:
    torch.testing.assert_close(select_keys(normal(2, 5, 5), 5)[0], causal_mask(5, 5))


def test_a_selection_holds_the_best_visible_keys() -> None:
    scores = normal(1, 6, 6)
    chosen = select_keys(scores, 3)[0]
    for t in range(6):
        best = sorted(range(t + 1), key=lambda s: -float(scores[0, t, s]))[:3]
        assert set(chosen[t].nonzero().flatten().tolist()) == set(best)


def test_a_mask_for_later_queries_starts_at_their_position() -> None:
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]


def test_mix_weighs_raw_values_by_normed_scores() -> None:
    values, score = normal(3, 2, 4, 5), normal(5, seed=1)
    found = mix(list(values[:2]), values[2], score, 1e-5)
    for b in range(2):
        for t in range(4):
            each = [values[j, b, t] for j in range(3)]
            scores = torch.stack([score @ v / torch.sqrt(v.square().mean() + 1e-5) for v in each])
            weights = torch.exp(scores) / torch.exp(scores).sum()
            torch.testing.assert_close(found[b, t], sum(w * v for w, v in zip(weights, each, strict=True)))


def moe_config(**changes: object) -> MoeConfig:
    base: dict[str, object] = {
        "experts": 6,
        "used": 2,
        "shared": 0,
        "width": 3,
        "latent": 4,
        "latent_norm": False,
        "renormalize": True,
        "scaling": 2.0,
        "gating": "sigmoid",
        "groups": 1,
        "groups_used": 1,
    }
    return MoeConfig(**(base | changes))  # type: ignore[arg-type]


def test_the_router_bias_chooses_but_does_not_weigh() -> None:
    x, router = normal(1, 9, 5), normal(6, 5, seed=1)
    bias = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0, -9.0])
    routing = route(x, router, bias, moe_config())
    scores = torch.sigmoid(x @ router.T)
    assert bool((routing.ids == 0).any(-1).all()) and not bool((routing.ids == 5).any())
    chosen = scores.gather(-1, routing.ids)
    torch.testing.assert_close(routing.weights, 2.0 * chosen / chosen.sum(-1, keepdim=True))
    torch.testing.assert_close(routing.probabilities, scores)


def test_without_renormalizing_weights_are_the_scaled_scores() -> None:
    x, router = normal(1, 3, 5), normal(6, 5, seed=1)
    routing = route(x, router, None, moe_config(renormalize=False, gating="softmax"))
    expected = torch.softmax(x @ router.T, -1).topk(2).values * 2.0
    torch.testing.assert_close(routing.weights, expected)


def test_experts_of_groups_that_lose_are_not_chosen() -> None:
    router = torch.eye(6)
    x = torch.tensor([[[0.9, 0.0, 0.0, 0.5, 0.6, 0.0]]])
    routing = route(x, router, None, moe_config(groups=2, groups_used=1))
    assert set(routing.ids.flatten().tolist()) == {3, 4}


def test_experts_are_summed_by_weight_and_only_chosen_ones_are_loaded() -> None:
    x, router = normal(1, 5, 4), normal(6, 4, seed=1)
    experts = [MlpWeights(normal(3, 4, seed=e), normal(3, 4, seed=e + 20), normal(4, 3, seed=e + 40)) for e in range(6)]
    routing = route(x, router, None, moe_config())
    loaded: list[int] = []

    def expert(e: int) -> MlpWeights:
        loaded.append(e)
        return experts[e]

    found = run_experts(x, routing, expert, 4.0, 25.0)
    for t in range(5):
        total = sum(
            w * mlp(x[0, t], experts[int(e)], 4.0, 25.0)
            for e, w in zip(routing.ids[0, t], routing.weights[0, t], strict=True)
        )
        torch.testing.assert_close(found[0, t], total)
    assert loaded == sorted(set(routing.ids.flatten().tolist()))


def test_presets_name_the_two_conventions() -> None:
    assert PRESETS["official"].latent_norm_eps == 1e-6 and preset("llama.cpp").latent_norm_eps is None
    with pytest.raises(UsageError, match=r"known presets: official, llama\.cpp"):
        preset("other")
