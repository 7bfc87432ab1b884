"""One decoder layer: built from a store, run on a stream of hidden states, dropped.

Order of a layer (model of attention residuals)::

    h = mix(blocks, r)                  # at layer 0 there is nothing to mix: h = r
    every ``attn_res_block`` layers: commit r as a block and start a new sum
    r = r + attention(norm(h))
    h = mix(blocks, r);  r = r + ffn(norm(h))
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from convert.config import ModelConfig
from kimi_gguf.reference import mla as attention
from kimi_gguf.reference.attn_res import Stream, mix
from kimi_gguf.reference.indexer import IndexerWeights, causal_mask, indexer_keys, indexer_scores, select_keys
from kimi_gguf.reference.kda import KdaCache, KdaWeights, kda
from kimi_gguf.reference.mla import MlaCache, MlaWeights
from kimi_gguf.reference.moe import ExpertSource, MoeWeights, Routing, latent_moe
from kimi_gguf.reference.ops import linear, rms_norm
from kimi_gguf.reference.options import Options
from kimi_gguf.reference.situ import MlpWeights, mlp
from kimi_gguf.reference.weights import BlockNorms, WeightStore

_LOGITS_AT_ONCE = 1 << 27


@dataclass(slots=True)
class LayerCache:
    """What one layer remembers of a sequence; only the half of its kind is used."""

    kda: KdaCache = field(default_factory=KdaCache)
    mla: MlaCache = field(default_factory=MlaCache)


@dataclass(frozen=True, slots=True)
class Trace:
    """What a layer decided, and intermediate values for those who compare or train.

    Attributes:
        routing: of the MoE, None for a dense FFN.
        index_scores: [B, T, S] of the indexer, causal mask not applied; None without an indexer.
        selection: bool [B, T, S], the keys that MLA saw; None for KDA.
        logits: [B, H, T, S] of MLA, scaled, before any mask; None for KDA, or when ``Options.keep_logits`` is False.
    """

    routing: Routing | None = None
    index_scores: Tensor | None = None
    selection: Tensor | None = None
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer with its weights; routed experts are fetched from ``expert`` while it runs."""

    index: int
    config: ModelConfig
    options: Options
    norms: BlockNorms
    kda: KdaWeights | None
    mla: MlaWeights | None
    indexer: IndexerWeights | None
    dense: MlpWeights | None
    moe: MoeWeights | None
    expert: ExpertSource

    def forward(self, stream: Stream, cache: LayerCache | None = None) -> tuple[Stream, Trace]:
        """Runs T tokens of B independent sequences of equal length.

        Args:
            stream: state after the layer before; [B, T, d].
            cache: continues the sequences and is updated in place; without it they start here.

        Returns:
            The stream after this layer, and what the layer decided. ``stream`` itself is not changed.
        """
        eps = self.config.rms_norm_eps
        blocks = list(stream.blocks)
        residual = stream.residual
        h = mix(blocks, residual, self.norms.attention_score, eps) if blocks else residual
        commit = self.index % self.config.attn_res_block == 0
        if commit:
            blocks.append(residual)
        y, selection, scores, logits = self._attention(rms_norm(h, self.norms.attention, eps), stream, cache)
        residual = y if commit else residual + y
        h = rms_norm(mix(blocks, residual, self.norms.ffn_score, eps), self.norms.ffn, eps)
        y, routing = self._ffn(h)
        after = Stream(residual + y, blocks, stream.selection if selection is None else selection)
        return after, Trace(routing, scores, selection, logits)

    def _attention(
        self, x: Tensor, stream: Stream, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Result of the attention sublayer; keys chosen, indexer scores and logits where there are any."""
        if self.kda is not None:
            return self._run_kda(x, self.kda, None if cache is None else cache.kda), None, None, None
        assert self.mla is not None
        return self._run_mla(x, self.mla, stream, MlaCache() if cache is None else cache.mla)

    def _run_kda(self, x: Tensor, weights: KdaWeights, memory: KdaCache | None) -> Tensor:
        eps, options = self.config.rms_norm_eps, self.options
        l2_eps = eps if options.l2_eps is None else options.l2_eps
        return kda(x, weights, self.config.kda, norm_eps=eps, l2_eps=l2_eps, form=options.kda_form, cache=memory)

    def _run_mla(
        self, x: Tensor, weights: MlaWeights, stream: Stream, memory: MlaCache
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        config, absorbed = self.config.mla, self.options.absorbed
        eps = self.options.latent_norm_eps
        eps = self.config.rms_norm_eps if eps is None else eps
        query = attention.query_latent(x, weights, eps)
        latent, shared = attention.key_latent(x, weights, config, eps)
        latent = memory.latent = attention.append(memory.latent, latent)
        shared = memory.shared = attention.append(memory.shared, shared)
        scores = self._index(x, query, memory)
        selection = self._selection(x, latent.shape[1], scores, stream)
        q = linear(query, weights.q_b)
        rows = q.shape[0] * config.heads * latent.shape[1]
        step = q.shape[1] if self.options.keep_logits else max(1, _LOGITS_AT_ONCE // rows)
        parts: list[Tensor] = []
        logits: Tensor | None = None
        for begin in range(0, q.shape[1], step):
            at = slice(begin, begin + step)
            logits = attention.attention_logits(q[:, at], latent, shared, weights, config, absorbed=absorbed)
            parts.append(attention.attend(logits, selection[:, at], latent, weights, config, absorbed=absorbed))
        out = attention.gated_output(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), x, weights)
        return out, selection, scores, logits if self.options.keep_logits else None

    def _index(self, x: Tensor, query: Tensor, memory: MlaCache) -> Tensor | None:
        if self.indexer is None or self.config.dsa is None:
            return None
        # A hard selection has no gradient: an indexer is trained by imitation, and must not pull on its inputs.
        x, query = x.detach(), query.detach()
        memory.index = attention.append(memory.index, indexer_keys(x, self.indexer, self.options.indexer_eps))
        return indexer_scores(query, x, memory.index, self.indexer, self.config.dsa)

    def _selection(self, x: Tensor, keys: int, scores: Tensor | None, stream: Stream) -> Tensor:
        if self.config.dsa is None or not self.options.sparse:
            return causal_mask(x.shape[1], keys).expand(x.shape[0], -1, -1)
        if scores is not None:
            return select_keys(scores.detach(), self.config.dsa.top_k)
        if stream.selection is not None:
            return stream.selection
        return causal_mask(x.shape[1], keys).expand(x.shape[0], -1, -1)

    def _ffn(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        beta, linear_beta = self.config.situ_beta, self.config.situ_linear_beta
        if self.dense is not None:
            return mlp(x, self.dense, beta, linear_beta), None
        assert self.moe is not None
        eps, config = self.config.rms_norm_eps, self.config.moe
        return latent_moe(x, self.moe, self.expert, config, eps=eps, beta=beta, linear_beta=linear_beta)


def build_layer(store: WeightStore, config: ModelConfig, index: int, options: Options) -> Layer:
    """Layer ``index`` (0-based) with the weights of ``store``; its routed experts are read while it runs."""
    is_kda = config.layer_kinds[index] == "kda"
    is_dense = index < config.dense_layers
    return Layer(
        index=index,
        config=config,
        options=options,
        norms=store.norms(index),
        kda=store.kda(index) if is_kda else None,
        mla=None if is_kda else store.mla(index),
        indexer=None if is_kda or config.dsa is None else store.indexer(index),
        dense=store.dense(index) if is_dense else None,
        moe=None if is_dense else store.moe(index),
        expert=lambda e: store.expert(index, e),
    )
