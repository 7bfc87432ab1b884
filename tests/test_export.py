"""Exports: a merged file holds what the set held, Ollama's template renders as ours, links instead of copies."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jinja2
import numpy as np
import pytest

from convert.config import parse_config
from convert.model_card import own_chat_template
from kimi_gguf import convert, export_lmstudio, export_merge, export_ollama
from kimi_gguf.cli import run
from kimi_gguf.export_modelfile import TEMPLATE
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from kimi_gguf.reference.checkpoint_shape import checkpoint_config
from kimi_gguf.reference.gguf_maker import make_gguf
from quant.errors import InputError, OutputError


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second file of a split model."""
    folder = tmp_path_factory.mktemp("split")
    checkpoint = make_checkpoint(folder / "checkpoint", TinyShape(), seed=5)
    result = convert(checkpoint, quant="Q8_0", outdir=folder / "out", split_max_size="300K")
    assert len(result.files) > 2
    return result.files[1]


@pytest.fixture
def single(tmp_path: Path) -> Path:
    config = parse_config(json.dumps(checkpoint_config(TinyShape(vocab=512))).encode())
    return make_gguf(tmp_path / "tiny.gguf", config, seed=1)


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["export", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def tensors(*paths: Path) -> dict[str, Any]:
    return {t.name: (t.tensor_type, t.shape.tolist(), t.data) for path in paths for t in gguf.GGUFReader(path).tensors}


def test_a_merged_file_holds_every_key_and_tensor_of_the_set(split: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    made = export_ollama(split, out=tmp_path, note=notes.append)
    merged, parts = made.files[1], sorted(split.parent.glob("*.gguf"))
    assert made.way == "merged" and merged.stat().st_size == made.added_bytes
    assert f"takes {made.added_bytes:,} bytes of disk" in notes[0]
    before, after = tensors(*parts), tensors(merged)
    assert list(before) == list(after)
    for name, (kind, shape, data) in before.items():
        assert after[name][:2] == (kind, shape)
        np.testing.assert_array_equal(data, after[name][2])
    first, whole = gguf.GGUFReader(parts[0]), gguf.GGUFReader(merged)
    keys = [key for key in first.fields if not key.startswith(("split.", "GGUF."))]
    assert keys == [key for key in whole.fields if not key.startswith("GGUF.")]
    assert all(first.fields[key].contents() == whole.fields[key].contents() for key in keys)
    assert not list(tmp_path.glob("*.partial"))


def test_a_merged_file_is_the_file_that_convert_writes_unsplit(split: Path, tmp_path: Path) -> None:
    merged = export_ollama(split, out=tmp_path / "out").files[1]
    convert(split.parent.parent / "checkpoint", quant="Q8_0", outfile=tmp_path / "whole.gguf")
    assert merged.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_a_second_export_uses_what_is_there_and_another_file_is_not_replaced(split: Path, tmp_path: Path) -> None:
    merged = export_ollama(split, out=tmp_path).files[1]
    stamp = merged.stat().st_mtime_ns
    assert export_ollama(split, out=tmp_path).added_bytes == 0 and merged.stat().st_mtime_ns == stamp
    merged.write_bytes(b"mine")
    with pytest.raises(OutputError, match="another file"):
        export_ollama(split, out=tmp_path)
    assert merged.read_bytes() == b"mine"


def test_room_is_checked_before_anything_is_written(
    split: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_merge, "free_bytes", lambda folder: 1000)
    with pytest.raises(OutputError, match="1,000 are free"):
        export_ollama(split, out=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_shortened_file_is_named_and_leaves_nothing(split: Path, tmp_path: Path) -> None:
    copies = [tmp_path / path.name for path in sorted(split.parent.glob("*.gguf"))]
    for path, copy in zip(sorted(split.parent.glob("*.gguf")), copies, strict=True):
        copy.write_bytes(path.read_bytes())
    os.truncate(copies[-1], copies[-1].stat().st_size // 2)
    with pytest.raises(InputError, match="the file ends at"):
        export_ollama(copies[0], out=tmp_path / "out")


def test_a_single_file_stays_where_it_is(single: Path, tmp_path: Path) -> None:
    made = export_ollama(single)
    assert made.directory == tmp_path / "tiny-ollama" and made.added_bytes == 0
    lines = (made.directory / "Modelfile").read_text().splitlines()
    assert lines[:5] == [
        f'FROM "{single}"',
        *("PARAMETER temperature 1", "PARAMETER top_p 0.95", "PARAMETER top_k 0", "PARAMETER min_p 0"),
    ]
    assert 'PARAMETER stop "<|end_of_msg|>"' in lines


def test_a_modelfile_that_was_edited_is_kept(split: Path, tmp_path: Path) -> None:
    made = export_ollama(split, out=tmp_path / "out")
    assert export_ollama(split, out=tmp_path / "out").files == made.files
    made.files[0].write_text("FROM mine\n")
    made.files[1].unlink()
    with pytest.raises(OutputError, match="says something else"):
        export_ollama(split, out=tmp_path / "out")
    assert made.files[0].read_text() == "FROM mine\n"
    assert not made.files[1].exists()


def test_ollamas_template_renders_what_ours_renders() -> None:
    """The few Go actions that it uses, as Jinja."""
    words = {
        "{{ range .Messages }}": "{% for m in messages %}",
        '{{ if eq .Role "assistant" }}': '{% if m.role == "assistant" %}',
        "{{ .Role }}": "{{ m.role }}",
        "{{ .Thinking }}": "{{ m.reasoning_content }}",
        "{{ .Content }}": "{{ m.content }}",
        "{{ else }}": "{% else %}",
        "{{ end }}{{ end }}": None,
    }
    assert "{{ else }}{{ .Content }}{{ end }}<|close|>message" in TEMPLATE
    text = TEMPLATE.replace("{{ else }}{{ .Content }}{{ end }}", "{% else %}{{ m.content }}{% endif %}")
    text = text.replace("{{ end }}", "{% endfor %}")
    for go, jinja in words.items():
        text = text.replace(go, jinja or "")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "one", "reasoning_content": "hm"},
        {"role": "user", "content": "2?"},
    ]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    expected = environment.from_string(own_chat_template()).render(messages=messages, add_generation_prompt=True)
    assert environment.from_string(text).render(messages=messages) == expected


def test_lm_studio_gets_links_in_its_own_layout(split: Path, tmp_path: Path) -> None:
    made = export_lmstudio(split, out=tmp_path)
    parts = sorted(split.parent.glob("*.gguf"))
    assert made.directory.parent.parent == tmp_path and made.directory.name.endswith("-GGUF")
    assert [file.name for file in made.files] == [path.name for path in parts]
    assert all(file.samefile(path) for file, path in zip(made.files, parts, strict=True))
    assert made.way == "hard link" and export_lmstudio(split, out=tmp_path) == made


def test_lm_studio_gets_symbolic_links_across_filesystems(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    made = export_lmstudio(single, out=tmp_path / "models")
    assert made.way == "symbolic link" and made.files[0].is_symlink() and made.files[0].samefile(single)
    assert export_lmstudio(single, out=tmp_path / "models") == made
    made.files[0].unlink()
    made.files[0].write_bytes(b"mine")
    with pytest.raises(OutputError, match="another file"):
        export_lmstudio(single, out=tmp_path / "models")


def test_the_verbs_say_what_they_made(verb: Any, split: Path, tmp_path: Path) -> None:
    code, out, err = verb("ollama", split, "--out", tmp_path / "o")
    assert code == 0 and "ollama create NAME -f" in out and "bytes of disk" in err
    code, out, _ = verb("lmstudio", split, "--out", tmp_path / "l", "--json")
    assert code == 0 and json.loads(out)["way"] == "hard link"


def test_what_is_no_model_of_ours_is_refused(verb: Any, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for kind in ("ollama", "lmstudio"):
        code, _, err = verb(kind, tmp_path / "x.gguf")
        assert code == 1 and "llama" in err
    assert verb("ollama", tmp_path / "none.gguf")[0] == 1
