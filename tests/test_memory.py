"""Peak memory: threads times a chunk, whatever the model's size; and what the release's plan takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint

LIMIT = 700_000_000
SAMPLED = """
import json, sys, threading
from convert.pipeline import convert

peak = 0
def watch(over):
    global peak
    while not over.wait(0.01):
        with open("/proc/self/status") as status:
            peak = max(peak, next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")))

over = threading.Event()
watcher = threading.Thread(target=watch, args=(over,))
watcher.start()
types = {"target_size" if sys.argv[2][-1] == "G" else "quant": sys.argv[2]}
result = convert(sys.argv[1], outdir=sys.argv[3], threads=2, dry_run=sys.argv[4] == "plan", **types)
over.set()
watcher.join()
data = sum(tensor.nbytes for tensor in result.plan.tensors)
print(json.dumps({"peak": peak, "data": data, "tensors": len(result.plan.tensors), "files": len(result.plan.files)}))
"""


def measured(checkpoint: Path, quant: str, output: Path, mode: str = "convert") -> dict[str, Any]:
    command = [sys.executable, "-c", SAMPLED, str(checkpoint), quant, str(output), mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """896 experts in each of one and of four layers."""
    folder = tmp_path_factory.mktemp("memory")
    kinds = ("kda", "mla", "kda", "mla")
    small, large = (
        make_checkpoint(
            folder / str(layers),
            TinyShape(
                layers=layers, layer_kinds=kinds[:layers], dense_layers=0, experts=896, expert_width=192, latent=192
            ),
        )
        for layers in (1, 4)
    )
    return small, large


@pytest.mark.parametrize("quant", ["MXFP4", "Q8_0"])
def test_memory_does_not_grow_with_the_model(checkpoints: tuple[Path, Path], tmp_path: Path, quant: str) -> None:
    small, large = (measured(folder, quant, tmp_path / folder.name) for folder in checkpoints)
    assert large["data"] > 3.5 * small["data"] > 150_000_000
    assert large["peak"] < LIMIT / 4
    assert large["peak"] < small["peak"] + 25_000_000


@pytest.mark.slow
def test_types_for_a_size_are_measured_on_the_release_within_the_limit(sparse_release: Path, tmp_path: Path) -> None:
    plan = measured(sparse_release, "1100G", tmp_path, "plan")
    assert plan["data"] <= 1_100_000_000_000
    assert plan["tensors"] == 2693
    assert plan["peak"] < LIMIT


@pytest.mark.slow
def test_the_plan_of_the_release_is_exact_and_stays_within_the_limit(sparse_release: Path, tmp_path: Path) -> None:
    plan = measured(sparse_release, "MXFP4", tmp_path, "plan")
    assert plan["data"] == 1_561_518_856_576
    assert (plan["tensors"], plan["files"]) == (2693, 35)
    assert plan["peak"] < LIMIT
