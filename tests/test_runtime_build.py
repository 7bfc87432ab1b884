"""Building the runtime: once per version, all or nothing, with a reason when it fails.

A small archive and a script in cmake's place stand in for llama.cpp; the real build is the ``runtime`` fixture.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from kimi_gguf.cli import run
from kimi_gguf.cluster import runtime as module
from kimi_gguf.cluster.errors import RuntimeFault
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.cluster.runtime_lock import build_lock
from kimi_gguf.cluster.runtime_options import PROGRAMS
from kimi_gguf.cluster.upstream import PATCH_FOLDER, load_upstream
from quant.errors import InputError, UsageError

HEADER = (
    "#define RPC_PROTO_MAJOR_VERSION    7\n#define RPC_PROTO_MINOR_VERSION    1\n#define RPC_PROTO_PATCH_VERSION    2\n"
)
FILES = {
    "vendor/llama.cpp/src/llama.cpp": "one\ntwo\nthree\n",
    "vendor/llama.cpp/ggml/include/ggml-rpc.h": HEADER,
    "vendor/llama.cpp/models/large.bin": "not needed",
    "llama_cpp/__init__.py": "",
}
PATCH = """Two is three.
---
--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -1,3 +1,3 @@
 one
-two
+three
 three
"""
# Notes its arguments, and makes what a build would leave behind.
CMAKE = """#!/bin/sh
echo "$@" >> "$FAKE_LOG"
case "$1" in
-S) mkdir -p "$4/bin"; cp "$2/src/llama.cpp" "$4/bin/source" ;;
--build)
  echo "[1/2] compiling"; [ -z "$FAKE_FAIL" ] || { echo "llama.cpp:7: error: no such thing"; exit 1; }
  echo "[2/2] linking"; for name in PROGRAMS; do echo program > "$2/bin/$name"; done ;;
esac
""".replace("PROGRAMS", " ".join(PROGRAMS))


@dataclass
class House:
    """A cache folder, a patch folder, an archive, and the record of cmake's calls."""

    cache: Path
    patches: Path
    sdist: Path
    calls: Path

    @property
    def runtimes(self) -> list[str]:
        """Names of complete or half-made runtime folders."""
        hidden = {".lock", "logs", "current"}
        return sorted(p.name for p in (self.cache / "runtime").iterdir() if p.name not in hidden)

    def write_patches(self, text: str) -> None:
        (self.patches / "0001-two.patch").write_text(text)


class Stages(list[str]):
    """Notes stages, and the last step."""

    def stage(self, name: str) -> None:
        self.append(name)

    def step(self, done: int, total: int) -> None:
        self.last = (done, total)


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    sdist = tmp_path / "fake_llama-1.2.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name, text in FILES.items():
            info = tarfile.TarInfo(f"fake_llama-1.2/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    patches = tmp_path / "patches"
    patches.mkdir()
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    (patches / "UPSTREAM.toml").write_text(
        f'[sdist]\npackage="fake-llama"\nversion="1.2"\nsha256="{digest}"\nsource="vendor/llama.cpp"\n'
        'bindings="llama_cpp"\n[llama_cpp]\ncommit="0123456789abcdef"\nneeds_no_patch="b99"\n'
    )
    (patches / "series").write_text("0001-two.patch\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "ninja", "ccache"):
        (tools / name).write_text(CMAKE)
        (tools / name).chmod(0o755)
    house = House(tmp_path / "cache", patches, sdist, tmp_path / "calls")
    house.write_patches(PATCH)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    monkeypatch.setenv("KIMI_GGUF_CACHE", str(house.cache))
    monkeypatch.setenv("FAKE_LOG", str(house.calls))
    monkeypatch.delenv("KIMI_GGUF_RUNTIME", raising=False)
    monkeypatch.setattr(module, "load_upstream", lambda: load_upstream(patches))
    return house


def test_a_build_is_patched_installed_and_found(house: House) -> None:
    stages = Stages()
    built = module.build(sdist=house.sdist, progress=stages)
    assert stages == ["fetching llama.cpp", "unpacking", "patching", "configuring", "compiling", "installing"]
    assert stages.last == (2, 2)
    assert (built.binaries / "source").read_text() == "one\nthree\nthree\n"
    assert (built.python / "llama_cpp" / "__init__.py").is_file()
    assert built.program("llama-server").is_file()
    assert module.find() == built
    facts = module.info()
    assert facts["rpc_protocol"] == (7, 1, 2)
    assert facts["patches"] == ("0001-two.patch",)
    assert facts["backends"] == ("cpu", "rpc")


def test_building_again_does_nothing(house: House) -> None:
    module.build(sdist=house.sdist)
    calls = house.calls.read_text()
    module.build(sdist=Path("not looked at"))
    assert house.calls.read_text() == calls
    module.build(sdist=house.sdist, force=True)
    assert house.calls.read_text() != calls
    assert len(house.runtimes) == 1


def test_options_reach_cmake_and_make_another_runtime(house: House) -> None:
    plain = module.build(sdist=house.sdist)
    cuda = module.build(sdist=house.sdist, cuda=True, cmake_args=["-DCMAKE_CUDA_ARCHITECTURES=90"], jobs=3)
    assert plain.root != cuda.root
    assert module.find() == cuda
    assert "-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90" in house.calls.read_text()
    assert "--parallel 3" in house.calls.read_text()
    assert module.build() == plain == module.find()


def test_other_patches_make_the_runtime_out_of_date(house: House) -> None:
    first = module.build(sdist=house.sdist, vulkan=True)
    house.write_patches(PATCH.replace("+three", "+four"))
    with pytest.raises(InputError, match="built from other patches") as caught:
        module.find()
    assert caught.value.hint == "build it again: kimi-gguf runtime build --vulkan"
    assert module.build(sdist=house.sdist).root != first.root


def test_a_patch_that_does_not_fit_exactly_is_named(house: House) -> None:
    house.write_patches(PATCH.replace(" one\n", " eins\n"))
    with pytest.raises(InputError, match=r"0001-two\.patch does not apply to llama\.cpp 012345678"):
        module.build(sdist=house.sdist)
    assert house.runtimes == []


def test_patches_apply_with_git_alone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "patch" else which(name))
    subprocess.run(["git", "init", "-q", str(house.cache.parent)], check=True)
    assert (module.build(sdist=house.sdist).binaries / "source").read_text() == "one\nthree\nthree\n"


def test_another_archive_is_refused(house: House) -> None:
    house.sdist.write_bytes(house.sdist.read_bytes() + b"\0")
    with pytest.raises(InputError, match="has SHA-256"):
        module.build(sdist=house.sdist)
    with pytest.raises(InputError, match="is not a file"):
        module.build(sdist=house.sdist / "gone")


def stand_in_for_python(path: Path, script: str) -> str:
    """An interpreter that runs a shell script instead of ``-m pip download ...``."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_archive_is_fetched_with_pip_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    copying = f'echo "$@" >> "$FAKE_LOG"; for last; do :; done; cp {house.sdist} "$last"'
    monkeypatch.setattr("sys.executable", stand_in_for_python(house.cache.parent / "python", copying))
    module.build()
    call = house.calls.read_text().splitlines()[0]
    assert call.startswith("-m pip download")
    assert "--no-deps --no-binary fake-llama --require-hashes" in call
    assert (house.cache / "downloads" / house.sdist.name).is_file()
    module.build(force=True)
    assert house.calls.read_text().count("pip download") == 1


def test_a_fetch_that_fails_names_the_log_and_the_way_out(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = stand_in_for_python(house.cache.parent / "python", "echo no network >&2; exit 1")
    monkeypatch.setattr("sys.executable", failing)
    with pytest.raises(UsageError, match=r"pip could not fetch fake-llama 1\.2") as caught:
        module.build()
    assert "--sdist FILE" in str(caught.value.hint)
    (log,) = (house.cache / "runtime" / "logs").iterdir()
    assert str(log) in caught.value.message
    assert "no network" in log.read_text()


def test_a_failed_build_shows_the_error_and_leaves_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAIL", "1")
    with pytest.raises(RuntimeFault, match=r"compiling llama\.cpp failed[^$]*llama\.cpp:7: error: no such thing"):
        module.build(sdist=house.sdist)
    assert house.runtimes == []
    with pytest.raises(UsageError, match="not built"):
        module.find()
    monkeypatch.delenv("FAKE_FAIL")
    assert module.build(sdist=house.sdist) == module.find()


def test_what_a_killed_build_left_behind_is_no_runtime_and_goes_away(house: House) -> None:
    left = house.cache / "runtime" / ".build-x" / "install"
    left.mkdir(parents=True)
    with pytest.raises(UsageError, match="not built"):
        module.find()
    module.build(sdist=house.sdist)
    assert not left.exists()


def test_a_second_build_waits_and_uses_the_first_ones_result(house: House) -> None:
    home = house.cache / "runtime"
    home.mkdir(parents=True)
    stages = Stages()
    waiting = threading.Event()
    stages.stage = lambda name: (list.append(stages, name), waiting.set())  # type: ignore[assignment, func-returns-value]
    results: list[Runtime] = []
    with build_lock(home, Stages()):
        thread = threading.Thread(target=lambda: results.append(module.build(sdist=house.sdist, progress=stages)))
        thread.start()
        assert waiting.wait(30)
        assert stages == ["waiting for another build"]
        assert not house.calls.exists()
    thread.join(30)
    assert results == [module.find()]


def test_tools_that_are_missing_are_named(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_gguf.cluster.runtime_build._tool", lambda name: None)
    with pytest.raises(UsageError, match="cmake is not installed") as caught:
        module.build(sdist=house.sdist)
    assert "kimi-gguf[runtime]" in str(caught.value.hint)


def test_a_cmake_argument_has_a_name_and_a_value(house: House) -> None:
    with pytest.raises(UsageError, match="-DNAME=VALUE"):
        module.build(cmake_args=["GGML_CUDA"])


def test_the_environment_names_a_runtime(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    built = module.build(sdist=house.sdist)
    moved = built.root.rename(house.cache / "moved")
    monkeypatch.setenv("KIMI_GGUF_RUNTIME", str(moved))
    assert module.find().root == moved
    monkeypatch.setenv("KIMI_GGUF_RUNTIME", str(house.cache))
    with pytest.raises(UsageError, match="holds no runtime"):
        module.find()


def test_a_damaged_record_is_an_error(house: House) -> None:
    built = module.build(sdist=house.sdist)
    (built.root / "runtime.json").write_text("{}")
    with pytest.raises(InputError, match=r"runtime\.json cannot be read"):
        module.find()


def test_the_verb_builds_and_shows(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runtime", "build", "--sdist", str(house.sdist), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["commit"] == "0123456789abcdef"
    assert run(["runtime", "info"]) == 0
    text = capsys.readouterr().out
    assert "0001-two.patch" in text
    assert "protocol 7.1.2" in text
    assert run(["runtime", "build", "--cmake-arg", "x"]) == 2


def test_every_patch_of_ours_says_why() -> None:
    upstream = load_upstream()
    assert sorted(p.name for p in PATCH_FOLDER.glob("*.patch")) == [patch.name for patch in upstream.patches]
    for number, patch in enumerate(upstream.patches, 1):
        header = patch.data.decode().partition("\n---\n")[0].splitlines()
        assert patch.name.startswith(f"{number:04d}-")
        assert len(header) >= 3
        assert header[0].endswith(".")
        assert header[1] == ""


@pytest.mark.runtime
def test_an_installed_runtime_can_be_moved(runtime: Runtime, tmp_path: Path) -> None:
    moved = shutil.copytree(runtime.root, tmp_path / "elsewhere", symlinks=True)
    for name in PROGRAMS:
        done = subprocess.run([moved / "bin" / name, "--help"], capture_output=True, text=True, check=False)
        assert "error while loading" not in done.stderr
    version = subprocess.run([moved / "bin" / "llama-server", "--version"], capture_output=True, text=True, check=True)
    assert runtime.facts.commit[:9] in version.stdout + version.stderr
