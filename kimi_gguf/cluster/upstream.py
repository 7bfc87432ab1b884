"""Which llama.cpp the runtime is made of, and our patches to it: the contents of ``runtime_patches/``."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path

from quant.errors import InputError

# Beside the package in the tree, in an editable install and in a wheel alike.
PATCH_FOLDER = Path(__file__).parents[2] / "runtime_patches"


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch of the series: its file, the first line of its header, its content."""

    path: Path
    title: str
    data: bytes

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True)
class Upstream:
    """The source that is patched.

    Attributes:
        package, version, sha256: the source archive, as pip fetches it.
        source, bindings: folders inside it: llama.cpp, and the Python package over it.
        commit: llama.cpp's commit.
        needs_no_patch: the first upstream build that knows kimi-k31.
        patches: in the order in which they apply.
    """

    package: str
    version: str
    sha256: str
    source: str
    bindings: str
    commit: str
    needs_no_patch: str
    patches: tuple[Patch, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over the archive's hash and every patch."""
        total = hashlib.sha256(self.sha256.encode())
        for patch in self.patches:
            total.update(hashlib.sha256(patch.data).digest())
        return total.hexdigest()


def load_upstream(folder: Path = PATCH_FOLDER) -> Upstream:
    """Read ``UPSTREAM.toml``, ``series`` and the patches.

    Raises:
        InputError: a file or a field is missing.
    """
    file = folder / "UPSTREAM.toml"
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        names = (folder / "series").read_text(encoding="utf-8").split()
        patches = tuple(_patch(folder / name) for name in names)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"cannot read the runtime's patches: {error}", "install kimi-gguf again") from None
    try:
        sdist, llama = table["sdist"], table["llama_cpp"]
        return Upstream(
            package=sdist["package"],
            version=sdist["version"],
            sha256=sdist["sha256"],
            source=sdist["source"],
            bindings=sdist["bindings"],
            commit=llama["commit"],
            needs_no_patch=llama["needs_no_patch"],
            patches=patches,
        )
    except KeyError as error:
        raise InputError(f"{file} does not state {error}", "install kimi-gguf again") from None


def _patch(path: Path) -> Patch:
    data = path.read_bytes()
    return Patch(path, data.decode(errors="replace").partition("\n")[0], data)
