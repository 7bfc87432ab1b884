"""One model on its way through the stream engine: the hidden states of all tokens, moved one layer at a time.

A layer is loaded once for all tokens. Attention runs over groups of chunks; the router and the shared experts over
slices of tokens; then each routed expert that some token chose is read once and sees all its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kimi_gguf.reference.attn_res import mix
from kimi_gguf.reference.moe import MoeWeights, route
from kimi_gguf.reference.ops import linear, rms_norm
from kimi_gguf.reference.options import Options
from kimi_gguf.reference.situ import MlpWeights
from kimi_gguf.reference.weights import BlockNorms, WeightStore
from kimi_gguf.verify.observations import F32Array, FullLogits, LayerObservation, Place, TokenSet
from kimi_gguf.verify.stream_blocks import Limits, NoTap, Tap, run_kda, run_mla, run_mlp, to_device
from kimi_gguf.verify.stream_plan import OUTPUT_ROWS, MemoryPlan
from kimi_gguf.verify.stream_state import Rows, StateFolder


@dataclass(slots=True)
class Hidden:
    """Where the streams of all tokens are, as ``attn_res.Stream`` but by name in a state folder.

    Attributes:
        residual: float32 [N, d], the running sum.
        blocks: committed sums, the same.
    """

    residual: Rows
    blocks: list[Rows]


@dataclass(slots=True)
class Seen:
    """What one layer decided, for all tokens."""

    ids: Rows | None
    weights: Rows | None
    probs: Rows | None
    selection: Rows | None

    def drop(self) -> None:
        """Free it."""
        for rows in (self.ids, self.weights, self.probs, self.selection):
            if rows is not None:
                rows.drop()


class Lane:
    """A model and its hidden states.

    Args:
        tag: distinguishes this lane's arrays from those of another.
        folder: holds the arrays.
        plan: how large pieces may be.
        tap: sees the inputs of all weights.
    """

    def __init__(
        self,
        tag: str,
        store: WeightStore,
        tokens: TokenSet,
        folder: StateFolder,
        plan: MemoryPlan,
        options: Options,
        device: torch.device,
        tap: Tap | None = None,
    ) -> None:
        self.tag = tag
        self.store = store
        self.tokens = tokens
        self.config = store.config
        self.folder = folder
        self.plan = plan
        self.options = options
        self.device = device
        self.tap = tap
        self.hidden: Hidden | None = None
        self.selection: Rows | None = None
        self._limits = Limits(plan.work_bytes)

    @property
    def names(self) -> dict[str, object]:
        """Which arrays hold the state, for a journal."""
        assert self.hidden is not None
        return {
            "residual": _name(self.hidden.residual),
            "blocks": [_name(rows) for rows in self.hidden.blocks],
        }

    @property
    def selection_name(self) -> str | None:
        """Which array holds the latest indexer's choice, for a journal."""
        return None if self.selection is None else _name(self.selection)

    def resume(self, names: dict[str, object]) -> None:
        """Open the arrays that an earlier run's journal names."""
        blocks = names["blocks"]
        assert isinstance(blocks, list)
        self.hidden = Hidden(self._wide(str(names["residual"])), [self._wide(str(name)) for name in blocks])

    def resume_selection(self, name: str | None) -> None:
        """Open the latest indexer's choice."""
        if name is not None:
            self.selection = self._rows(name, -(-self.tokens.context // 8), np.uint8)

    def embed(self) -> None:
        """The state before layer 0."""
        residual = self._wide(f"{self.tag}.residual.start")
        for begin, end in _slices(self.tokens.tokens, self.plan.slice_tokens):
            ids = torch.from_numpy(self.tokens.ids[begin:end].astype(np.int64))
            residual.write(begin, self.store.embedding(ids).numpy())
        self.hidden = Hidden(residual, [])

    def run_layer(self, index: int, source: Hidden | None = None) -> tuple[Hidden, Seen]:
        """The states after layer ``index`` and what it decided; the lane's own state stays until ``accept``.

        Args:
            source: the states to start from instead of the lane's own.
        """
        before = source or self.hidden
        assert before is not None
        with torch.device(self.device), torch.inference_mode():
            norms = to_device(self.store.norms(index), self.device)
            blocks = list(before.blocks)
            commit = index % self.config.attn_res_block == 0
            if commit:
                blocks.append(before.residual)
            after = Hidden(self._wide(f"{self.tag}.residual.{index}"), blocks)
            selection = self._attention(index, before, after, norms, commit)
            seen = self._ffn(index, after, norms)
        seen.selection = selection
        for rows in (after.residual, selection):
            if rows is not None:
                rows.sync()
        return after, seen

    def accept(self, after: Hidden, selection: Rows | None, *, keep: Sequence[Rows] = ()) -> list[Rows]:
        """Take the states after a layer; returns the arrays that nobody needs once this is journalled."""
        stale: list[Rows] = []
        if self.hidden is not None and not any(self.hidden.residual is rows for rows in (*after.blocks, *keep)):
            stale.append(self.hidden.residual)
        self.hidden = after
        if selection is not None:
            if self.selection is not None:
                stale.append(self.selection)
            self.selection = selection
        return stale

    def _attention(self, index: int, before: Hidden, after: Hidden, norms: BlockNorms, commit: bool) -> Rows | None:
        store, config, eps = self.store, self.config, self.config.rms_norm_eps
        is_kda = config.layer_kinds[index] == "kda"
        kda = to_device(store.kda(index), self.device) if is_kda else None
        mla = None if is_kda else to_device(store.mla(index), self.device)
        # Where every visible key is kept, an indexer changes nothing; only its weights' inputs may be wanted.
        prunes = config.dsa is not None and config.dsa.top_k < self.tokens.context
        indexer = None if is_kda or not (prunes or self.tap) else store.indexer(index)
        indexer = None if indexer is None else to_device(indexer, self.device)
        selected: Rows | None = None
        tap = _LayerTap(self.tap, index) if self.tap is not None else None
        for first, last in self._groups():
            begin, end = first * self.tokens.context, min(last * self.tokens.context, self.tokens.tokens)
            x = torch.empty(end - begin, config.hidden)
            for low, high in _slices(end - begin, self.plan.mix_tokens):
                h = self._mixed(before, begin + low, begin + high, norms.attention_score, always=False)
                x[low:high] = rms_norm(h, norms.attention, eps)
            x = x.view(last - first, -1, config.hidden)
            if kda is not None:
                y = run_kda(x, kda, config.kda, eps, self.options, self._limits, tap or NoTap())
            else:
                assert mla is not None
                shared = self._shared_selection(first, last, x.shape[1]) if prunes and indexer is None else None
                y, chosen = run_mla(x, mla, indexer, shared, config, self.options, self._limits, tap)
                if chosen is not None and indexer is not None and prunes:
                    if selected is None:
                        name = f"{self.tag}.selection.{index}"
                        selected = self._rows(name, -(-self.tokens.context // 8), np.uint8)
                    selected.write(begin, _pack(chosen, selected.width))
            y = y.view(end - begin, config.hidden)
            if not commit:
                y = y + self._tensor(before.residual, begin, end)
            after.residual.write(begin, y.cpu().numpy())
        return selected

    def _shared_selection(self, first: int, last: int, length: int) -> Tensor | None:
        if self.selection is None:
            return None
        begin = first * self.tokens.context
        packed = self.selection.read(begin, begin + (last - first) * length)
        bits = np.unpackbits(packed, axis=1, count=length, bitorder="little").astype(bool)
        return torch.from_numpy(bits).view(last - first, length, length).to(self.device)

    def _ffn(self, index: int, after: Hidden, norms: BlockNorms) -> Seen:
        store, config = self.store, self.config
        tap: Tap = _LayerTap(self.tap, index) if self.tap is not None else NoTap()
        if index < config.dense_layers:
            weights = to_device(store.dense(index), self.device)
            for begin, end in _slices(self.tokens.tokens, self.plan.slice_tokens):
                h = self._ffn_input(after, begin, end, norms)
                self._add(after.residual, begin, run_mlp(h, weights, config, "", tap))
            return Seen(None, None, None, None)
        moe = to_device(store.moe(index), self.device)
        shared = None if moe.shared is None else to_device(moe.shared, self.device)
        used, experts = config.moe.used, config.moe.experts
        seen = Seen(
            self._rows(f"{self.tag}.ids", used, np.int32),
            self._rows(f"{self.tag}.weights", used, np.float32),
            self._rows(f"{self.tag}.probs", experts, np.float32),
            None,
        )
        for begin, end in _slices(self.tokens.tokens, self.plan.segment_tokens):
            latents, ids, shares = self._route(after, begin, end, norms, moe, shared, seen, tap)
            mixed = self._run_experts(index, latents, ids, shares, tap)
            del latents
            for low, high in _slices(end - begin, self.plan.slice_tokens):
                y = mixed[low:high]
                if moe.norm is not None:
                    y = rms_norm(y, moe.norm, config.rms_norm_eps)
                tap.rows("ffn_routed_up.weight", y)
                self._add(after.residual, begin + low, linear(y, moe.up))
        return seen

    def _route(
        self,
        after: Hidden,
        begin: int,
        end: int,
        norms: BlockNorms,
        moe: MoeWeights,
        shared: MlpWeights | None,
        seen: Seen,
        tap: Tap,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [n, z], expert ids and weights [n, used] of a segment; adds the shared experts on the way."""
        config = self.config
        latents = torch.empty(end - begin, moe.down.shape[0])
        ids = torch.empty(end - begin, config.moe.used, dtype=torch.int64)
        weights = torch.empty(end - begin, config.moe.used)
        assert seen.ids is not None and seen.weights is not None and seen.probs is not None
        for low, high in _slices(end - begin, self.plan.slice_tokens):
            h = self._ffn_input(after, begin + low, begin + high, norms)
            tap.rows("ffn_gate_inp.weight", h)
            tap.rows("ffn_routed_down.weight", h)
            routing = route(h, moe.router, moe.bias, config.moe)
            ids[low:high], weights[low:high] = routing.ids, routing.weights
            latents[low:high] = linear(h, moe.down)
            at = begin + low
            seen.ids.write(at, routing.ids.cpu().numpy().astype(np.int32))
            seen.weights.write(at, routing.weights.cpu().numpy())
            seen.probs.write(at, routing.probabilities.cpu().numpy())
            if shared is not None:
                self._add(after.residual, at, run_mlp(h, shared, config, "_shexp", tap))
        return latents, ids, weights

    def _run_experts(self, index: int, latents: Tensor, ids: Tensor, weights: Tensor, tap: Tap) -> Tensor:
        """Weighted sums of experts [n, z]: each chosen expert is read once, the next one while it computes."""
        out = torch.zeros_like(latents)
        used = ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self.config.moe.experts).tolist()
        chosen = [e for e, count in enumerate(counts) if count]
        at = 0
        for e, expert in zip(chosen, self._read_ahead(index, chosen), strict=True):
            slots = order[at : at + counts[e]]
            at += counts[e]
            rows = slots // used
            expert = to_device(expert, self.device)
            for low, high in _slices(counts[e], self.plan.slice_tokens):
                some = rows[low:high]
                y = run_mlp(latents[some], expert, self.config, "_exps", tap, e)
                # A token meets an expert once, so no two rows of this sum are the same one.
                out[some] += y * weights.flatten()[slots[low:high]].unsqueeze(-1)
        return out

    def _read_ahead(self, index: int, experts: Sequence[int]) -> Iterator[MlpWeights]:
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self.store.expert, index, experts[0])
            for following in (*experts[1:], None):
                weights = coming.result()
                if following is not None:
                    coming = pool.submit(self.store.expert, index, following)
                yield weights

    def observe(self, place: Place, seen: Seen, hidden: Hidden) -> LayerObservation:
        """What the layer that was run last did at ``place``."""
        where = self.tokens.index(place)
        begin, end = where.start, where.stop
        selected = None
        if seen.selection is not None:
            packed = seen.selection.read(begin, end)
            selected = np.unpackbits(packed, axis=1, count=place.end, bitorder="little").astype(bool)
        return LayerObservation(
            expert_ids=None if seen.ids is None else seen.ids.read(begin, end),
            expert_weights=None if seen.weights is None else seen.weights.read(begin, end),
            router_probs=None if seen.probs is None else seen.probs.read(begin, end),
            selected=selected,
            hidden=hidden.residual.read(begin, end),
        )

    def final_states(self, begin: int, end: int, source: Hidden | None = None) -> Tensor:
        """What the output matrix reads of tokens [begin, end), float32 [n, d]."""
        before = source or self.hidden
        assert before is not None
        with torch.device(self.device), torch.inference_mode():
            score, norm = (vector.to(self.device) for vector in self.store.head_vectors())
            states = torch.empty(end - begin, self.config.hidden)
            for low, high in _slices(end - begin, self.plan.mix_tokens):
                mixed = self._mixed(before, begin + low, begin + high, score, always=True)
                states[low:high] = rms_norm(mixed, norm, self.config.rms_norm_eps)
            if self.tap is not None:
                self.tap.rows("output.weight", states)
        return states

    def logits(self, begin: int, end: int, source: Hidden | None = None) -> FullLogits:
        """Logits of tokens [begin, end), F32 [n, V]; the output matrix is read in blocks of rows."""
        states = self.final_states(begin, end, source)
        values: F32Array = np.empty((end - begin, self.config.vocab_size), dtype=np.float32)
        with torch.inference_mode():
            for low, high in _slices(self.config.vocab_size, OUTPUT_ROWS):
                matrix = self.store.output_rows(low, high).to(self.device)
                values[:, low:high] = linear(states, matrix).cpu().numpy()
        return FullLogits(values)

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Ranges of chunks of equal length."""
        chunks, context = self.tokens.chunks, self.tokens.context
        whole = self.tokens.tokens // context
        for first in range(0, whole, self.plan.chunks_together):
            yield first, min(first + self.plan.chunks_together, whole)
        if whole < chunks:
            yield whole, chunks

    def _mixed(self, hidden: Hidden, begin: int, end: int, score: Tensor, *, always: bool) -> Tensor:
        residual = self._tensor(hidden.residual, begin, end)
        if not hidden.blocks and not always:
            return residual
        blocks = [self._tensor(rows, begin, end) for rows in hidden.blocks]
        return mix(blocks, residual, score, self.config.rms_norm_eps)

    def _ffn_input(self, after: Hidden, begin: int, end: int, norms: BlockNorms) -> Tensor:
        parts = []
        for low, high in _slices(end - begin, self.plan.mix_tokens):
            h = self._mixed(after, begin + low, begin + high, norms.ffn_score, always=True)
            parts.append(rms_norm(h, norms.ffn, self.config.rms_norm_eps))
        return torch.cat(parts)

    def _add(self, rows: Rows, begin: int, y: Tensor) -> None:
        rows.write(begin, rows.read(begin, begin + len(y)) + y.cpu().numpy())

    def _tensor(self, rows: Rows, begin: int, end: int) -> Tensor:
        return torch.from_numpy(rows.read(begin, end)).to(self.device)

    def _wide(self, name: str) -> Rows:
        return self._rows(name, self.config.hidden, np.float32)

    def _rows(self, name: str, width: int, dtype: type[np.generic]) -> Rows:
        return self.folder.rows(name, self.tokens.tokens, width, dtype)


class _LayerTap:
    """A tap that puts the layer's prefix in front of names."""

    def __init__(self, tap: Tap, layer: int) -> None:
        self._tap = tap
        self._prefix = f"blk.{layer}."

    def rows(self, name: str, rows: Tensor, expert: int | None = None) -> None:
        self._tap.rows(self._prefix + name, rows, expert)

    def squares(self, name: str, sums: Tensor, count: int) -> None:
        self._tap.squares(self._prefix + name, sums, count)


def _slices(count: int, step: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + step, count)) for begin in range(0, count, step))


def _pack(chosen: Tensor, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Bits of bool [B, T, T] as U8 [B * T, width]."""
    bits = np.packbits(chosen.cpu().numpy().reshape(-1, chosen.shape[-1]), axis=1, bitorder="little")
    packed = np.zeros((len(bits), width), dtype=np.uint8)
    packed[:, : bits.shape[1]] = bits
    return packed


def _name(rows: Rows) -> str:
    return "" if rows.path is None else Path(rows.path).name
