"""One model on its way through the stream engine: the hidden states of all tokens, moved one layer at a time.

A layer is loaded once for all tokens. Attention runs over groups of chunks; the router and the shared experts over
slices of tokens; then each routed expert that some token chose is read once and sees all its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kimi_gguf.reference.ops import linear
from kimi_gguf.reference.options import Options
from kimi_gguf.reference.weights import BlockNorms, WeightStore
from kimi_gguf.verify.observations import F32Array, FullLogits, LayerObservation, Place, TokenSet
from kimi_gguf.verify.stream_blocks import Limits, NoTap, Tap, run_kda, run_mla, to_device
from kimi_gguf.verify.stream_ffn import FeedForward
from kimi_gguf.verify.stream_hidden import Hidden, LayerTap, Mixer, Seen, pack_bits, slices, unpack_bits
from kimi_gguf.verify.stream_plan import OUTPUT_ROWS, MemoryPlan
from kimi_gguf.verify.stream_state import Rows, StateFolder


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
        self._mixer = Mixer(self.config.rms_norm_eps, plan.mix_tokens, device)

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
            self.selection = self._rows(name, -(-self.tokens.longest // 8), np.uint8)

    def embed(self) -> None:
        """The state before layer 0."""
        residual = self._wide(f"{self.tag}.residual.start")
        for begin, end in slices(self.tokens.tokens, self.plan.slice_tokens):
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
        tap = LayerTap(self.tap, index) if self.tap is not None else None
        for first, last in self._groups():
            begin, end = first * self.tokens.context, min(last * self.tokens.context, self.tokens.tokens)
            x = self._mixer.normed(before, begin, end, norms.attention_score, norms.attention, always=False)
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
                        selected = self._rows(name, -(-self.tokens.longest // 8), np.uint8)
                    selected.write(begin, pack_bits(chosen, selected.width))
            y = y.view(end - begin, config.hidden)
            if not commit:
                y = y + self._mixer.tensor(before.residual, begin, end)
            after.residual.write(begin, y.cpu().numpy())
        return selected

    def _shared_selection(self, first: int, last: int, length: int) -> Tensor | None:
        if self.selection is None:
            return None
        begin = first * self.tokens.context
        packed = self.selection.read(begin, begin + (last - first) * length)
        return torch.from_numpy(unpack_bits(packed, length)).view(last - first, length, length).to(self.device)

    def _ffn(self, index: int, after: Hidden, norms: BlockNorms) -> Seen:
        moe = self.config.moe
        is_dense = index < self.config.dense_layers
        seen = Seen()
        if not is_dense:
            seen.ids = self._rows(f"{self.tag}.ids", moe.used, np.int32)
            seen.weights = self._rows(f"{self.tag}.weights", moe.used, np.float32)
            seen.probs = self._rows(f"{self.tag}.probs", moe.experts, np.float32)
        tap: Tap = LayerTap(self.tap, index) if self.tap is not None else NoTap()
        count = self.tokens.tokens
        part = FeedForward(index, self.store, count, self.plan, self._mixer, norms, after, seen, tap)
        if is_dense:
            part.dense()
        else:
            part.experts()
        return seen

    def observe(self, place: Place, seen: Seen, hidden: Hidden) -> LayerObservation:
        """What the layer that was run last did at ``place``."""
        where = self.tokens.index(place)
        begin, end = where.start, where.stop
        selected = None
        if seen.selection is not None:
            selected = unpack_bits(seen.selection.read(begin, end), place.end)
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
            states = self._mixer.normed(before, begin, end, score, norm)
            if self.tap is not None:
                self.tap.rows("output.weight", states)
        return states

    def logits(self, begin: int, end: int, source: Hidden | None = None) -> FullLogits:
        """Logits of tokens [begin, end), F32 [n, V]; the output matrix is read in blocks of rows."""
        states = self.final_states(begin, end, source)
        values: F32Array = np.empty((end - begin, self.config.vocab_size), dtype=np.float32)
        with torch.inference_mode():
            for low, high in slices(self.config.vocab_size, OUTPUT_ROWS):
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

    def _wide(self, name: str) -> Rows:
        return self._rows(name, self.config.hidden, np.float32)

    def _rows(self, name: str, width: int, dtype: type[np.generic]) -> Rows:
        return self.folder.rows(name, self.tokens.tokens, width, dtype)


def _name(rows: Rows) -> str:
    return "" if rows.path is None else Path(rows.path).name
