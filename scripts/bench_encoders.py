"""Error and speed of the native encoders as ratios to ggml's, both in this process, one thread.

Data: Gaussian and Student-t(5) weights with a log-normal spread (sigma 0.3) of scale from row to row, rounded to MXFP4
by both rules in use, in rows of 3584 and 3072; and the weights of a checkpoint where one is given. The machine may be
shared: the two sides take turns, time is the thread's own, and the best of several turns counts.

    python scripts/bench_encoders.py [--types Q6_K,Q5_K] [--turns 3] [--checkpoint DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from encoder_optimum import FORMATS, optimum

from quant import ggml, mxfp4, native
from quant.tensors import F32Array, Mxfp4Rows, U8Array
from quant.types import QuantType, block_size, parse_type

WEIGHTS_PER_SET = 1 << 19
TIMED_WEIGHTS = 1 << 16
SIGMAS = (0.7, 1.5)
EXACT = ("Q8_0", "Q6_K", "Q5_K")
SEARCHED = ("Q4_K", "Q3_K", "Q2_K")
ERROR_BARS = {
    None: {"Q4_K": 0.90, "Q3_K": 0.88, "Q2_K": 0.745},
    0.7: {"Q4_K": 0.94, "Q3_K": 0.96, "Q2_K": 0.92},
    1.5: {"Q4_K": 0.86, "Q3_K": 0.92, "Q2_K": 0.88},
}
SPEED_BARS = {
    "avx512": {"Q8_0": 2.0, "Q6_K": 10.0, "Q5_K": 10.0, "Q4_K": 10.0, "Q3_K": 3.0, "Q2_K": 8.0},
    "avx2": {"Q6_K": 4.0, "Q5_K": 4.0, "Q4_K": 4.0, "Q2_K": 4.0},
    "scalar": {name: 1.0 for name in (*EXACT, *SEARCHED)},
}
WEIGHTED_SPEED_BARS = {"Q4_K": 5.0, "Q3_K": 2.0, "Q2_K": 5.0}


@dataclass(frozen=True, slots=True)
class DataSet:
    """MXFP4 rows, their values, and importances by the sigma that they were drawn with."""

    name: str
    rows: Mxfp4Rows
    values: F32Array
    importance: dict[float | None, F32Array | None]


@dataclass(slots=True)
class Result:
    """Measurements of one type under one kind of weights: by data set, and by instruction set."""

    qtype: str
    sigma: float | None
    exact: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    optimum: dict[str, float] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)
    nanoseconds: dict[str, float] = field(default_factory=dict)


def data_set(name: str, rows: Mxfp4Rows, rng: np.random.Generator) -> DataSet:
    columns = rows.packed.shape[1] * 2
    importance: dict[float | None, F32Array | None] = {None: None}
    for sigma in SIGMAS:
        importance[sigma] = np.exp(sigma * rng.standard_normal(columns)).astype(np.float32)
    return DataSet(name, rows, mxfp4.decode(rows), importance)


def synthetic(seed: int) -> list[DataSet]:
    sets = []
    for columns in (3584, 3072):
        count = WEIGHTS_PER_SET // columns
        for family in ("gauss", "t5"):
            for rule in ("floor", "ceil"):
                rng = np.random.default_rng([seed, columns, family == "t5"])
                shape = (count, columns)
                raw = rng.standard_normal(shape) if family == "gauss" else rng.standard_t(5, shape)
                spread = np.exp(0.3 * rng.standard_normal((count, 1)))
                rows = mxfp4.quantize((0.02 * spread * raw).astype(np.float32), rule)  # type: ignore[arg-type]
                sets.append(data_set(f"{family} {rule} {columns}", rows, rng))
    return sets


def from_checkpoint(directory: Path) -> list[DataSet]:
    """Up to WEIGHTS_PER_SET expert weights of each row length that the checkpoint holds, in file order."""
    from safetensors import safe_open

    found: dict[int, list[Mxfp4Rows]] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, framework="np") as tensors:
            names = tensors.keys()
            for name in names:
                if not name.endswith("weight_packed"):
                    continue
                packed = tensors.get_tensor(name)
                scales = tensors.get_tensor(name.replace("weight_packed", "weight_scale")).view(np.uint8)
                found.setdefault(packed.shape[1] * 2, []).append(Mxfp4Rows(packed, scales))
    sets = []
    for columns, parts in sorted(found.items()):
        count = WEIGHTS_PER_SET // columns
        packed = np.concatenate([part.packed for part in parts])[:count]
        scales = np.concatenate([part.scales for part in parts])[:count]
        if columns % 256 == 0:
            rng = np.random.default_rng(columns)
            sets.append(data_set(f"checkpoint {columns}", Mxfp4Rows(packed, scales), rng))
    return sets


def seconds(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of one call by ``clock``, from as many calls as fill four milliseconds."""
    calls = 0
    begin = clock()
    while True:
        action()
        calls += 1
        elapsed = clock() - begin
        if elapsed >= 0.004:
            return elapsed / calls


def with_isa(isa: str, action: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        os.environ[native.ISA_VARIABLE] = isa
        return action()

    return run


def weighted_error(encoded: U8Array, data: DataSet, qtype: QuantType, importance: F32Array | None) -> float:
    decoded = ggml.decode(encoded, qtype, data.values.shape[1])
    squares = (decoded.astype(np.float64) - data.values) ** 2
    return float((squares if importance is None else squares * importance).sum())


def measure(qtype: QuantType, sigma: float | None, sets: list[DataSet], turns: int) -> Result:
    result = Result(qtype.name, sigma)
    for data in sets:
        importance = data.importance[sigma]
        theirs = ggml.encode(data.values, qtype, importance)
        ours, stats = native.encode_with_stats(data.rows, qtype, importance)
        reference = weighted_error(theirs, data, qtype, importance)
        result.exact[data.name] = stats.exact / stats.blocks
        result.error[data.name] = weighted_error(ours, data, qtype, importance) / reference
        if qtype in FORMATS:
            weights = None if importance is None else importance.astype(np.float64)
            result.optimum[data.name] = optimum(data.rows, qtype, weights) / reference

        count = min(len(data.values), TIMED_WEIGHTS // data.values.shape[1] + 1)
        few = Mxfp4Rows(data.rows.packed[:count], data.rows.scales[:count])
        values = data.values[:count]

        def run_ggml(values: F32Array = values, importance: F32Array | None = importance) -> object:
            return ggml.encode(values, qtype, importance)

        def run_native(few: Mxfp4Rows = few, importance: F32Array | None = importance) -> object:
            return native.encode(few, qtype, importance)

        best = dict.fromkeys(("ggml", *native.available_isas()), float("inf"))
        for _ in range(turns):
            best["ggml"] = min(best["ggml"], seconds(run_ggml, time.thread_time))
            for isa in native.available_isas():
                best[isa] = min(best[isa], seconds(with_isa(isa, run_native), time.thread_time))
        os.environ.pop(native.ISA_VARIABLE, None)
        for isa in native.available_isas():
            ratio = best["ggml"] / best[isa]
            result.speed[isa] = min(result.speed.get(isa, float("inf")), ratio)
            cost = best[isa] / values.size * 1e9
            result.nanoseconds[isa] = max(result.nanoseconds.get(isa, 0.0), cost)
    return result


def repack_against_memcpy(turns: int) -> float:
    """Speed of the MXFP4 repack relative to a copy of as many bytes, buffers of at least 256 MiB."""
    columns = 3584
    count = (256 << 20) // (columns // 32 * 16) + 1
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (count, columns // 2), dtype=np.uint8)
    scales = rng.integers(110, 124, (count, columns // 32), dtype=np.uint8)
    source = np.empty((count, columns // 32 * 17), dtype=np.uint8)
    source[:] = 1
    target = np.empty_like(source)
    rows = Mxfp4Rows(packed, scales)
    best = [float("inf"), float("inf")]
    for _ in range(turns + 1):
        best[0] = min(best[0], seconds(lambda: np.copyto(target, source)))
        best[1] = min(best[1], seconds(lambda: native.encode_into(rows, QuantType.MXFP4, target)))
    return best[0] / best[1]


def scaling(works: list[Callable[[], object]], turns: int) -> float:
    """Throughput of two threads, one for each of ``works``, over that of one, in stretches of a quarter second."""
    calls = max(1, int(0.25 / seconds(works[0])))

    def repeat(work: Callable[[], object]) -> None:
        for _ in range(calls):
            work()

    def both() -> None:
        threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    best = [float("inf"), float("inf")]
    for _ in range(turns + 2):
        best[0] = min(best[0], seconds(lambda: repeat(works[0])))
        best[1] = min(best[1], seconds(both))
    return 2 * best[0] / best[1]


def encoder_scaling(qtype: QuantType, data: DataSet, turns: int) -> float:
    """Of calls long enough that handing over the interpreter between them does not count."""
    times = 8 if qtype.name in EXACT else 1
    rows = Mxfp4Rows(np.tile(data.rows.packed, (times, 1)), np.tile(data.rows.scales, (times, 1)))
    outs = [native.encode(rows, qtype) for _ in range(2)]
    return scaling([lambda out=out: native.encode_into(rows, qtype, out) for out in outs], turns)


def machine_scaling(turns: int) -> float:
    """The same for work that shares nothing, SHA-256 of 1 MiB: what a busy machine has to give at the moment."""
    block = bytes(1 << 20)
    return scaling([lambda: hashlib.sha256(block)] * 2, turns)


def verdict(value: float, bar: float | None, at_least: bool) -> str:
    if bar is None:
        return ""
    passed = value >= bar if at_least else value <= bar
    return f"{'>=' if at_least else '<='} {bar:g} {'ok' if passed else 'MISSED'}"


def print_errors(results: list[Result]) -> None:
    print(
        "\nError relative to ggml's encoder, sum of weight * error^2; in brackets that of free scales, and ours over it"
    )
    for result in results:
        weights = "equal weights" if result.sigma is None else f"importance sigma {result.sigma}"
        print(f"\n{result.qtype}, {weights}")
        for name, error in result.error.items():
            best = f"[{result.optimum[name]:.4f} {error / result.optimum[name]:.3f}]" if name in result.optimum else ""
            if result.qtype in EXACT:
                note = verdict(result.exact[name], 0.99, at_least=True)
            else:
                note = verdict(error, ERROR_BARS[result.sigma].get(result.qtype), at_least=False)
            if name in result.optimum and result.sigma is None:
                note += f", over the optimum {verdict(error / result.optimum[name], 1.05, at_least=False)}"
            print(f"  {name:18} {error:8.4f} {best:14} exact blocks {result.exact[name]:8.4%}  {note}")


def print_speeds(results: list[Result]) -> None:
    print("\nSpeed relative to ggml's encoder, slowest data set; nanoseconds for a weight")
    for result in results:
        weights = "" if result.sigma is None else f" importance {result.sigma}"
        for isa, ratio in result.speed.items():
            bar = SPEED_BARS.get(isa, {}).get(result.qtype)
            if result.sigma is not None:
                bar = WEIGHTED_SPEED_BARS.get(result.qtype) if isa == "avx512" else None
            note = verdict(ratio, bar, at_least=True)
            print(f"  {result.qtype + weights:22} {isa:7} {ratio:8.2f} x {result.nanoseconds[isa]:9.3f} ns  {note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join((*EXACT, *SEARCHED)), help="types to measure")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="folder of a checkpoint whose expert weights are measured too")
    parser.add_argument("--no-repack", action="store_true", help="leave out the MXFP4 repack and its 800 MB")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()

    types = [parse_type(name) for name in options.types.split(",")]
    types = [qtype for qtype in types if native.supports("MXFP4", qtype)]
    sets = synthetic(options.seed)
    if options.checkpoint:
        sets += from_checkpoint(options.checkpoint)
    results = []
    for qtype in types:
        for sigma in (None, *SIGMAS) if qtype.name not in EXACT else (None,):
            results.append(measure(qtype, sigma, sets, options.turns))
    print_errors(results)
    print_speeds(results)
    threads = {}
    print(f"\nTwo threads against one (this machine now, on SHA-256: {machine_scaling(options.turns):.2f} x)")
    for qtype in types:
        if block_size(qtype) == 256:
            threads[qtype.name] = encoder_scaling(qtype, sets[0], options.turns)
            print(f"  {qtype.name:6} {threads[qtype.name]:5.2f} x  {verdict(threads[qtype.name], 1.8, at_least=True)}")
    repack = None
    if not options.no_repack:
        repack = repack_against_memcpy(options.turns)
        print(f"\nMXFP4 repack: {repack:.2f} of memcpy  {verdict(repack, 0.6, at_least=True)}")
    if options.json:
        numbers = {
            "results": [{name: getattr(result, name) for name in result.__dataclass_fields__} for result in results],
            "two_threads": threads,
            "repack_over_memcpy": repack,
        }
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
