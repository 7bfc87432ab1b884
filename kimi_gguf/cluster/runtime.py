"""The patched llama.cpp on this machine: building it once per version, and finding it.

A build lives in the cache folder under a key made of source, patches, options and processor, so that an installed
runtime never changes and several can stand side by side. ``current`` names the one that was asked for last.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_gguf.cache import cache_folder
from kimi_gguf.cluster.runtime_build import BuildProgress, Silent, make_runtime
from kimi_gguf.cluster.runtime_facts import FACTS_FILE, RuntimeFacts, read_facts
from kimi_gguf.cluster.runtime_lock import build_lock
from kimi_gguf.cluster.runtime_options import BuildOptions, build_options, runtime_key
from kimi_gguf.cluster.upstream import load_upstream
from quant.errors import InputError, UsageError

ENVIRONMENT = "KIMI_GGUF_RUNTIME"

_POINTER = "current"
_BUILD_HINT = "build it: kimi-gguf runtime build"


@dataclass(frozen=True, slots=True)
class Runtime:
    """An installed runtime.

    Attributes:
        root: its folder; may be moved as a whole.
        facts: what was recorded when it was built.
    """

    root: Path
    facts: RuntimeFacts

    @property
    def binaries(self) -> Path:
        """Programs and shared libraries."""
        return self.root / "bin"

    @property
    def python(self) -> Path:
        """The folder to put on ``PYTHONPATH`` for ``import llama_cpp``."""
        return self.root / "python"

    def program(self, name: str) -> Path:
        """Path of a program such as ``llama-server``.

        Raises:
            InputError: it is not there.
        """
        path = self.binaries / name
        if not path.is_file():
            raise InputError(
                f"the runtime in {self.root} has no {name}", "build it again: kimi-gguf runtime build --force"
            )
        return path

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment of a child process that imports ``llama_cpp`` over this library."""
        env = dict(os.environ if base is None else base)
        paths = [str(self.python), *filter(None, [env.get("PYTHONPATH")])]
        env["PYTHONPATH"] = os.pathsep.join(paths)
        env["LLAMA_CPP_LIB_PATH"] = str(self.binaries)
        # ggml would start a debugger to print where it aborted.
        env["GGML_NO_BACKTRACE"] = "1"
        return env


def build(
    *,
    cuda: bool = False,
    vulkan: bool = False,
    metal: bool = False,
    cmake_args: Sequence[str] = (),
    jobs: int | None = None,
    sdist: Path | None = None,
    force: bool = False,
    select: bool = True,
    progress: BuildProgress | None = None,
) -> Runtime:
    """Build the patched llama.cpp unless this very build is there already.

    Args:
        cuda, vulkan, metal: build these backends beside the CPU's.
        cmake_args: further ``-DNAME=VALUE``.
        jobs: compilers at once; as many as processors and memory allow by default.
        sdist: a copy of the source archive, instead of fetching it with pip.
        force: build again even if it is there.
        select: make this the runtime that ``find`` returns.
        progress: told about the stages.

    Raises:
        UsageError: an unusable option, or a tool that is missing.
        InputError: the archive is not the expected one, or a patch does not apply.
        RuntimeFault: compiling failed; the message shows the end of the log.
    """
    options = build_options(cuda=cuda, vulkan=vulkan, metal=metal, cmake_args=cmake_args)
    upstream = load_upstream()
    home = _home()
    target = home / runtime_key(upstream, options)
    runtime = None if force else _installed(target)
    if runtime is None:
        progress = Silent() if progress is None else progress
        home.mkdir(parents=True, exist_ok=True)
        with build_lock(home, progress):
            # Another process may have built it while this one waited.
            runtime = None if force else _installed(target)
            if runtime is None:
                make_runtime(home, target, upstream, options, sdist=sdist, jobs=jobs, progress=progress)
                runtime = _installed(target)
    if runtime is None:
        raise InputError(f"the build in {target} is not complete", _BUILD_HINT)
    if select:
        _select(home, target)
    return runtime


def find() -> Runtime:
    """The runtime to use: ``$KIMI_GGUF_RUNTIME``, the one built last, or the one that default options build.

    Raises:
        UsageError: there is none.
        InputError: it was made of other sources or patches than this version of kimi-gguf has.
    """
    named = os.environ.get(ENVIRONMENT)
    if named:
        runtime = _installed(Path(named))
        if runtime is None:
            raise UsageError(f"{ENVIRONMENT} names {named}, which holds no runtime", f"unset it, or {_BUILD_HINT}")
        return runtime
    upstream = load_upstream()
    home = _home()
    runtime = _installed(home / (_selected(home) or runtime_key(upstream, BuildOptions())))
    if runtime is None:
        raise UsageError("the llama.cpp runtime is not built", _BUILD_HINT)
    if runtime.facts.digest != upstream.digest:
        raise InputError(
            f"the runtime in {runtime.root} was built from other patches", f"build it again: {_command(runtime)}"
        )
    return runtime


def info() -> dict[str, Any]:
    """What is built, as plain values: the facts of ``find()``'s runtime and its paths.

    Raises:
        as ``find``.
    """
    runtime = find()
    return asdict(runtime.facts) | {
        "root": str(runtime.root),
        "binaries": str(runtime.binaries),
        "python": str(runtime.python),
        "libraries": sorted(p.name for p in runtime.binaries.glob("libggml-*") if not p.is_symlink()),
    }


def _command(runtime: Runtime) -> str:
    flags = [f"--{name}" for name in runtime.facts.backends if name not in ("cpu", "rpc")]
    return " ".join(["kimi-gguf runtime build", *flags, *(f"--cmake-arg {a}" for a in runtime.facts.cmake_args)])


def _home() -> Path:
    return cache_folder() / "runtime"


def _installed(folder: Path) -> Runtime | None:
    if not (folder / FACTS_FILE).is_file():
        return None
    return Runtime(folder.absolute(), read_facts(folder))


def _selected(home: Path) -> str | None:
    try:
        name = (home / _POINTER).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return name if name and (home / name).is_dir() else None


def _select(home: Path, target: Path) -> None:
    if _selected(home) == target.name:
        return
    temporary = home / f".{_POINTER}.{os.getpid()}"
    temporary.write_text(f"{target.name}\n", encoding="utf-8")
    temporary.replace(home / _POINTER)
