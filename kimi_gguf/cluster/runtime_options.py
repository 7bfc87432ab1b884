"""How llama.cpp is built: targets, CMake options, and the key under which a build is kept."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_gguf.cluster.upstream import Upstream
from quant.errors import UsageError

# Counts up when the layout of the installed folder changes.
LAYOUT = 1

PROGRAMS = (
    "llama-server",
    "ggml-rpc-server",
    "llama-quantize",
    "llama-imatrix",
    "llama-perplexity",
    "llama-gguf-split",
    "llama-completion",
)
TARGETS = ("llama", *PROGRAMS)

BACKENDS = {"cuda": "-DGGML_CUDA=ON", "vulkan": "-DGGML_VULKAN=ON", "metal": "-DGGML_METAL=ON"}

_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    # Libraries are looked for beside the program, so that the installed folder can be moved.
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    f"-DCMAKE_INSTALL_RPATH={'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}",
    "-DGGML_RPC=ON",
    "-DGGML_RPC_RDMA=OFF",
    # ccache is set up by us: llama.cpp's own use of it ignores the base folder.
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_ALL_WARNINGS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    # llama.cpp would ask the repository around it for these.
    "-DLLAMA_BUILD_NUMBER=0",
)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a user may choose: GPU backends by name, and further CMake options, which win over ours."""

    backends: tuple[str, ...] = ()
    cmake_args: tuple[str, ...] = ()

    def cmake_arguments(self, upstream: Upstream) -> list[str]:
        """Arguments of ``cmake`` but for source, build folder and generator."""
        backends = [BACKENDS[name] for name in self.backends]
        metal = [] if "metal" in self.backends else ["-DGGML_METAL=OFF"]
        return [*_CMAKE, f"-DLLAMA_BUILD_COMMIT={upstream.commit[:9]}", *metal, *backends, *self.cmake_args]


def build_options(
    *, cuda: bool = False, vulkan: bool = False, metal: bool = False, cmake_args: Sequence[str] = ()
) -> BuildOptions:
    """Check and collect what a user chose.

    Raises:
        UsageError: a CMake argument that is no ``-DNAME=VALUE``.
    """
    for argument in cmake_args:
        if not argument.startswith("-D") or "=" not in argument:
            raise UsageError(f"--cmake-arg {argument!r} is not of the form -DNAME=VALUE", "for example -DGGML_HIP=ON")
    chosen = (("cuda", cuda), ("vulkan", vulkan), ("metal", metal))
    return BuildOptions(tuple(name for name, wanted in chosen if wanted), tuple(cmake_args))


def runtime_key(upstream: Upstream, options: BuildOptions) -> str:
    """Name of the folder of a build: a hash of the source, the patches, the options and the processor."""
    facts = [LAYOUT, upstream.digest, TARGETS, options.cmake_arguments(upstream), sys.platform, _processor()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What the compiler builds for: with GGML_NATIVE a build may not run on another processor that shares the cache."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine()
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {' '.join(sorted(flags.partition(':')[2].split()))}"
