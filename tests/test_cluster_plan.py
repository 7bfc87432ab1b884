"""Placements: optimal, exact to the byte, refused where they do not fit; flags and forecasts that follow from them."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import HubServer

from convert.config import parse_config
from kimi_gguf import cluster_plan
from kimi_gguf.cli import run
from kimi_gguf.cluster.forecast import forecast
from kimi_gguf.cluster.machines import CONTEXTS, MACHINES, machine_rows
from kimi_gguf.cluster.memory import Load, ModelBytes, TensorBytes
from kimi_gguf.cluster.memory_model import released_bytes
from kimi_gguf.cluster.nodes import IMPLICIT_HEAD, Node
from kimi_gguf.cluster.placement import Placement, place
from kimi_gguf.cluster.placement_flags import flags
from kimi_gguf.reference.checkpoint_shape import TinyShape, checkpoint_config
from kimi_gguf.reference.gguf_maker import make_gguf
from quant.errors import InputError, UsageError
from quant.recipes import RECIPES

GB = 10**9
Q3 = released_bytes("k3.1-pro", "Q3_K_M")
MACS = (
    Node("studio-1", memory=512 * GB, head=True, link=1.25e9),
    Node("studio-2", "10.0.0.12:50052", 512 * GB, link=1.25e9),
    Node("box", "10.0.0.13:50052", 768 * GB, link=3.125e9),
)
B300 = (Node("b300", devices=(288 * GB,) * 8, head=True),)


def ram(name: str, gigabytes: float, **more: Any) -> Node:
    return Node(name, f"{name}:50052", int(gigabytes * GB), **more)


def check(placement: Placement) -> None:
    """What holds of every placement: all layers once, in order, every byte of the file once."""
    cuts = [(share.begin, share.end) for share in placement.shares]
    assert [begin for begin, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == placement.model.config.n_layers + 1
    weights = sum(share.weights for share in placement.shares)
    assert weights + placement.head.embedding + placement.head.experts == placement.model.total
    if placement.fits:
        assert all(share.need <= share.usable <= share.pool.memory for share in placement.shares)


@pytest.mark.parametrize("nodes", [MACS, B300, (IMPLICIT_HEAD, *(ram(f"n{i}", 256) for i in range(6)))], ids=len)
def test_every_layer_and_byte_has_one_place(nodes: tuple[Node, ...]) -> None:
    placement = place(Q3, Load(131_072), nodes)
    assert placement.fits
    check(placement)


def test_the_cut_is_the_best_of_all_cuts() -> None:
    config = parse_config(json.dumps(checkpoint_config(TinyShape(layers=6, vocab=512))).encode())
    generator = np.random.default_rng(5)
    for _ in range(20):
        sizes = generator.integers(1, 400, 7) * 10**6
        names = [*(f"blk.{i}.x.weight" for i in range(6)), "output.weight"]
        model = ModelBytes(config, tuple(map(TensorBytes, names, sizes.tolist())), "random")
        nodes = (IMPLICIT_HEAD, *(ram(f"n{i}", g) for i, g in enumerate(generator.uniform(0.2, 1.5, 3))))
        best = place(model, Load(256, ubatch=8), nodes).fill
        assert best == pytest.approx(min(fill_of(model, nodes, cut) for cut in cuts(7, 3)))


def cuts(places: int, devices: int) -> list[tuple[int, ...]]:
    return [(0, *inner, places) for inner in itertools.combinations_with_replacement(range(places + 1), devices - 1)]


def fill_of(model: ModelBytes, nodes: Sequence[Node], cut: Sequence[int]) -> float:
    """Of one cut, from the sizes that ``place`` states for it when it is the only one that fits."""
    from kimi_gguf.cluster.placement import _pools, _Problem

    problem = _Problem(model, Load(256, ubatch=8), tuple(nodes), 0.05)
    pools = _pools(nodes)
    shares = [problem.share(p, b, e, 4, ()) for p, b, e in zip(pools, cut, cut[1:], strict=False) if b < e]
    return max(share.need / share.usable for share in shares)


def test_equal_machines_get_equal_work() -> None:
    placement = place(Q3, Load(32_768), (IMPLICIT_HEAD, *(ram(f"n{i}", 512) for i in range(4))))
    needs = [share.need for share in placement.shares]
    assert max(needs) - min(needs) < 1.2 * max(Q3.weights)


def test_flags_name_workers_layers_and_context() -> None:
    placement = place(Q3, Load(131_072, parallel=2), MACS)
    first, second, third = (share.end - share.begin for share in placement.shares)
    assert flags(placement) == [
        *("--rpc", "10.0.0.12:50052,10.0.0.13:50052", "-ngl", str(94 - first), "-ts", f"{second},{third}"),
        *("-c", "262144", "--parallel", "2", "-ub", "512", "-fa", "on"),
    ]


def test_split_counts_give_llama_cpps_own_split() -> None:
    """As llama.cpp reads them: float32 running sums over the whole, layers over all layers, the first greater wins."""
    placement = place(Q3, Load(131_072), MACS)
    given = flags(placement)
    counts = np.array(given[given.index("-ts") + 1].split(","), dtype=np.float32)
    layers = int(given[given.index("-ngl") + 1])
    running = np.cumsum(counts, dtype=np.float32) / counts.sum(dtype=np.float32)
    positions = np.arange(layers, dtype=np.float32) / np.float32(layers)
    found = np.searchsorted(running, positions, side="right")
    shares = [share for share in placement.shares if share.pool.remote]
    expected = [device for device, share in enumerate(shares) for _ in range(share.begin, share.end)]
    assert found.tolist() == expected


def test_workers_come_before_the_gpus_of_the_head_and_idle_devices_count() -> None:
    nodes = (
        Node("h", devices=(900 * GB,), head=True),
        Node("w", "w:1", devices=(900 * GB, GB), memory=64 * GB),
        Node("idle", "idle:1", GB),
    )
    placement = place(Q3, Load(8192), nodes)
    assert [share.pool.label for share in placement.shares] == ["RPC0", "CUDA0"]
    given = flags(placement)
    assert given[given.index("--rpc") + 1] == "w:1"
    parts = given[given.index("-ts") + 1].split(",")
    assert len(parts) == 3 and parts[1] == "0"
    assert given[given.index("-ngl") + 1] == "94"


def test_a_single_machine_needs_no_split() -> None:
    placement = place(Q3, Load(8192), (Node("box", memory=2000 * GB, head=True),))
    assert flags(placement)[:2] == ["-ngl", "0"]
    assert placement.head.transfer == 0 and "-ts" not in flags(placement)


def test_experts_stay_in_the_heads_ram_only_when_gpus_cannot_hold_them() -> None:
    gpus = Node("h", devices=(80 * GB,) * 8, memory=1500 * GB, head=True)
    placement = place(Q3, Load(32_768), (gpus,))
    check(placement)
    assert placement.fits and placement.head.experts > 0
    layers = len(placement.on_head)
    assert placement.on_head == tuple(range(1, layers + 1))
    assert not place(Q3, Load(32_768), (Node("h", devices=(80 * GB,) * 8, memory=700 * GB, head=True),)).fits
    pattern = flags(placement)[flags(placement).index("-ot") + 1]
    assert pattern.startswith(r"blk\.(1|2|") and pattern.endswith(r")\.ffn_(gate|up|down)_exps\.weight=CPU")
    assert place(Q3, Load(32_768), B300).on_head == ()


def test_the_transfer_of_the_largest_tensor_needs_room_on_both_ends() -> None:
    largest = max(Q3.largest)
    placement = place(Q3, Load(8192), (IMPLICIT_HEAD, ram("a", 1500)))
    assert placement.shares[0].transfer == largest and placement.head.transfer == 2 * largest
    gpu = Node("g", "g:1", devices=(1500 * GB,))
    placement = place(Q3, Load(8192), (IMPLICIT_HEAD, gpu))
    assert placement.shares[0].transfer == 0
    assert [(node, need) for node, need, _ in placement.rams()[1:]] == [(gpu, largest)]
    assert placement.head.checkpoints == 8 * 464_633_856
    tight = Node("g", "g:1", devices=(1500 * GB,), memory=GB)
    assert not place(Q3, Load(8192), (IMPLICIT_HEAD, tight)).fits


def test_more_than_sixteen_devices_are_refused() -> None:
    with pytest.raises(InputError, match="17 devices"):
        place(Q3, Load(8192), (IMPLICIT_HEAD, *(ram(f"n{i}", 256) for i in range(17))))


def test_loading_takes_bytes_over_the_slower_link_and_little_when_seeded() -> None:
    studio, box = forecast(place(Q3, Load(131_072), MACS))
    assert studio.seconds == pytest.approx(studio.nbytes / 1.25e9) and box.speed == 1.25e9
    assert 0 < box.seeded < 0.01 * box.nbytes
    (unknown,) = forecast(place(Q3, Load(8192), (IMPLICIT_HEAD, ram("a", 1500))))
    assert unknown.seconds is None and unknown.seeded_seconds is None


NODES = """
[[node]]
name = "studio-1"
head = true
memory = "512G"
[[node]]
name = "studio-2"
address = "10.0.0.12:50052"
memory = "512G"
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.toml"
    path.write_text(NODES)
    return path


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["cluster", "plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_plan_that_fits_is_shown_and_its_flags_can_be_pasted(verb: Any, nodes: Path) -> None:
    asked = ("--shape", "k3.1-pro", "--quant", "IQ2_XS", "--nodes", nodes, "--context", 131_072)
    code, out, err = verb(*asked)
    assert (code, err) == (0, "") and "studio-2  RPC0" in out
    value = json.loads(verb(*asked, "--json")[1])
    assert out.splitlines()[-1] == shlex.join(value["flags"]) == verb(*asked, "-q")[1].strip()
    assert sum(device["weights"] for device in value["devices"]) + value["head"]["embedding"] == value["tensor_bytes"]


def test_a_plan_that_does_not_fit_says_who_lacks_what_and_what_would(verb: Any, nodes: Path) -> None:
    code, out, err = verb("--shape", "k3.1-pro", "--quant", "Q3_K_M", "--nodes", nodes, "--context", 32_768)
    assert code == 1 and out == ""
    assert "studio-1 (RAM) lacks" in err and "studio-2 (RPC0) lacks" in err
    assert "would fit: Q2_K_S with 938.69 GB" in err
    with pytest.raises(InputError) as fault:
        cluster_plan(nodes=nodes, shape="k3.1-pro", quant="Q2_K_S", context=1_048_576, parallel=2)
    assert fault.value.hint is not None
    assert "--context 131072" in fault.value.hint


def test_a_gguf_is_planned_from_its_header(verb: Any, tmp_path: Path, nodes: Path) -> None:
    config = parse_config(json.dumps(checkpoint_config(TinyShape(vocab=512))).encode())
    model = make_gguf(tmp_path / "tiny.gguf", config, seed=1)
    value = json.loads(verb(model, "--nodes", nodes, "--context", 256, "--ubatch", 64, "--json")[1])
    assert value["model"] == "tiny.gguf" and value["devices"][-1]["output"] is True


def test_a_conversation_is_no_longer_than_the_model_allows(verb: Any, tmp_path: Path, nodes: Path) -> None:
    config = parse_config(json.dumps(checkpoint_config(TinyShape(vocab=512, context=1024))).encode())
    model = make_gguf(tmp_path / "tiny.gguf", config, seed=1)
    assert "-c 1024 " in verb(model, "--nodes", nodes, "-q")[1]
    code, _, err = verb(model, "--nodes", nodes, "--context", 1025)
    assert code == 2 and "--context 1025 is above the model's 1024 tokens" in err


def test_a_gguf_on_the_hub_is_planned_from_its_header(hub: HubServer, verb: Any, tmp_path: Path, nodes: Path) -> None:
    config = parse_config(json.dumps(checkpoint_config(TinyShape(vocab=512))).encode())
    (tmp_path / "made").mkdir()
    model = make_gguf(tmp_path / "made" / "tiny.gguf", config, seed=1)
    hub.store.add_folder("org/Made", tmp_path / "made")
    asked = ("--nodes", nodes, "--context", 256, "--ubatch", 64, "--json")
    assert verb("hf://org/Made/tiny.gguf", *asked) == verb(model, *asked)


@pytest.mark.parametrize(
    "wrong",
    [
        ("--context", "0"),
        ("--parallel", "0"),
        ("--ubatch", "99999999"),
        ("--margin", "1"),
        ("--shape", "k9"),
        ("--quant", "Q9"),
        ("--all",),
    ],
    ids=" ".join,
)
def test_senseless_flags_are_usage_errors(wrong: tuple[str, ...], verb: Any, nodes: Path) -> None:
    code, out, err = verb("--shape", "k3.1-pro", "--quant", "Q3_K_M", "--nodes", nodes, *wrong)
    assert (code, out) == (2, "") and err.startswith("error: ")


def test_a_plan_needs_machines() -> None:
    assert run(["cluster", "plan", "--shape", "k3", "--quant", "Q8_0"]) == 2
    with pytest.raises(UsageError):
        cluster_plan(nodes="x", context=-1)


def test_the_table_of_machines_has_every_recipe_and_agrees_with_placements() -> None:
    rows = machine_rows("k3.1-pro")
    assert {row.quant for row in rows} == set(RECIPES)
    by_name = {row.quant: row for row in rows}
    mxfp4 = by_name["MXFP4"]
    assert mxfp4.weights == released_bytes("k3.1-pro", "MXFP4").total
    assert mxfp4.longest["8 x B300"] == CONTEXTS[-1] and mxfp4.longest["8 x B200"] is None
    assert mxfp4.longest["CPU 1.5 TB"] is None and mxfp4.longest["CPU 2 TB"] == CONTEXTS[-1]
    for row in rows:
        assert list(row.needs.values()) == sorted(row.needs.values())
        # The caches of a million tokens, less those of 8,192.
        assert row.needs[1_048_576] - row.needs[8192] > 35 * GB
    machine = next(m for m in MACHINES if m.name == "2 Macs 512")
    longest = by_name["Q2_K_S"].longest[machine.name]
    model = released_bytes("k3.1-pro", "Q2_K_S")
    fits = [context for context in CONTEXTS if place(model, Load(context), machine.nodes).fits]
    assert longest == max(fits) == 262_144
