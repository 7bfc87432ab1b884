"""Renderers of Kimi K3's chat format, for tests: the encoder inside the wheel of nemo-automodel, and Python's Jinja.

One file of the wheel is loaded by itself; nothing of the package is installed. The wheel is kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kimi_gguf.cache import cache_folder

PACKAGE = "nemo-automodel==0.7.0"
WHEEL = "nemo_automodel-0.7.0-py3-none-any.whl"
SHA256 = "37b8397a73c17e4a8bffd0cd3becc0507abecc1ebfea3b3eb6468eed57ba6674"
MEMBER = "nemo_automodel/components/models/kimi_k3/encoding.py"


def compile_template(source: str) -> jinja2.Template:
    """Compiled as Hugging Face's library does; llama.cpp's engine has the same settings."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


def load_encoder() -> ModuleType:
    """The encoder's module, fetched first when it is not there; fails when it cannot be had or is another file."""
    wheel = _wheel(cache_folder() / "oracles")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise AssertionError(f"{wheel} has the SHA-256 {found}, not {SHA256}: remove it")
    source = wheel.with_name("kimi_k3_encoding.py")
    with zipfile.ZipFile(wheel) as archive:
        source.write_bytes(archive.read(MEMBER))
    spec = importlib.util.spec_from_file_location("kimi_k3_encoding", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _wheel(folder: Path) -> Path:
    path = folder / WHEEL
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
        done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, timeout=300, check=False)
        if done.returncode or not path.is_file():
            raise AssertionError(f"{PACKAGE} cannot be fetched: {done.stderr[-800:]}")
    return path
