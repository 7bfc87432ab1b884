"""Memory of a running model: the figures of K3.1 Pro, and compute buffers against what llama.cpp allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convert.config import parse_config
from convert.shapes import released_config
from kimi_gguf.cluster.memory import (
    PIPELINE_COPIES,
    Load,
    compute_bytes,
    head_compute_bytes,
    indexer_bytes_per_token,
    layer_caches,
    mla_bytes_per_token,
    state_bytes,
)
from kimi_gguf.cluster.memory_model import gguf_bytes, model_bytes, released_bytes
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference.checkpoint_shape import TinyShape, checkpoint_config
from kimi_gguf.reference.gguf_maker import make_gguf
from quant.errors import InputError, UsageError
from quant.gguf_split import read_gguf_set

K31 = released_config("k3.1-pro")
MILLION = 1_048_576
MEASURED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "compute_buffers.json").read_text())
MIB = 1 << 20
SCRIPT = Path(__file__).parent.parent / "scripts" / "measure_buffers.py"


def caches(context: int, parallel: int = 1) -> tuple[int, ...]:
    load = Load(context, parallel)
    return tuple(map(sum, zip(*(layer_caches(K31, layer, load) for layer in range(K31.n_layers)), strict=True)))


def test_the_caches_of_a_million_tokens_are_29_and_6_gigabytes() -> None:
    mla, indexer, state = caches(MILLION)
    assert mla == 28_991_029_248 == 24 * 576 * 2 * MILLION
    assert indexer == 6_442_450_944 == 24 * 128 * 2 * MILLION
    assert state == 464_633_856 == 69 * 4 * (96 * 128 * 128 + 3 * 3 * 96 * 128)


def test_the_51_gigabytes_of_calculators_count_the_latent_twice_and_nothing_else() -> None:
    latent = K31.mla.kv_lora
    assert K31.layer_kinds.count("mla") * 2 * latent * 2 * MILLION == 51_539_607_552
    assert mla_bytes_per_token(K31) == 2 * (latent + K31.mla.rope) == 1152
    assert indexer_bytes_per_token(K31) == 256
    assert indexer_bytes_per_token(released_config("k3")) == 0


def test_states_grow_with_sequences_and_caches_with_their_tokens() -> None:
    one, four = caches(8192), caches(8192, parallel=4)
    assert four == tuple(4 * size for size in one)
    assert caches(8191) == one == caches(7937)


def test_state_of_a_layer_is_a_matrix_per_head_and_three_convolutions() -> None:
    assert state_bytes(K31) == 6_291_456 + 442_368


def test_places_hold_every_byte_of_the_file_once() -> None:
    model = released_bytes("k3.1-pro", "Q3_K_M")
    assert len(model.weights) == 94
    assert model.total == 1_325_474_115_968 == sum(t.nbytes for t in model.tensors)
    assert model.experts[0] == 0 and all(
        0 < e < w for e, w in zip(model.experts[1:93], model.weights[1:], strict=False)
    )
    assert max(model.largest) == max(t.nbytes for t in model.tensors)


@pytest.mark.parametrize("row", MEASURED, ids=lambda r: f"{r['shape']}-{r['split']}-{r['context']}-{r['ubatch']}")
def test_compute_buffers_are_bounded_closely(row: dict[str, Any]) -> None:
    config = released_config(row["shape"])
    load = Load(row["context"], row["parallel"], row["ubatch"])
    split = row["split"] or [94]
    on_head = bool(row.get("head_layers")) or row["split"] is None
    copies = PIPELINE_COPIES if len(split) > 1 and not on_head else 1
    begins = [sum(split[:i]) for i in range(len(split))]
    bounds = [compute_bytes(config, load, begin, first=begin == 0, copies=copies) for begin in begins]
    head = head_compute_bytes(config, load, copies=copies)
    # llama.cpp lists workers first and the head's processor last.
    bounds = [*bounds[1:], bounds[0]] if on_head else [*bounds, head]
    for bound, measured in zip(bounds, row["buffers"], strict=True):
        assert measured <= bound <= measured + 250 * MIB


@pytest.mark.runtime
def test_compute_buffers_of_a_tiny_model_are_bounded(runtime: Runtime, tmp_path: Path) -> None:
    shape = TinyShape(vocab=512)
    config = parse_config(json.dumps(checkpoint_config(shape)).encode())
    model = make_gguf(tmp_path / "tiny.gguf", config, seed=1)
    command = [sys.executable, str(SCRIPT), str(model), "1024,64,1", "4096,512,2"]
    done = subprocess.run(
        command, env=runtime.environment(), capture_output=True, text=True, check=True, timeout=120, cwd=tmp_path
    )
    for row in json.loads(done.stdout):
        load = Load(row["context"], row["parallel"], row["ubatch"])
        bound = compute_bytes(config, load, 0, first=True, copies=1)
        measured = sum(size for _, size in row["buffers"])
        assert measured <= bound <= 3 * measured + MIB


def test_a_gguf_gives_its_own_types_and_sizes(tmp_path: Path) -> None:
    config = parse_config(json.dumps(checkpoint_config(TinyShape(vocab=512))).encode())
    model = model_bytes(make_gguf(tmp_path / "tiny.gguf", config, seed=1))
    assert model.config.n_layers == config.n_layers
    assert model.embedding == 4 * config.vocab_size * config.hidden
    assert model.total == sum(t.nbytes for t in model.tensors)


def test_what_is_no_model_of_this_kind_is_refused(tmp_path: Path) -> None:
    config = parse_config(json.dumps(checkpoint_config(TinyShape(vocab=512))).encode())
    files = read_gguf_set(make_gguf(tmp_path / "tiny.gguf", config, seed=1))
    header = replace(files.headers[0], tensors=files.headers[0].tensors[:-3])
    with pytest.raises(InputError, match="not a whole model"):
        gguf_bytes(replace(files, headers=(header,)))
    header = replace(files.headers[0], metadata={})
    with pytest.raises(InputError, match="planning knows kimi-k3"):
        gguf_bytes(replace(files, headers=(header,)))


@pytest.mark.parametrize(
    "named", [{}, {"shape": "k3"}, {"model": "x.gguf", "shape": "k3", "quant": "Q8_0"}, {"model": "x", "quant": "Q8_0"}]
)
def test_one_model_must_be_named(named: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        model_bytes(named.get("model"), shape=named.get("shape"), quant=named.get("quant"))
