"""Traces: a baseline run once, and what comparisons need of it kept (``.kgtrace``).

From a trace: all of routing but the router's own divergence, expert load, first divergence, perplexity and its ratio,
top-1 agreement, the true token's probability change (all exact but for the rounding of weights), and an unbiased
estimate of the KL divergence from the top K tokens and a sample of the others (``measures.top_kl``).
``LIVE_ONLY`` lists the measures that need a live baseline.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from convert.disk import allocated_bytes, disk_faults, free_bytes
from kimi_gguf.verify.comparison import check_finite, check_layer_finite
from kimi_gguf.verify.measures import log_softmax
from kimi_gguf.verify.observations import (
    EngineName,
    FullLogits,
    LayerObservation,
    ModelIdentity,
    PairSink,
    Place,
    TokenSet,
    TopLogProbs,
)
from kimi_gguf.verify.trace_format import (
    DEFAULT_TOP,
    DIGEST_BYTES,
    MAX_HEADER_BYTES,
    TraceHeader,
    pack_experts,
    pack_output,
    parse_header,
    unpack_experts,
    unpack_output,
)
from quant.errors import InputError, KimiGgufError, OutputError

LIVE_ONLY: Mapping[str, str] = {
    "router_kl": "a trace keeps the chosen experts, not the router's scores of all",
    "indexer_overlap": "a trace keeps no selected keys: they grow with the square of the context",
    "hidden_error": "a trace keeps no hidden states",
    "hidden_cosine": "a trace keeps no hidden states",
    "teacher_forced": "needs the baseline's hidden states",
}
"""Measures that a trace cannot give, and why."""

_PACK_ROWS = 64
_HASH_BYTES = 1 << 22


def trace_header(
    engine: EngineName, preset: str, model: ModelIdentity, tokens: TokenSet, top: int = DEFAULT_TOP
) -> TraceHeader:
    """The header of a trace of ``model`` over ``tokens``; K is the vocabulary's size at most."""
    return TraceHeader(
        engine=engine,
        preset=preset,
        model=model,
        tokens=tokens.tokens,
        context=tokens.context,
        vocab_size=tokens.vocab_size,
        digest=tokens.digest,
        text_name=tokens.text_name,
        text_sha256=tokens.text_sha256,
        vocab_sha256=tokens.vocab_sha256,
        top=min(top, tokens.vocab_size),
    )


class TraceWriter:
    """A ``Sink`` that writes a trace; places may come in any order, and again.

    The file appears under its name when ``finish`` has found it complete.

    Args:
        path: of the trace.
        resume: continue the partial file that an interrupted run left.

    Raises:
        OutputError: the disk has no room for it.
    """

    def __init__(self, path: Path, header: TraceHeader, tokens: TokenSet, *, resume: bool = False) -> None:
        self.path = path
        self.header = header
        self._tokens = tokens
        self._partial = path.with_name(path.name + ".partial")
        self._slots = {layer: slot for slot, layer in enumerate(header.model.moe_layers)}
        head = header.packed()
        self._begin = len(head)
        self._size = self._begin + header.tokens * header.token_bytes
        self._seen = np.zeros((len(self._slots) + 1, header.tokens), dtype=bool)
        with disk_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            free = free_bytes(path.parent)
            self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._descriptor)
                raise OutputError(f"another process records {path}", "wait for it to end") from None
            # A partial file of this very trace; only then what a journal says of it is true.
            found = os.fstat(self._descriptor)
            is_ours = found.st_size == self._size and os.pread(self._descriptor, len(head), 0) == head
            self._continues = resume and is_ours
            if not self._continues:
                free += allocated_bytes(self._partial)
                if free < self._size:
                    if not found.st_size:
                        self._partial.unlink()
                    os.close(self._descriptor)
                    raise OutputError(
                        f"{path}: the trace takes {self._size:,} bytes, {free:,} are free",
                        "free some space, name another place with --outfile, or run fewer --tokens",
                    )
                os.ftruncate(self._descriptor, 0)
            os.ftruncate(self._descriptor, self._size)
            os.pwrite(self._descriptor, head, 0)

    def layer(self, place: Place, layer: int, seen: LayerObservation) -> None:
        """Keep the experts of one layer at one place."""
        slot = self._slots.get(layer)
        if slot is None or seen.expert_ids is None or seen.expert_weights is None:
            return
        check_layer_finite(seen, self.header.model.label, layer, place.chunk)
        where = self._tokens.index(place)
        records = pack_experts(self.header, seen.expert_ids, seen.expert_weights)
        self._write(self._expert_offset(slot, where.start), records)
        self._seen[slot, where] = True

    def output(self, place: Place, seen: FullLogits) -> None:
        """Keep the output at one place.

        Raises:
            InputError: logits that are NaN or infinite.
        """
        targets = self._tokens.targets(place)
        begin = self._tokens.index(place).start
        for at in range(0, len(targets), _PACK_ROWS):
            part = slice(at, min(at + _PACK_ROWS, len(targets)))
            check_finite(seen.values[part], self.header.model.label, place.chunk)
            records = pack_output(self.header, log_softmax(seen.values[part]), targets[part], begin + at)
            self._write(self._output_offset(begin + at), records)
        self._seen[-1, begin : begin + len(targets)] = True

    def snapshot(self) -> dict[str, npt.NDArray[Any]]:
        """Which records are there; they are on disk when this returns."""
        with disk_faults(self._partial):
            os.fsync(self._descriptor)
        return {"seen": self._seen}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from a snapshot.

        Raises:
            InputError: the partial file that it speaks of is not there.
        """
        if not self._continues:
            raise InputError(
                f"{self._partial} is not what the interrupted run wrote",
                "name the same FILE with -o as that run, or start anew without --resume",
            )
        self._seen = np.array(state["seen"])

    def finish(self) -> Path:
        """Check that nothing is missing, seal the file and give it its name.

        Raises:
            InputError: a layer or an output was never seen.
        """
        last = np.zeros(self.header.tokens, dtype=bool)
        for place in self._tokens.places():
            last[self._tokens.index(place).stop - 1] = True
        self._seen[-1] |= last
        missing = np.flatnonzero(~self._seen.all(axis=1))
        if len(missing):
            layers = [*self.header.model.moe_layers, "output"]
            raise InputError(
                f"{self.path}: nothing was seen of {layers[missing[0]]} for some tokens",
                "record it anew without --resume",
            )
        with disk_faults(self._partial):
            digest = _digest(self._descriptor, self._size)
            self._write(self._size, np.frombuffer(digest, dtype=np.uint8))
            os.fsync(self._descriptor)
            self._partial.replace(self.path)
        self.close()
        return self.path

    def close(self) -> None:
        """Let others record; what was written stays for ``resume``."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _expert_offset(self, slot: int, token: int) -> int:
        return self._begin + (slot * self.header.tokens + token) * self.header.expert_bytes

    def _output_offset(self, token: int) -> int:
        experts = len(self._slots) * self.header.tokens * self.header.expert_bytes
        return self._begin + experts + token * self.header.output_bytes

    def _write(self, offset: int, records: npt.NDArray[np.uint8]) -> None:
        view = memoryview(np.ascontiguousarray(records).reshape(-1).data)
        with disk_faults(self._partial):
            while view:
                n = os.pwrite(self._descriptor, view, offset)
                view, offset = view[n:], offset + n


class TraceReader:
    """A trace on disk, checked whole when it is opened.

    Raises:
        InputError: not a trace, cut short, damaged, or, when read, values that cannot be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._descriptor).st_size
            head = os.pread(self._descriptor, MAX_HEADER_BYTES + 128, 0)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}", "name another trace") from None
        self.header, self._begin = parse_header(head, str(path))
        expected = self._begin + self.header.tokens * self.header.token_bytes + DIGEST_BYTES
        if size != expected:
            raise InputError(
                f"{path}: {size} bytes, its header makes {expected}", "the trace is cut short; copy it again"
            )
        if _digest(self._descriptor, size - DIGEST_BYTES) != self._read(size - DIGEST_BYTES, 1, DIGEST_BYTES).tobytes():
            raise InputError(f"{path}: the contents do not fit their checksum", "the trace is damaged; copy it again")
        self._slots = {layer: slot for slot, layer in enumerate(self.header.model.moe_layers)}

    def check_tokens(self, tokens: TokenSet) -> None:
        """Refuse a token set that is not the trace's.

        Raises:
            InputError: names what differs: vocabulary, text, context or length.
        """
        header = self.header
        pairs = [
            ("vocabulary", header.vocab_sha256, tokens.vocab_sha256),
            ("size of the vocabulary", header.vocab_size, tokens.vocab_size),
            ("text", header.text_sha256, tokens.text_sha256),
            ("context", header.context, tokens.context),
            ("number of tokens", header.tokens, tokens.tokens),
            ("sequence of tokens", header.digest, tokens.digest),
        ]
        for what, mine, other in pairs:
            if mine != other:
                raise InputError(
                    f"{self.path} was recorded with another {what}: {_short(mine)}, this run has {_short(other)}",
                    f"use the text {header.text_name} with --context {header.context} --tokens {header.tokens}",
                )

    def layer(self, tokens: TokenSet, place: Place, layer: int) -> LayerObservation:
        """What the trace knows of one layer at one place."""
        slot = self._slots.get(layer)
        if slot is None:
            return LayerObservation()
        where = tokens.index(place)
        width = self.header.expert_bytes
        offset = self._begin + (slot * self.header.tokens + where.start) * width
        try:
            ids, weights = unpack_experts(self.header, self._read(offset, where.stop - where.start, width))
        except ValueError as error:
            raise InputError(f"{self.path}, layer {layer}: {error}", "record the trace again") from None
        return LayerObservation(expert_ids=ids, expert_weights=weights)

    def output(self, tokens: TokenSet, place: Place) -> TopLogProbs:
        """What the trace knows of the output of the positions of ``place`` that have a next token."""
        count = len(tokens.targets(place))
        width = self.header.output_bytes
        experts = len(self._slots) * self.header.tokens * self.header.expert_bytes
        offset = self._begin + experts + tokens.index(place).start * width
        try:
            return unpack_output(self.header, self._read(offset, count, width))
        except ValueError as error:
            raise InputError(f"{self.path}, chunk {place.chunk}: {error}", "record the trace again") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def _read(self, offset: int, rows: int, width: int) -> npt.NDArray[np.uint8]:
        data = os.pread(self._descriptor, rows * width, offset)
        if len(data) != rows * width:
            raise InputError(f"{self.path} ends early", "it changed while it was read; run again")
        return np.frombuffer(data, dtype=np.uint8).reshape(rows, width)


class WithTrace:
    """A ``Sink`` that pairs a live model with a trace, for a ``PairSink``."""

    def __init__(self, trace: TraceReader, tokens: TokenSet, pairs: PairSink) -> None:
        self._trace = trace
        self._tokens = tokens
        self._pairs = pairs

    def layer(self, place: Place, layer: int, seen: LayerObservation) -> None:
        self._pairs.layer(place, layer, self._trace.layer(self._tokens, place, layer), seen)

    def output(self, place: Place, seen: FullLogits) -> None:
        self._pairs.output(place, self._trace.output(self._tokens, place), seen)


def is_trace(path: Path) -> bool:
    """Whether the file at ``path`` begins as a trace does."""
    try:
        with path.open("rb") as file:
            parse_header(file.read(MAX_HEADER_BYTES + 128), str(path))
    except (OSError, KimiGgufError):
        return path.suffix == ".kgtrace" and path.is_file()
    return True


def _digest(descriptor: int, size: int) -> bytes:
    digest = hashlib.sha256()
    offset = 0
    while offset < size:
        data = os.pread(descriptor, min(_HASH_BYTES, size - offset), offset)
        if not data:
            break
        digest.update(data)
        offset += len(data)
    return digest.digest()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 12 else text[:12]


__all__: Sequence[str] = ("LIVE_ONLY", "TraceReader", "TraceWriter", "WithTrace", "is_trace", "trace_header")
