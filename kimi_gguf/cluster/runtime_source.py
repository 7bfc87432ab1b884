"""llama.cpp's source: fetched by pip, checked by hash, unpacked and patched."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from kimi_gguf.cluster.upstream import Upstream
from quant.errors import InputError, UsageError

# Large, and no part of any target.
_UNUSED = ("docs/", "models/", "tests/", "benches/", "examples/", "media/", "gguf-py/", "conversion/", ".git")


def fetch_sdist(upstream: Upstream, downloads: Path, log: Path) -> Path:
    """The source archive in ``downloads``, fetched with pip unless it is there.

    Raises:
        UsageError: pip is missing or failed; the message shows the end of its output.
        InputError: what arrived is not the archive that the patches are for.
    """
    name = f"{upstream.package.replace('-', '_')}-{upstream.version}.tar.gz"
    kept = downloads / name
    if kept.is_file() and _sha256(kept) == upstream.sha256:
        return kept
    downloads.mkdir(parents=True, exist_ok=True)
    # pip fetches into a folder of its own, so that an interrupted download never carries the final name.
    with tempfile.TemporaryDirectory(dir=downloads, prefix=".fetch-") as folder:
        requirement = Path(folder) / "requirement.txt"
        requirement.write_text(f"{upstream.package}=={upstream.version} --hash=sha256:{upstream.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
        command += ["--no-binary", upstream.package, "--require-hashes", "-r", str(requirement), "-d", folder]
        with log.open("ab") as output:
            status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)
        fetched = Path(folder) / name
        if status.returncode or not fetched.is_file():
            raise UsageError(
                f"pip could not fetch {upstream.package} {upstream.version} (its output is in {log})",
                f"fetch {name} yourself and pass it: kimi-gguf runtime build --sdist FILE",
            )
        fetched.replace(kept)
    return check_sdist(upstream, kept)


def check_sdist(upstream: Upstream, path: Path) -> Path:
    """``path`` itself, when it is the archive that the patches are for.

    Raises:
        InputError: it is not.
    """
    if not path.is_file():
        raise InputError(
            f"{path} is not a file",
            f"name the source archive of {upstream.package} {upstream.version}, or drop --sdist",
        )
    found = _sha256(path)
    if found != upstream.sha256:
        raise InputError(
            f"{path} has SHA-256 {found}, expected {upstream.sha256}",
            f"it must be the source archive of {upstream.package} {upstream.version}",
        )
    return path


def unpack(upstream: Upstream, sdist: Path, folder: Path) -> tuple[Path, Path]:
    """Unpack llama.cpp and the Python package into ``folder``: (llama.cpp's folder, the package's folder)."""
    root = f"{sdist.name.removesuffix('.tar.gz')}/"
    wanted = {f"{root}{upstream.source}/": folder / "src", f"{root}{upstream.bindings}/": folder / "python"}
    with tarfile.open(sdist) as archive:
        for member in archive:
            prefix = next((p for p in wanted if member.name.startswith(p)), None)
            if prefix is None:
                continue
            relative = member.name.removeprefix(prefix)
            content = archive.extractfile(member) if member.isfile() and not relative.startswith(_UNUSED) else None
            if content is not None:
                target = wanted[prefix] / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, target.open("wb") as file:
                    shutil.copyfileobj(content, file)
    return folder / "src", folder / "python"


def apply_patches(upstream: Upstream, source: Path, log: Path) -> None:
    """Apply the series to ``source``, without fuzz.

    Raises:
        UsageError: neither ``patch`` nor ``git`` is there.
        InputError: a patch does not apply; names it.
    """
    for patch in upstream.patches:
        command = _patch_command(patch.path)
        # git would otherwise look for a repository around the cache folder and skip files outside of it.
        env = os.environ | {"GIT_CEILING_DIRECTORIES": str(source.parent)}
        with log.open("ab") as output:
            output.write(f"\n$ {' '.join(command)}\n".encode())
            output.flush()
            status = subprocess.run(command, cwd=source, env=env, stdout=output, stderr=output, check=False)
        if status.returncode:
            raise InputError(
                f"{patch.name} does not apply to llama.cpp {upstream.commit[:9]} (output in {log})",
                "install kimi-gguf again: its patches are for this very archive",
            )


def _patch_command(path: Path) -> list[str]:
    if shutil.which("patch"):
        return ["patch", "-p1", "--fuzz=0", "--batch", "--forward", "-i", str(path)]
    if shutil.which("git"):
        return ["git", "apply", "--verbose", str(path)]
    raise UsageError("neither patch nor git is installed", "install one of them, for example: apt-get install patch")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
