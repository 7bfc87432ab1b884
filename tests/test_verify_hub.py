"""Verification of what was published, against a checkpoint on the Hub: by ranges, without a file on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hub_server import TOKEN, HubServer

from kimi_gguf import convert, publish_model, verify_model
from kimi_gguf.cli import run
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from quant.errors import BelowBar, UsageError

SOURCE = "hf://org/Kimi-Tiny"
MODEL = "hf://tester/Kimi-GGUF/Q4_K_M"


@pytest.fixture
def hubs(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """A Hub with a checkpoint and what was made of it; the current folder is empty."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("KIMI_GGUF_CACHE", str(tmp_path / "cache"))
    checkpoint = make_checkpoint(tmp_path / "Kimi", TinyShape(layers=4, experts=24))
    hub.store.add_folder("org/Kimi-Tiny", checkpoint)
    convert("org/Kimi-Tiny", quant="Q4_K_M", outdir=tmp_path / "out", split_max_size="2M", threads=2)
    publish_model(tmp_path / "out", "tester/Kimi-GGUF", create=True)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    hub.requests.clear()
    return hub


def asked_bytes(hub: HubServer, suffix: str) -> tuple[int, int]:
    """Requests for, and bytes of, files whose names end so; whole files count as a terabyte."""
    found = [r.range for r in hub.requests if r.path.startswith("/cdn/") and r.path.endswith(suffix)]
    pairs = [(0, 1 << 40) if r is None else tuple(map(int, r.removeprefix("bytes=").split("-"))) for r in found]
    return len(found), sum(end + 1 - begin for begin, end in pairs)


def test_published_files_are_verified_by_ranges(hubs: HubServer, tmp_path: Path) -> None:
    report = verify_model(MODEL, source=SOURCE)
    assert report.ok and report.model == "Q4_K_M" and 0 < report.share < 1
    made = sum(p.stat().st_size for p in (tmp_path / "out").glob("*.gguf"))
    count, nbytes = asked_bytes(hubs, ".gguf")
    assert 0 < nbytes < made
    assert count < 8 * len(report.tensors)
    assert asked_bytes(hubs, ".safetensors")[1] < sum(
        p.stat().st_size for p in (tmp_path / "Kimi").glob("*.safetensors")
    )
    assert list(Path.cwd().iterdir()) == []


def test_a_side_may_be_local(hubs: HubServer, tmp_path: Path) -> None:
    first = min((tmp_path / "out").glob("*.gguf"))
    assert verify_model(first, source=SOURCE).ok
    assert verify_model(MODEL, source=tmp_path / "Kimi").ok
    with pytest.raises(UsageError, match="there is no folder"):
        verify_model(first, source=tmp_path / "none")


def test_a_checkpoint_that_is_another_one_is_found_out(hubs: HubServer, tmp_path: Path, capsys: Any) -> None:
    other = make_checkpoint(tmp_path / "Other", TinyShape(layers=4, experts=24), seed=77)
    hubs.store.add_folder("org/Kimi-Tiny", other)
    assert run(["verify", MODEL, "--source", SOURCE, "--json"]) == BelowBar.exit_code
    value = json.loads(capsys.readouterr().out)
    assert any("the manifest names commit" in fault for fault in value["structure"])
    assert any("the manifest says SHA-256" in fault for fault in value["structure"])
    assert any(tensor["faults"] for tensor in value["tensors"])


def test_a_file_that_was_exchanged_on_the_hub_is_found_out(hubs: HubServer, tmp_path: Path) -> None:
    name = sorted((tmp_path / "out").glob("*.gguf"))[1].name
    changed = shutil.copy(tmp_path / "out" / name, tmp_path / name)
    data = bytearray(Path(changed).read_bytes())
    data[-1000] ^= 1
    entry = hubs.store.entry(name, hubs.store.put(bytes(data)))
    hubs.store.commit("tester/Kimi-GGUF", "main", "exchanged", {f"Q4_K_M/{name}": entry})
    report = verify_model(MODEL, source=SOURCE)
    assert any(f"{name}: the manifest says SHA-256" in fault for fault in report.structure)
