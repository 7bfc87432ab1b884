"""The llama engine: the patched llama.cpp over a text, of one model or two, told to the same listeners as the stream
engine. llama.cpp runs in child processes.

Each chunk is a sequence of its own: caches and KDA states are cleared before it. Two models run side by side, except
over RPC: a worker serves one client at a time, so there the first model's observations wait on disk (without hidden
states, which would be gigabytes) until the second has run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convert.disk import disk_faults, free_bytes
from kimi_gguf.cluster.llama_engine import Decoded, EngineOptions, LlamaEngine
from kimi_gguf.cluster.runtime import Runtime, find
from kimi_gguf.verify.listeners import Listener
from kimi_gguf.verify.observations import FullLogits, LayerObservation, NoProgress, Place, Progress, TokenSet
from quant.errors import OutputError, UsageError

Array = npt.NDArray[Any]
Piece = tuple[dict[int, LayerObservation], FullLogits]

_PIECE_TOKENS = 512
_KEPT = ("expert_ids", "expert_weights", "router_probs")
_ROOM = 1.25


def engine_options(context: int, rpc: Sequence[str] = (), threads: int | None = None) -> EngineOptions:
    """Options that round nothing but what the weights' own types ask for."""
    batch = min(_PIECE_TOKENS, context)
    return EngineOptions(
        n_ctx=-(-context // 256) * 256,
        n_batch=batch,
        n_ubatch=batch,
        threads=threads,
        cache_type="f32",
        flash_attn="off",
        rpc=tuple(rpc),
    )


def run_llama(
    models: Sequence[Path],
    tokens: TokenSet,
    listener: Listener,
    *,
    rpc: Sequence[str] = (),
    threads: int | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda text: None,
    runtime: Runtime | None = None,
) -> dict[str, Any]:
    """Run GGUF models over ``tokens`` and tell ``listener`` what llama.cpp lets be seen.

    Args:
        models: one, or a baseline and a model.
        rpc: workers, ``host:port``.
        threads: of the CPU backend.
        runtime: ``runtime.find()`` by default.

    Returns:
        settings worth keeping in a report.

    Raises:
        UsageError: no runtime, or a text that the model's vocabulary is too small for.
        InputError: a file that does not fit its architecture.
        RuntimeFault: llama.cpp or a worker refuses.
        OutputError: no room for the baseline's observations, over RPC.
    """
    runtime = runtime or find()
    options = engine_options(tokens.context, rpc, threads)
    progress = progress or NoProgress()
    places = list(_places(tokens))
    progress.begin("chunks", len(places) * len(models))
    listener.attach(None)
    if len(models) > 1 and rpc:
        note(f"{models[0].name} and {models[1].name} run one after the other: a worker serves one client")
        _one_after_the_other(models, tokens, listener, options, runtime, places, progress)
    else:
        _side_by_side(models, tokens, listener, options, runtime, places, progress)
    listener.finish()
    return {
        "llama_cpp": runtime.facts.commit,
        "cache_type": options.cache_type,
        "flash_attn": options.flash_attn,
        "rpc": list(rpc),
    }


def _places(tokens: TokenSet) -> Iterator[Place]:
    for whole in tokens.places():
        for begin in range(0, whole.end, _PIECE_TOKENS):
            yield Place(whole.chunk, begin, min(begin + _PIECE_TOKENS, whole.end))


def _side_by_side(
    models: Sequence[Path],
    tokens: TokenSet,
    listener: Listener,
    options: EngineOptions,
    runtime: Runtime,
    places: Sequence[Place],
    progress: Progress,
) -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(_open(path, options, runtime, tokens)) for path in models]
        for number, place in enumerate(places):
            pieces = [_run(engine, tokens, place) for engine in engines]
            _tell(listener, tokens, place, pieces)
            progress.step((number + 1) * len(models), f"chunk {place.chunk}")


def _one_after_the_other(
    models: Sequence[Path],
    tokens: TokenSet,
    listener: Listener,
    options: EngineOptions,
    runtime: Runtime,
    places: Sequence[Place],
    progress: Progress,
) -> None:
    needed = int(_ROOM * 4 * tokens.tokens * tokens.vocab_size)
    if free_bytes(Path()) < needed:
        raise OutputError(
            f"the baseline's logits take {needed:,} bytes here, {free_bytes(Path()):,} are free",
            "record it first: kimi-gguf eval record BASE --engine llama --rpc ...; a trace takes about 4 KB per token",
        )
    with tempfile.TemporaryDirectory(prefix=".kimi-gguf-base-", dir=Path()) as name:
        folder = Path(name)
        with _open(models[0], options, runtime, tokens) as engine:
            for number, place in enumerate(places):
                with disk_faults(folder):
                    _save(folder / f"{number}.npz", _run(engine, tokens, place))
                progress.step(number + 1, f"baseline, chunk {place.chunk}")
        with _open(models[1], options, runtime, tokens) as engine:
            for number, place in enumerate(places):
                file = folder / f"{number}.npz"
                _tell(listener, tokens, place, [_load(file), _run(engine, tokens, place)])
                file.unlink()
                progress.step(len(places) + number + 1, f"chunk {place.chunk}")


def _open(path: Path, options: EngineOptions, runtime: Runtime, tokens: TokenSet) -> LlamaEngine:
    engine = LlamaEngine(path, options, runtime=runtime)
    if engine.model.vocab != tokens.vocab_size:
        engine.close()
        raise UsageError(
            f"{path} has {engine.model.vocab} tokens, the text was read with {tokens.vocab_size}",
            "compare models of one vocabulary",
        )
    return engine


def _run(engine: LlamaEngine, tokens: TokenSet, place: Place) -> Piece:
    """Continue a chunk by one piece; its first piece begins a new sequence."""
    if place.begin == 0:
        engine.clear()
    ids = tokens.chunk_ids(place.chunk)[place.begin : place.end]
    seen = engine.decode(ids, trace=("experts", "router", "selections", "hidden"))
    layers = sorted({*seen.experts, *seen.selections, *seen.hidden})
    return {layer: _observation(seen, layer, place) for layer in layers}, FullLogits(seen.logits)


def _observation(seen: Decoded, layer: int, place: Place) -> LayerObservation:
    selected = None
    if layer in seen.selections:
        selected = np.zeros((place.end - place.begin, place.end), dtype=bool)
        for row, cells in zip(selected, seen.selections[layer], strict=True):
            row[cells] = True
    return LayerObservation(
        expert_ids=seen.experts.get(layer),
        expert_weights=seen.expert_weights.get(layer),
        router_probs=seen.router_probs.get(layer),
        selected=selected,
        hidden=seen.hidden.get(layer),
    )


def _tell(listener: Listener, tokens: TokenSet, place: Place, pieces: Sequence[Piece]) -> None:
    for layer in pieces[0][0]:
        listener.layer(place, layer, [layers[layer] for layers, _ in pieces])
    scored = len(tokens.targets(place))
    if scored:
        listener.output(place, [FullLogits(logits.values[:scored]) for _, logits in pieces])


def _save(path: Path, piece: Piece) -> None:
    layers, logits = piece
    arrays: dict[str, Array] = {"logits": logits.values, "layers": np.array(list(layers))}
    for layer, seen in layers.items():
        kept = {name: getattr(seen, name) for name in _KEPT}
        arrays |= {f"{layer} {name}": value for name, value in kept.items() if value is not None}
        if seen.selected is not None:
            arrays[f"{layer} selected"] = np.packbits(seen.selected, axis=1)
            arrays[f"{layer} width"] = np.array(seen.selected.shape[1])
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _load(path: Path) -> Piece:
    with np.load(path) as arrays:
        layers = {}
        for layer in arrays["layers"].tolist():
            fields = {name: arrays[f"{layer} {name}"] for name in _KEPT if f"{layer} {name}" in arrays}
            if f"{layer} selected" in arrays:
                packed, width = arrays[f"{layer} selected"], int(arrays[f"{layer} width"])
                fields["selected"] = np.unpackbits(packed, axis=1, count=width).astype(bool)
            layers[layer] = LayerObservation(**fields)
        return layers, FullLogits(arrays["logits"])
