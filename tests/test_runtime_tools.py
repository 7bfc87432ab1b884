"""llama.cpp's own tools, patched: the quantizer's floors, importance matrices, the last lines of perplexity."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from kimi_gguf import convert
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from quant.gguf_parser import parse_gguf
from quant.imatrix import Imatrix
from quant.types import QuantType

pytestmark = pytest.mark.runtime

FLOORED = ("indexer.attn_k.", "indexer.attn_q_b.", "ssm_f_a.", "ssm_f_b.", "ssm_beta.", "attn_k_b.", "attn_v_b.")


@pytest.fixture(scope="module", params=["kimi-k31", "kimi-k3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "checkpoint"
    return make_checkpoint(folder, TinyShape(k31=request.param == "kimi-k31", experts=4, used=2), seed=3)


@pytest.fixture(scope="module")
def full(checkpoint: Path) -> Path:
    return converted(checkpoint, "F32")


def converted(checkpoint: Path, quant: str) -> Path:
    """The checkpoint as one GGUF of a recipe."""
    path = checkpoint.with_name(f"{quant}.gguf")
    convert(str(checkpoint), quant=quant, outfile=str(path), encoder="ggml")
    return path


def run_tool(runtime: Runtime, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    command = [str(runtime.program(name)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


@pytest.mark.parametrize("recipe", ["Q4_K_M", "Q2_K", "MXFP4_MOE"])
def test_llama_quantize_gives_the_types_and_bytes_of_convert(
    recipe: str, checkpoint: Path, full: Path, runtime: Runtime, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs.gguf"
    run_tool(runtime, "llama-quantize", full, theirs, recipe, 1)
    ours = converted(checkpoint, recipe)
    a, b = parse_gguf(ours).by_name, parse_gguf(theirs).by_name
    assert {name: t.qtype for name, t in a.items()} == {name: t.qtype for name, t in b.items()}
    floored = {name: t.qtype for name, t in b.items() if any(part in name for part in FLOORED)}
    assert floored
    assert set(floored.values()) == {QuantType.Q8_0}
    assert all(b[name].qtype is QuantType.F32 for name in b if "indexer.proj" in name or "ffn_gate_inp" in name)
    left, right = np.fromfile(ours, np.uint8), np.fromfile(theirs, np.uint8)
    for name, x in a.items():
        # llama-quantize chooses new scales for MXFP4, convert moves the checkpoint's.
        if x.qtype is not QuantType.MXFP4:
            y = b[name]
            np.testing.assert_array_equal(
                left[x.offset : x.offset + x.nbytes], right[y.offset : y.offset + y.nbytes], err_msg=name
            )


def test_a_type_that_is_asked_for_wins_over_the_floor(full: Path, runtime: Runtime, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.gguf"
    run_tool(runtime, "llama-quantize", "--tensor-type", "ssm_beta=q4_K", full, theirs, "Q4_K_M", 1)
    found = {t.qtype for name, t in parse_gguf(theirs).by_name.items() if "ssm_beta" in name}
    assert found == {QuantType.Q4_K}


def test_an_importance_matrix_of_the_runtime_is_read_and_used(
    checkpoint: Path, full: Path, runtime: Runtime, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and then some more of it " * 40)
    matrix = tmp_path / "imatrix.gguf"
    run_tool(runtime, "llama-imatrix", "-m", full, "-f", text, "-o", matrix, "-c", 128, "-t", 1, "--chunks", 2)
    loaded = Imatrix.load(matrix)
    experts = loaded.importance("blk.1.ffn_gate_exps.weight", (4, 256, 256))
    assert experts is not None
    assert experts.shape == (4, 256)
    path = checkpoint.with_name("with_imatrix.gguf")
    convert(str(checkpoint), quant="Q2_K_S", outfile=str(path), imatrix=str(matrix))
    assert QuantType.Q2_K in {t.qtype for t in parse_gguf(path).tensors}


def test_perplexity_prints_its_last_line_every_time(full: Path, runtime: Runtime, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and then some more of it " * 40)
    for _ in range(4):
        done = run_tool(runtime, "llama-perplexity", "-m", full, "-f", text, "-c", 128, "-t", 1, "--chunks", 1)
        assert "Final estimate: PPL =" in done.stdout + done.stderr
