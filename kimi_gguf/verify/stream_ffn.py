"""The second half of a layer over all tokens: a dense FFN, or router, shared experts and routed experts.

Each routed expert that some token chose is read once per segment of tokens (the whole text, where memory allows) and
sees all its tokens; the next one is read while it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kimi_gguf.reference.moe import MoeWeights, route
from kimi_gguf.reference.ops import linear, rms_norm
from kimi_gguf.reference.situ import MlpWeights
from kimi_gguf.reference.weights import BlockNorms, WeightStore
from kimi_gguf.verify.stream_blocks import Tap, run_mlp, to_device
from kimi_gguf.verify.stream_hidden import Hidden, Mixer, Seen, add, slices
from kimi_gguf.verify.stream_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The FFN of layer ``index``; adds its results to the residuals of ``hidden`` in place.

    Attributes:
        tokens: tokens in all; seen: takes the router's decisions.
    """

    index: int
    store: WeightStore
    tokens: int
    plan: MemoryPlan
    mixer: Mixer
    norms: BlockNorms
    hidden: Hidden
    seen: Seen
    tap: Tap

    def dense(self) -> None:
        """A dense FFN."""
        weights = to_device(self.store.dense(self.index), self.mixer.device)
        for begin, end in slices(self.tokens, self.plan.slice_tokens):
            y = run_mlp(self._input(begin, end), weights, self.store.config, "", self.tap)
            add(self.hidden.residual, begin, y)

    def experts(self) -> None:
        """A latent mixture of experts."""
        moe = to_device(self.store.moe(self.index), self.mixer.device)
        shared = None if moe.shared is None else to_device(moe.shared, self.mixer.device)
        for begin, end in slices(self.tokens, self.plan.segment_tokens):
            latents, ids, weights = self._route(begin, end, moe, shared)
            mixed = self._run_experts(latents, ids, weights)
            del latents
            for low, high in slices(end - begin, self.plan.slice_tokens):
                y = mixed[low:high]
                if moe.norm is not None:
                    y = rms_norm(y, moe.norm, self.store.config.rms_norm_eps)
                self.tap.rows("ffn_routed_up.weight", y)
                add(self.hidden.residual, begin + low, linear(y, moe.up))

    def _input(self, begin: int, end: int) -> Tensor:
        return self.mixer.normed(self.hidden, begin, end, self.norms.ffn_score, self.norms.ffn)

    def _route(self, begin: int, end: int, moe: MoeWeights, shared: MlpWeights | None) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [n, z], expert ids and weights [n, used] of a segment; adds the shared experts on the way."""
        config, seen = self.store.config, self.seen
        latents = torch.empty(end - begin, moe.down.shape[0])
        ids = torch.empty(end - begin, config.moe.used, dtype=torch.int64)
        weights = torch.empty(end - begin, config.moe.used)
        assert seen.ids is not None and seen.weights is not None and seen.probs is not None
        for low, high in slices(end - begin, self.plan.slice_tokens):
            at = begin + low
            h = self._input(at, begin + high)
            self.tap.rows("ffn_gate_inp.weight", h)
            self.tap.rows("ffn_routed_down.weight", h)
            routing = route(h, moe.router, moe.bias, config.moe)
            ids[low:high], weights[low:high] = routing.ids, routing.weights
            latents[low:high] = linear(h, moe.down)
            seen.ids.write(at, routing.ids.cpu().numpy().astype(np.int32))
            seen.weights.write(at, routing.weights.cpu().numpy())
            seen.probs.write(at, routing.probabilities.cpu().numpy())
            if shared is not None:
                add(self.hidden.residual, at, run_mlp(h, shared, config, "_shexp", self.tap))
        return latents, ids, weights

    def _run_experts(self, latents: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums of experts [n, z]."""
        out = torch.zeros_like(latents)
        used = ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self.store.config.moe.experts).tolist()
        chosen = [e for e, count in enumerate(counts) if count]
        at = 0
        for e, expert in zip(chosen, self._read_ahead(chosen), strict=True):
            slots = order[at : at + counts[e]]
            at += counts[e]
            rows = slots // used
            expert = to_device(expert, self.mixer.device)
            for low, high in slices(counts[e], self.plan.slice_tokens):
                some = rows[low:high]
                y = run_mlp(latents[some], expert, self.store.config, "_exps", self.tap, e)
                # A token meets an expert once, so no two rows of this sum are the same one.
                out[some] += y * weights.flatten()[slots[low:high]].unsqueeze(-1)
        return out

    def _read_ahead(self, experts: Sequence[int]) -> Iterator[MlpWeights]:
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self.store.expert, self.index, experts[0])
            for following in (*experts[1:], None):
                weights = coming.result()
                if following is not None:
                    coming = pool.submit(self.store.expert, self.index, following)
                yield weights
