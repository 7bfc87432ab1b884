"""Hidden states of all tokens by name, what a layer decided, and the mixing of attention residuals in slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kimi_gguf.reference.attn_res import mix
from kimi_gguf.reference.ops import rms_norm
from kimi_gguf.verify.stream_blocks import Tap
from kimi_gguf.verify.stream_state import Rows


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

    ids: Rows | None = None
    weights: Rows | None = None
    probs: Rows | None = None
    selection: Rows | None = None

    def drop(self) -> None:
        """Free it."""
        for rows in (self.ids, self.weights, self.probs, self.selection):
            if rows is not None:
                rows.drop()


@dataclass(frozen=True, slots=True)
class Mixer:
    """Reads hidden states for a sublayer: attention residuals and a norm, some tokens at a time.

    Attributes:
        eps: of both; step: tokens at a time; device: where results are wanted.
    """

    eps: float
    step: int
    device: torch.device

    def normed(
        self, hidden: Hidden, begin: int, end: int, score: Tensor, norm: Tensor, *, always: bool = True
    ) -> Tensor:
        """Inputs float32 [n, d] of tokens [begin, end).

        Args:
            score, norm: [d], as in ``attn_res.mix`` and of the RMSNorm.
            always: mix even where nothing was committed; False takes the residual then, as layer 0 does.
        """
        out = torch.empty(end - begin, hidden.residual.width)
        for low, high in slices(end - begin, self.step):
            h = self.tensor(hidden.residual, begin + low, begin + high)
            if hidden.blocks or always:
                blocks = [self.tensor(rows, begin + low, begin + high) for rows in hidden.blocks]
                h = mix(blocks, h, score, self.eps)
            out[low:high] = rms_norm(h, norm, self.eps)
        return out

    def tensor(self, rows: Rows, begin: int, end: int) -> Tensor:
        """Rows [begin, end) on the device."""
        return torch.from_numpy(rows.read(begin, end)).to(self.device)


def add(rows: Rows, begin: int, y: Tensor) -> None:
    """Add ``y`` to the rows from ``begin`` on."""
    rows.write(begin, rows.read(begin, begin + len(y)) + y.cpu().numpy())


class LayerTap:
    """A tap that puts the layer's prefix in front of names."""

    def __init__(self, tap: Tap, layer: int) -> None:
        self._tap = tap
        self._prefix = f"blk.{layer}."

    def rows(self, name: str, rows: Tensor, expert: int | None = None) -> None:
        self._tap.rows(self._prefix + name, rows, expert)

    def squares(self, name: str, sums: Tensor, count: int) -> None:
        self._tap.squares(self._prefix + name, sums, count)


def slices(count: int, step: int) -> Iterator[tuple[int, int]]:
    """Ranges of ``step`` that cover ``count``, the last one shorter."""
    return ((begin, min(begin + step, count)) for begin in range(0, count, step))


def pack_bits(chosen: Tensor, width: int) -> npt.NDArray[np.uint8]:
    """Bool [B, T, T] as bits, U8 [B * T, width]."""
    bits = np.packbits(chosen.cpu().numpy().reshape(-1, chosen.shape[-1]), axis=1, bitorder="little")
    packed = np.zeros((len(bits), width), dtype=np.uint8)
    packed[:, : bits.shape[1]] = bits
    return packed


def unpack_bits(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.bool_]:
    """The first ``count`` bits of each row as bool."""
    return np.unpackbits(packed, axis=1, count=count, bitorder="little").astype(bool)
