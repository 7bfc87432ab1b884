"""Compiles the patched llama.cpp and installs it into its folder, all or nothing.

Work happens in a folder beside the final one, which appears by renaming. Its name starts with ``.build-``; one that a
killed build left behind is removed by the next build, under the lock.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from convert.disk import disk_faults
from kimi_gguf.cluster.errors import RuntimeFault
from kimi_gguf.cluster.runtime_facts import RuntimeFacts, rpc_protocol, write_facts
from kimi_gguf.cluster.runtime_options import PROGRAMS, TARGETS, BuildOptions
from kimi_gguf.cluster.runtime_source import apply_patches, check_sdist, fetch_sdist, unpack
from kimi_gguf.cluster.upstream import Upstream
from quant.errors import UsageError

_WORK = ".build-"
_LOG_TAIL = 20
# What one compiler of llama.cpp's larger files takes.
_BYTES_PER_JOB = 1 << 30
_NINJA_STEP = re.compile(rb"\[(\d+)/(\d+)\]")
_MAKE_STEP = re.compile(rb"\[ *(\d+)%\]")


class BuildProgress(Protocol):
    """Receives a build's progress."""

    def stage(self, name: str) -> None:
        """A stage begins, such as "compiling"."""

    def step(self, done: int, total: int) -> None:
        """So many of the current stage's steps are done."""


class Silent:
    """Ignores all progress."""

    def stage(self, name: str) -> None: ...

    def step(self, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The programs that build: paths of cmake and ninja, the latter None when make is used."""

    cmake: str
    ninja: str | None
    ccache: str | None


def make_runtime(
    home: Path,
    target: Path,
    upstream: Upstream,
    options: BuildOptions,
    *,
    sdist: Path | None,
    jobs: int | None,
    progress: BuildProgress,
) -> None:
    """Build into ``target``, a folder of ``home``; the caller holds the lock.

    Raises:
        UsageError, InputError, RuntimeFault: as ``runtime.build``.
    """
    started = time.monotonic()
    tools = find_tools()
    for stale in home.glob(f"{_WORK}*"):
        shutil.rmtree(stale, ignore_errors=True)
    logs = home / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{target.name}.log"
    log.write_bytes(b"")
    with tempfile.TemporaryDirectory(dir=home, prefix=_WORK) as name:
        work = Path(name)
        progress.stage("fetching llama.cpp")
        archive = (
            fetch_sdist(upstream, home.parent / "downloads", log) if sdist is None else check_sdist(upstream, sdist)
        )
        progress.stage("unpacking")
        with disk_faults(work):
            source, bindings = unpack(upstream, archive, work)
        progress.stage("patching")
        apply_patches(upstream, source, log)
        compile_targets(tools, source, work / "build", options.cmake_arguments(upstream), log, jobs, progress)
        progress.stage("installing")
        install = work / "install"
        shutil.copytree(work / "build" / "bin", install / "bin", symlinks=True)
        shutil.copytree(bindings, install / "python" / upstream.bindings)
        facts = RuntimeFacts(
            digest=upstream.digest,
            commit=upstream.commit,
            bindings=upstream.version,
            needs_no_patch=upstream.needs_no_patch,
            patches=tuple(patch.name for patch in upstream.patches),
            backends=("cpu", "rpc", *options.backends),
            rpc_protocol=rpc_protocol(source),
            cmake_args=options.cmake_args,
            programs=PROGRAMS,
            seconds=round(time.monotonic() - started, 1),
        )
        write_facts(install, facts)
        if target.exists():
            target.replace(work / "replaced")
        install.replace(target)


def compile_targets(
    tools: Toolchain,
    source: Path,
    build: Path,
    arguments: Sequence[str],
    log: Path,
    jobs: int | None,
    progress: BuildProgress,
) -> None:
    """Configure and compile; programs and libraries end up in ``build/bin``.

    Raises:
        RuntimeFault: a step failed; the message shows the end of the log.
    """
    env = dict(os.environ)
    command = [tools.cmake, "-S", str(source), "-B", str(build), *arguments]
    if tools.ninja is not None:
        command += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools.ninja}"]
    else:
        command += ["-G", "Unix Makefiles"]
    if tools.ccache is not None:
        command += [f"-DCMAKE_{language}_COMPILER_LAUNCHER={tools.ccache}" for language in ("C", "CXX")]
        # Builds happen in folders of changing names; paths below this one are hashed as relative.
        env |= {"CCACHE_BASEDIR": str(build.parent), "CCACHE_NOHASHDIR": "1"}
    progress.stage("configuring")
    _run(command, env, log, "configuring llama.cpp", progress)
    progress.stage("compiling")
    targets = [word for target in TARGETS for word in ("--target", target)]
    parallel = str(jobs or default_jobs())
    _run(
        [tools.cmake, "--build", str(build), "--parallel", parallel, *targets],
        env,
        log,
        "compiling llama.cpp",
        progress,
    )


def find_tools() -> Toolchain:
    """The build tools, from PATH or beside this interpreter (where the PyPI packages put them).

    Raises:
        UsageError: cmake, a generator or a C++ compiler is missing; says how to get it.
    """
    cmake = _tool("cmake")
    if cmake is None:
        raise UsageError("cmake is not installed", "install it: pip install 'kimi-gguf[runtime]'")
    ninja = _tool("ninja")
    if ninja is None and shutil.which("make") is None:
        raise UsageError("neither ninja nor make is installed", "install one: pip install 'kimi-gguf[runtime]'")
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "c++", "g++", "clang++")):
        raise UsageError("no C++ compiler is installed", "install one, for example: apt-get install g++")
    return Toolchain(cmake, ninja, shutil.which("ccache"))


def default_jobs() -> int:
    """Compilers at once that processors and free memory allow."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        return cpus
    return cpus if found is None else max(1, min(cpus, int(found[1]) * 1024 // _BYTES_PER_JOB))


def _tool(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return shutil.which(name) or (str(beside) if beside.is_file() else None)


def _run(command: Sequence[str], env: dict[str, str], log: Path, what: str, progress: BuildProgress) -> None:
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(command)}\n".encode())
        with subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            try:
                for line in process.stdout or ():
                    output.write(line)
                    _report(line, progress)
            except BaseException:
                process.terminate()
                raise
    if process.returncode:
        raise RuntimeFault(
            f"{what} failed; the log is {log}, its end:\n{_tail(log)}",
            "when the cause is gone, run the same command again",
        )


def _report(line: bytes, progress: BuildProgress) -> None:
    if found := _NINJA_STEP.match(line):
        progress.step(int(found[1]), int(found[2]))
    elif found := _MAKE_STEP.match(line):
        progress.step(int(found[1]), 100)


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if "error" in line.lower()][-_LOG_TAIL:]
    return "\n".join(errors or lines[-_LOG_TAIL:])
