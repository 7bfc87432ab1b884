"""Measures conversions of one synthetic K3 checkpoint, ours beside llama.cpp's, in one run.

MXFP4     ours against ``convert_hf_to_gguf.py --outtype bf16``: CPU seconds beyond imports; and against the least
          that a checked copy can cost: the shards copied into one file, and one SHA-256 over it
Q4_K_M, Q2_K
          ours against that converter plus ``llama-quantize --allow-requantize``: CPU and wall seconds

Each side runs in a child process. Ours includes hashing and reading back. llama.cpp's side runs unchanged, but that the
model's own tokenizer code, which a synthetic checkpoint lacks, is a stand-in that hands over ranks and special tokens,
as is ``transformers`` where it is not installed; vocabularies are compared.

    python scripts/bench_convert.py --work-dir /dev/shm/bench \
        --llama-cpp DIR_OF_LLAMA_CPP_SOURCES --llama-quantize PATH_OF_LLAMA_QUANTIZE
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llama_cpp_side

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = 1024
EXPERT_SIDE = 1024
EXPERT_BYTES = 3 * EXPERT_SIDE * EXPERT_SIDE * 17 // 32
DENSE_LAYER_BYTES = 30_000_000
EMBEDDING_BYTES = 67_000_000
FEWEST_EXPERTS = 16
SEED = 7
COPY = "copy and SHA-256"
QUANTIZED = ("Q4_K_M", "Q2_K")


@dataclass(frozen=True)
class Run:
    """One measured child: seconds, bytes of peak memory, bytes of the files that it left, CPU seconds of its
    parts by name."""

    name: str
    wall: float
    cpu: float
    imports_cpu: float
    peak_rss: int
    files: int
    parts: dict[str, float]


def main() -> None:
    arguments = parse_arguments()
    if arguments.child:
        CHILDREN[arguments.child[0]](*arguments.child[1:])
        return
    work: Path = arguments.work_dir
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = work / "checkpoint"
    layers, experts = sizes(arguments.gigabytes * 1e9)
    measure("make", work, checkpoint, "checkpoint", str(checkpoint), str(layers), str(experts))
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    print(f"K3 checkpoint: {layers} layers, {experts} experts of {EXPERT_SIDE} x {EXPERT_SIDE}, {size / 1e9:.2f} GB")
    runs = compare(arguments, work, checkpoint)
    report(runs, arguments.encoder)
    if arguments.json:
        arguments.json.write_text(json.dumps({name: asdict(run) for name, run in runs.items()}, indent=1) + "\n")
    if not arguments.keep:
        remove(*checkpoint.iterdir(), checkpoint)


def sizes(nbytes: float) -> tuple[int, int]:
    """Layers, the first one dense, and experts in each of the others, for a checkpoint of about ``nbytes``."""
    layers = 9 if nbytes > 1e9 else 5
    left = nbytes - EMBEDDING_BYTES - layers * DENSE_LAYER_BYTES
    return layers, max(FEWEST_EXPERTS, round(left / (layers - 1) / EXPERT_BYTES))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, help="where everything is written; a memory disk leaves the disk out")
    parser.add_argument("--gigabytes", type=float, default=3.2, help="size of the checkpoint (default 3.2)")
    parser.add_argument("--threads", type=int, default=2, help="of every side (default 2)")
    parser.add_argument(
        "--encoder", action="append", choices=("ggml", "native"), help="ours; repeatable (default ggml)"
    )
    parser.add_argument("--llama-cpp", type=Path, help="folder with convert_hf_to_gguf.py")
    parser.add_argument("--llama-quantize", type=Path, help="the llama-quantize program")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.encoder = arguments.encoder or ["ggml"]
    if not arguments.child and arguments.work_dir is None:
        parser.error("--work-dir is needed")
    return arguments


def compare(arguments: argparse.Namespace, work: Path, checkpoint: Path) -> dict[str, Run]:
    """Every side of both comparisons; output files are removed as soon as they are measured."""
    threads = str(arguments.threads)
    runs: dict[str, Run] = {}
    sums: dict[str, dict[str, str]] = {}
    copy = work / "copy"
    runs[COPY] = measure(COPY, work, copy, "copy", str(checkpoint), str(copy))
    remove(copy)
    for encoder in arguments.encoder:
        for quant in ("MXFP4", *QUANTIZED):
            name = f"ours {quant} {encoder}"
            file = work / f"ours-{quant}.gguf"
            runs[name] = measure(name, work, file, "ours", str(checkpoint), quant, str(file), threads, encoder)
            sums[name] = manifest_sums(file)
            remove(*work.glob(f"{file.name}*"))
    theirs = work / "theirs-bf16.gguf"
    if arguments.llama_cpp:
        name = "llama.cpp convert"
        runs[name] = measure(
            name, work, theirs, "theirs", str(arguments.llama_cpp), str(checkpoint), str(theirs), threads
        )
        agree("MXFP4", sums, f"ours MXFP4 {arguments.encoder[0]}", theirs)
    if arguments.llama_cpp and arguments.llama_quantize:
        for quant in QUANTIZED:
            name, file = f"llama.cpp {quant}", work / f"theirs-{quant}.gguf"
            command = [str(arguments.llama_quantize), "--allow-requantize", str(theirs), str(file), quant, threads]
            runs[name] = measure(name, work, file, *command)
            agree(quant, sums, f"ours {quant} {arguments.encoder[0]}", file)
            remove(file)
    remove(theirs)
    return runs


def measure(name: str, work: Path, output: Path, *command: str) -> Run:
    """Run one child and weigh what it used; a command without a path is a function of this script."""
    facts = work / "facts.json"
    if not command[0].startswith(("/", ".")):
        command = (sys.executable, __file__, "--child", *command, str(facts))
    print(f"... {name}", file=sys.stderr)
    log = work / "log.txt"
    started = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{name} failed:\n{log.read_text(errors='replace')[-3000:]}")
    inner = json.loads(facts.read_text()) if facts.exists() else {"imports_cpu": 0.0, "imports_wall": 0.0}
    remove(facts, log)
    cpu = usage.ru_utime + usage.ru_stime
    # The memory disk's own pages are no part of a process; ru_maxrss is in KiB on Linux.
    files = [path for path in work.glob(f"{output.name}*") if path.is_file()]
    return Run(
        name,
        wall=wall - inner["imports_wall"],
        cpu=cpu - inner["imports_cpu"],
        imports_cpu=inner["imports_cpu"],
        peak_rss=usage.ru_maxrss * 1024,
        files=sum(path.stat().st_size for path in files),
        parts=inner.get("parts", {}),
    )


def report(runs: dict[str, Run], encoders: list[str]) -> None:
    """The numbers, and the two ratios that matter."""
    print(f"{'':22}{'wall s':>9}{'CPU s':>9}{'imports':>9}{'peak MB':>9}{'files GB':>10}")
    for run in runs.values():
        times = f"{run.wall:9.2f}{run.cpu:9.2f}{run.imports_cpu:9.2f}"
        print(f"{run.name:22}{times}{run.peak_rss / 1e6:9.0f}{run.files / 1e9:10.2f}")
    for run in runs.values():
        if run.parts:
            rest = run.cpu - sum(run.parts.values())
            timed = sorted((*run.parts.items(), ("rest", rest)), key=lambda part: -part[1])
            parts = [f"{name} {seconds:.2f}" for name, seconds in timed if seconds >= 0.005]
            print(f"{run.name}: CPU seconds {', '.join(parts)}")
    convert = runs.get("llama.cpp convert")
    if not convert:
        return
    for encoder in encoders:
        ours = runs[f"ours MXFP4 {encoder}"]
        print(f"MXFP4 {encoder}: llama.cpp takes {convert.cpu / ours.cpu:.2f} times our CPU seconds beyond imports")
        print(f"    and {convert.cpu / runs[COPY].cpu:.2f} times those of a plain copy with one SHA-256")
        for quant in QUANTIZED:
            if quantize := runs.get(f"llama.cpp {quant}"):
                compare_quantized(quant, encoder, runs[f"ours {quant} {encoder}"], convert, quantize)


def compare_quantized(quant: str, encoder: str, ours: Run, convert: Run, quantize: Run) -> None:
    wall, cpu = convert.wall + quantize.wall, convert.cpu + quantize.cpu
    written = (convert.files + quantize.files) / 1e9
    print(
        f"{quant} {encoder}: our wall time is {ours.wall / wall:.2f} of llama.cpp's {wall:.1f} s, our CPU time 1/"
        f"{cpu / ours.cpu:.1f} of its {cpu:.1f} s; {ours.files / 1e9:.2f} GB on disk against {written:.2f} GB"
    )


def manifest_sums(file: Path) -> dict[str, str]:
    """SHA-256 of each tensor, as our manifest states it, and of the vocabulary."""
    manifest = json.loads(Path(f"{file}.manifest.json").read_text())
    sums = {tensor["name"]: f"{tensor['type']} {tensor['sha256']}" for tensor in manifest["tensors"]}
    return sums | {"vocabulary": vocabulary(file)}


def vocabulary(file: Path) -> str:
    """SHA-256 of tokens, their types, and merges."""
    sys.path.insert(0, str(ROOT))
    from quant.gguf_parser import parse_gguf

    metadata = parse_gguf(file).metadata
    digest = hashlib.sha256()
    for key in ("tokens", "token_type", "merges"):
        digest.update("\n".join(map(str, metadata[f"tokenizer.ggml.{key}"].value)).encode())  # type: ignore[arg-type]
    return digest.hexdigest()


def agree(what: str, sums: dict[str, dict[str, str]], ours: str, file: Path) -> None:
    """Print how many tensors of equal type hold equal bytes on both sides."""
    from quant.gguf_parser import parse_gguf

    same = different = 0
    other = []
    with file.open("rb") as stream:
        for tensor in parse_gguf(file).tensors:
            stream.seek(tensor.offset)
            theirs = f"{tensor.qtype.name} {sha256(stream, tensor.nbytes)}"
            mine = sums[ours][tensor.name]
            if mine == theirs:
                same += 1
            elif mine.split()[0] == theirs.split()[0]:
                different += 1
            else:
                other.append(f"{tensor.name} {mine.split()[0]}/{theirs.split()[0]}")
    words = "the same" if sums[ours]["vocabulary"] == vocabulary(file) else "another"
    print(
        f"{what}: {same} tensors equal to llama.cpp's, {different} of equal type differ, {len(other)} of other type; "
        f"{words} vocabulary"
    )


def sha256(stream: Any, nbytes: int) -> str:
    digest = hashlib.sha256()
    while nbytes:
        block = stream.read(min(nbytes, 1 << 24))
        digest.update(block)
        nbytes -= len(block)
    return digest.hexdigest()


def remove(*paths: Path) -> None:
    for path in paths:
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def imported(facts: str, started: float) -> None:
    """Leave what the imports of a child took."""
    Path(facts).write_text(json.dumps({"imports_cpu": cpu_seconds(), "imports_wall": time.monotonic() - started}))


def child_checkpoint(directory: str, layers: str, experts: str, facts: str) -> None:
    sys.path.insert(0, str(ROOT))
    from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint

    shape = TinyShape(
        k31=False,
        layers=int(layers),
        hidden=HIDDEN,
        vocab=16_384,
        kda_heads=8,
        heads=8,
        q_lora=512,
        kv_lora=512,
        ffn_dense=4096,
        experts=int(experts),
        used=16,
        expert_width=EXPERT_SIDE,
        latent=EXPERT_SIDE,
    )
    make_checkpoint(Path(directory), shape, seed=SEED)


def child_ours(checkpoint: str, quant: str, file: str, threads: str, encoder: str, facts: str) -> None:
    started = time.monotonic()
    sys.path.insert(0, str(ROOT))
    from kimi_gguf.api import convert

    imported(facts, started)
    parts = time_parts()
    convert(
        checkpoint, quant=quant, outfile=file, threads=int(threads), encoder="native" if encoder == "native" else "ggml"
    )
    facts_so_far = json.loads(Path(facts).read_text())
    Path(facts).write_text(json.dumps(facts_so_far | {"parts": parts}))


def time_parts() -> dict[str, float]:
    """From now on the worker threads' CPU seconds by what they do, in the dictionary returned."""
    import convert.executor as executor
    from convert.output import OutputSet

    parts: dict[str, float] = {}
    lock = threading.Lock()

    def timed(name: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                with lock:
                    key = name(*arguments)
                    parts[key] = parts.get(key, 0.0) + time.thread_time() - begin

        return call

    def encoding(rows: object, qtype: Any, *_: object) -> str:
        return f"{type(rows).__name__.removesuffix('Rows')} to {qtype.name}"

    patched: Any = executor
    patched.fill = timed(lambda *_: "reading", executor.fill)
    patched.encode = timed(encoding, executor.encode)
    patched.crc32c = timed(lambda *_: "CRC", executor.crc32c)
    patched.check_file = timed(lambda *_: "checking", executor.check_file)
    OutputSet.write = timed(lambda *_: "writing", OutputSet.write)  # type: ignore[method-assign]
    return parts


def child_copy(checkpoint: str, file: str, facts: str) -> None:
    imported(facts, time.monotonic())
    buffer = memoryview(bytearray(1 << 20))
    with Path(file).open("wb", buffering=0) as out:
        for shard in sorted(Path(checkpoint).glob("*.safetensors")):
            with shard.open("rb", buffering=0) as source:
                while count := source.readinto(buffer):
                    out.write(buffer[:count])
    digest = hashlib.sha256()
    with Path(file).open("rb", buffering=0) as copied:
        while count := copied.readinto(buffer):
            digest.update(buffer[:count])
    print(digest.hexdigest())


def child_theirs(sources: str, checkpoint: str, file: str, threads: str, facts: str) -> None:
    started = time.monotonic()
    sys.path.insert(0, sources)
    llama_cpp_side.prepare()
    import convert_hf_to_gguf
    import torch

    torch.set_num_threads(int(threads))
    llama_cpp_side.equip()
    imported(facts, started)
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", file, "--outtype", "bf16"]
    convert_hf_to_gguf.main()


CHILDREN = {"checkpoint": child_checkpoint, "copy": child_copy, "ours": child_ours, "theirs": child_theirs}

if __name__ == "__main__":
    main()
