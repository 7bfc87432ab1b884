"""The functions behind ``kimi-gguf eval`` and ``kimi-gguf eval record``; parameters are named as the flags.

Both engines run through one door: ``(models, tokens, listener) -> settings``. The stream engine is
``stream.run_stream``; llama.cpp's is ``llama_run.run_llama``, which is loaded only when it is asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from kimi_gguf.reference.options import preset as reference_preset
from kimi_gguf.verify.bars import Bars
from kimi_gguf.verify.comparison import Comparison
from kimi_gguf.verify.listeners import Compare, CompareWithTrace, Listener, Record
from kimi_gguf.verify.models import OpenModel, file_hashes, open_model
from kimi_gguf.verify.observations import DEFAULT_CONTEXT, EngineName, NoProgress, Progress, TokenSet
from kimi_gguf.verify.places import check_outfile, parse_memory
from kimi_gguf.verify.result import EvalReport
from kimi_gguf.verify.stream import StreamSettings, run_stream
from kimi_gguf.verify.text import read_tokens
from kimi_gguf.verify.trace import LIVE_ONLY, TraceReader, TraceWriter, is_trace, trace_header
from kimi_gguf.verify.trace_format import DEFAULT_TOP, MAX_TOP
from quant.errors import InputError, UsageError

PathLike = str | os.PathLike[str]

_WIDTHS = {"vocab_size": "size of the vocabulary", "hidden": "width of hidden states"}

ENGINES: tuple[EngineName, ...] = ("stream", "llama")


@dataclass(frozen=True, slots=True)
class RecordResult:
    """A recorded trace: where, how large, and of what."""

    path: Path
    nbytes: int
    token_bytes: int
    tokens: int
    chunks: int
    context: int
    engine: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "kimi-gguf eval record",
            "path": str(self.path),
            "bytes": self.nbytes,
            "bytes_per_token": self.token_bytes,
            "tokens": self.tokens,
            "chunks": self.chunks,
            "context": self.context,
            "engine": self.engine,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class _Run:
    """How an engine is run, whichever it is."""

    engine: EngineName
    rpc: Sequence[str]
    settings: StreamSettings

    def __call__(self, models: Sequence[OpenModel], tokens: TokenSet, listener: Listener) -> dict[str, Any]:
        if self.engine == "stream":
            return run_stream(models, tokens, listener, self.settings)
        for model in models:
            if model.path.is_dir():
                raise UsageError(f"{model.path} is a checkpoint; llama.cpp runs GGUF", "use --engine stream")
        run_llama = import_module("kimi_gguf.verify.llama_run").run_llama
        found: dict[str, Any] = run_llama(
            [model.path for model in models],
            tokens,
            listener,
            rpc=self.rpc,
            progress=self.settings.progress,
            note=self.settings.note,
        )
        return found


def evaluate(
    model: PathLike,
    *,
    baseline: PathLike,
    text: PathLike,
    engine: EngineName = "stream",
    rpc: Sequence[str] = (),
    tokens: int | None = None,
    context: int | None = None,
    memory: str | int = "20G",
    device: str = "cpu",
    scratch: PathLike | None = None,
    resume: bool = False,
    teacher_forced: bool = False,
    preset: str | None = None,
    bars: Bars | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> EvalReport:
    """Compare a model with a baseline, token by token and layer by layer.

    Args:
        model: GGUF (first file of a split set) or folder of a checkpoint.
        baseline: the same, or a trace.
        text: UTF-8 text that both run on.
        engine: ``stream``, or ``llama`` with workers ``rpc``.
        tokens, context: tokens in all, and per independent chunk (512); a trace brings its own.
        memory, device, scratch, resume: of the stream engine.
        teacher_forced: each layer of the model gets the baseline's hidden states.
        preset: conventions of the reference: ``official`` (the default) or ``llama.cpp``.
        bars: that the report must hold.

    Raises:
        UsageError: parameters that make no sense together.
        InputError: a model, text or trace that cannot be used, or outputs that are no numbers.
    """
    begin = time.monotonic()
    _check_engine(engine, rpc, teacher_forced)
    _check_stream_flags(engine, device, scratch, resume, preset)
    hashes: dict[str, str] = {}

    def hash_files() -> None:
        note("reading the files of the model once more, for their SHA-256")
        hashes.update(file_hashes(Path(model)))

    with ExitStack() as stack:
        trace = stack.enter_context(TraceReader(Path(baseline))) if is_trace(Path(baseline)) else None
        if trace is not None:
            preset = _check_trace(trace, engine, preset, teacher_forced)
            tokens = trace.header.tokens if tokens is None else tokens
            context = trace.header.context if context is None else context
        opened = stack.enter_context(open_model(Path(model)))
        seen = _read_tokens(opened, Path(text), DEFAULT_CONTEXT if context is None else context, tokens)
        run = _run(engine, rpc, memory, device, scratch, resume, preset or "official", progress, note)
        run = replace(run, settings=replace(run.settings, teacher_forced=teacher_forced))
        if trace is not None:
            trace.check_tokens(seen)
            comparison = Comparison(seen, trace.header.model, opened.identity)
            settings = run([opened], seen, CompareWithTrace(comparison, trace, seen, hash_files))
        else:
            other = stack.enter_context(open_model(Path(baseline)))
            _check_vocabularies(other, opened)
            _check_widths(other, opened)
            comparison = Comparison(seen, other.identity, opened.identity)
            settings = run([other, opened], seen, Compare(comparison, hash_files))
    report = EvalReport(
        engine=engine,
        model=comparison.model,
        baseline=comparison.base,
        baseline_kind="live" if trace is None else "trace",
        text_name=seen.text_name,
        text_sha256=seen.text_sha256,
        context=seen.context,
        chunks=seen.chunks,
        tokens=seen.tokens,
        scored=comparison.scored,
        teacher_forced=teacher_forced,
        routing=comparison.routing(),
        divergence=comparison.divergence(),
        layers=comparison.layers(),
        output=comparison.output_result(),
        seconds=time.monotonic() - begin,
        missing=_missing(opened, seen, from_trace=trace is not None),
        flags=comparison.flags(),
        settings={"preset": preset or "official", **settings},
        model_files=hashes,
    )
    wanted = bars or Bars()
    return replace(report, bars=wanted.stated(), below_bar=wanted.missed(report))


def record(
    base: PathLike,
    *,
    text: PathLike,
    outfile: PathLike,
    engine: EngineName = "stream",
    rpc: Sequence[str] = (),
    tokens: int | None = None,
    context: int = DEFAULT_CONTEXT,
    top: int = DEFAULT_TOP,
    memory: str | int = "20G",
    device: str = "cpu",
    scratch: PathLike | None = None,
    resume: bool = False,
    preset: str = "official",
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> RecordResult:
    """Run a baseline once and keep what comparisons need of it.

    Args:
        base: GGUF or folder of a checkpoint.
        outfile: of the trace.
        top: likeliest tokens kept per position.
        others: as ``evaluate``.

    Raises:
        UsageError, InputError: as ``evaluate``.
        OutputError: the disk has no room for the trace.
    """
    begin = time.monotonic()
    _check_engine(engine, rpc, False)
    _check_stream_flags(engine, device, scratch, resume, None)
    if not 1 <= top <= MAX_TOP:
        raise UsageError(f"--top {top} is no number of tokens to keep", f"give 1 to {MAX_TOP}; 96 without the flag")
    check_outfile(Path(outfile), "trace", is_trace)
    with open_model(Path(base)) as opened:
        seen = _read_tokens(opened, Path(text), context, tokens)
        run = _run(engine, rpc, memory, device, scratch, resume, preset, progress, note)
        header = trace_header(engine, preset, opened.identity, seen, top)
        note(f"the trace takes {header.token_bytes:,} bytes per token, {header.tokens * header.token_bytes:,} in all")
        writer = TraceWriter(Path(outfile), header, seen, resume=resume)
        try:
            run([opened], seen, Record(writer))
        finally:
            writer.close()
        path = writer.path
    return RecordResult(
        path=path,
        nbytes=path.stat().st_size,
        token_bytes=header.token_bytes,
        tokens=seen.tokens,
        chunks=seen.chunks,
        context=context,
        engine=engine,
        seconds=time.monotonic() - begin,
    )


def _run(
    engine: EngineName,
    rpc: Sequence[str],
    memory: str | int,
    device: str,
    scratch: PathLike | None,
    resume: bool,
    preset: str,
    progress: Progress | None,
    note: Callable[[str], None],
) -> _Run:
    settings = StreamSettings(
        memory=parse_memory(memory),
        device=device,
        scratch=None if scratch is None else Path(scratch),
        resume=resume,
        # Absorbing is a matter of speed; expanded keys are the cheaper form here.
        options=replace(reference_preset(preset), absorbed=False),
        progress=progress or NoProgress(),
        note=note,
    )
    return _Run(engine, tuple(rpc), settings)


def _check_engine(engine: str, rpc: Sequence[str], teacher_forced: bool) -> None:
    if engine not in ENGINES:
        raise UsageError(f"unknown engine {engine!r}", f"known: {', '.join(ENGINES)}")
    if engine != "llama" and rpc:
        raise UsageError("--rpc needs --engine llama", "the stream engine runs on this machine alone")
    if engine == "llama" and teacher_forced:
        raise UsageError("--teacher-forced needs --engine stream", "llama.cpp cannot be given hidden states")


def _check_stream_flags(engine: str, device: str, scratch: PathLike | None, resume: bool, preset: str | None) -> None:
    """Refuse what llama.cpp would have to ignore."""
    given = {"--device": device != "cpu", "--scratch": scratch is not None, "--resume": resume, "--preset": preset}
    for flag, is_given in given.items():
        if engine == "llama" and is_given:
            raise UsageError(f"{flag} needs --engine stream", "leave it out; a run of llama.cpp starts anew each time")


def _check_widths(base: OpenModel, model: OpenModel) -> None:
    """What must be equal for hidden states and logits to be compared, and is not in a trace."""
    for what in _WIDTHS:
        mine, other = getattr(base.store.config, what), getattr(model.store.config, what)
        if mine != other:
            raise InputError(
                f"{base.identity.label} and {model.identity.label} differ in {_WIDTHS[what]}: {mine} and {other}",
                "compare a GGUF with the checkpoint that it was made from",
            )


def _check_vocabularies(base: OpenModel, model: OpenModel) -> None:
    if base.vocabulary.digest != model.vocabulary.digest:
        raise InputError(
            f"{base.identity.label} and {model.identity.label} have different vocabularies",
            "compare a GGUF with the checkpoint that it was made from",
        )


def _check_trace(trace: TraceReader, engine: str, preset: str | None, teacher_forced: bool) -> str:
    """The preset that the trace was recorded with."""
    header = trace.header
    if teacher_forced:
        raise UsageError(f"--teacher-forced {LIVE_ONLY['teacher_forced']}", "name a model as --baseline")
    if header.engine != engine:
        raise UsageError(
            f"{trace.path} was recorded with the {header.engine} engine; figures of two engines do not compare",
            f"use --engine {header.engine}, or record the baseline again",
        )
    if preset not in (None, header.preset):
        raise UsageError(f"{trace.path} was recorded with --preset {header.preset}", "use the same one")
    return header.preset


def _read_tokens(model: OpenModel, text: Path, context: int, tokens: int | None) -> TokenSet:
    return read_tokens(text, model.vocabulary, model.store.config.vocab_size, context=context, tokens=tokens)


def _missing(model: OpenModel, tokens: TokenSet, *, from_trace: bool) -> dict[str, str]:
    """Measures that this run cannot take, and why."""
    missing = {name: why for name, why in LIVE_ONLY.items() if name != "teacher_forced"} if from_trace else {}
    top_k = model.identity.indexer_top_k
    if top_k is None:
        missing["indexer_overlap"] = "the model has no indexer"
    elif top_k >= tokens.context:
        missing["indexer_overlap"] = f"with a context of {tokens.context} all keys are kept (top-k {top_k})"
    return missing
