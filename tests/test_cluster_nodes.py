"""nodes.toml: what it says, and what it must not say."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_support import rpc_workers

from kimi_gguf.cluster.nodes import IMPLICIT_HEAD, Node, ask_memory, parse_link, parse_memory, read_nodes
from kimi_gguf.cluster.runtime import Runtime
from quant.errors import InputError, UsageError

TWO = """
[[node]]
name = "box"
address = "10.0.0.2:50052"
memory = "768G"
link = "25Gbit"

[[node]]
name = "mine"
head = true
devices = ["24G", "24GiB"]
memory = 64_000_000_000
backend = "ROCm"
"""


def read(tmp_path: Path, text: str) -> tuple[Node, ...]:
    path = tmp_path / "nodes.toml"
    path.write_text(text)
    return read_nodes(path)


def test_the_head_comes_first_whatever_the_file_order(tmp_path: Path) -> None:
    assert read(tmp_path, TWO) == (
        Node("mine", None, 64 * 10**9, (24 * 10**9, 24 << 30), None, True, True, "ROCm"),
        Node("box", "10.0.0.2:50052", 768 * 10**9, (), 25e9 / 8),
    )


def test_without_a_head_the_machine_that_plans_is_it_and_holds_nothing(tmp_path: Path) -> None:
    nodes = read(tmp_path, '[[node]]\naddress = "a:1"\nmemory = "1G"')
    assert nodes == (IMPLICIT_HEAD, Node("a:1", "a:1", 10**9))
    assert IMPLICIT_HEAD.pools == ()


@pytest.mark.parametrize(
    ("text", "speed"), [("10Gbit", 1.25e9), ("2.5 Gbit/s", 312.5e6), ("100Mbps", 12.5e6), ("1gbit", 125e6)]
)
def test_links_are_bits_per_second(text: str, speed: float) -> None:
    assert parse_link(text) == speed


@pytest.mark.parametrize(("text", "size"), [("96G", 96 * 10**9), ("1.5T", 15 * 10**11), ("1GiB", 1 << 30), (7, 7)])
def test_memory_is_decimal_unless_it_says_otherwise(text: str | int, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1G", "lots", "96 Gigs", "9" * 400, "1e400", -5, 1 << 70])
def test_what_is_no_memory_is_refused(text: str | int) -> None:
    with pytest.raises(UsageError):
        parse_memory(text)


NODE = '[[node]]\naddress = "a:1"\nmemory = "1G"\n'
FAULTS = {
    "no TOML": ("[[node", "is not TOML"),
    "nothing": ("", "no [[node]]"),
    "one table": ("[node]\nmemory = '1G'", "no [[node]]"),
    "an unknown key at the top": (NODE + "[extra]\nx = 1", "the key 'extra' is unknown"),
    "an unknown key of a node": (NODE + "ram = 1", "the key 'ram' is unknown"),
    "no address": ('[[node]]\nname = "x"\nmemory = "1G"', "has no address"),
    "a worker without layers": (NODE + "layers = false", "nothing to do"),
    "no port": ('[[node]]\naddress = "a"\nmemory = "1G"', "is not a worker's address"),
    **{
        f"the host {host!r:.12}": (f'[[node]]\naddress = "{host}:1"\nmemory = "1G"', "is not a worker's address")
        for host in ("a,b:1", "a b", "--help", "a..b", "a" * 64, "[::1]", "\uff15")
    },
    "digits that are not ASCII": ('[[node]]\naddress = "a:\uff15"\nmemory = "1G"', "is not a worker's address"),
    "a number of thousands of digits": ("[[node]]\nhead = true\nmemory = " + "9" * 5000, "is not TOML"),
    "a head with an address": (NODE + "head = true", "no worker"),
    "two heads": ('[[node]]\nhead = true\nmemory="1G"\n[[node]]\nname="b"\nhead = true\nmemory="1G"', "both the head"),
    "two of a name": (NODE + 'name = "x"\n[[node]]\naddress="b:1"\nname = "x"\nmemory = "1G"', "the name 'x'"),
    "two of an address": (NODE + 'name = "x"\n[[node]]\naddress="a:1"\nname = "y"\nmemory = "1G"', "the address 'a:1'"),
    "memory of another kind": ('[[node]]\naddress = "a:1"\nmemory = true', "is not an amount of memory"),
    "devices of another kind": ('[[node]]\naddress = "a:1"\ndevices = "80G"', "devices is not a list"),
    "a flag of another kind": (NODE + 'layers = "no"', "expected true or false"),
    "a link of another kind": (NODE + "link = 10", "expected a short text"),
    "an unknown backend": (NODE + 'backend = "GPU"', "backend 'GPU' is unknown"),
    "a name of control characters": (NODE + 'name = "\\u001b[2J"', "expected a short text"),
    "nobody with memory": ("[[node]]\nhead = true", "no node has memory"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_the_file_and_the_key(name: str, tmp_path: Path) -> None:
    text, words = FAULTS[name]
    with pytest.raises(InputError) as fault:
        read(tmp_path, text)
    assert "nodes.toml" in fault.value.message and words in fault.value.message


@pytest.mark.parametrize(("devices", "pools"), [((7,), (7,)), ((5, 6), (5, 6))])
def test_a_worker_is_asked_for_the_memory_that_the_file_does_not_state(
    devices: tuple[int, ...], pools: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text('[[node]]\naddress = "a:1"\n[[node]]\naddress = "b:1"\nmemory = 9')
    asked: list[str] = []

    def ask(address: str) -> tuple[int, ...]:
        asked.append(address)
        return devices

    _, first, second = read_nodes(path, ask=ask)
    assert (asked, first.pools, second.pools) == (["a:1"], pools, (9,))
    assert bool(first.devices) == (len(devices) > 1)


@pytest.mark.runtime
def test_a_running_worker_answers(runtime: Runtime, tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    with rpc_workers(runtime, 1, tmp_path / "log") as workers:
        path.write_text(f'[[node]]\naddress = "{workers[0][0]}"')
        (memory,) = read_nodes(path, ask=lambda address: ask_memory(address, runtime))[1].pools
    assert 10**8 < memory < 10**14


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_nodes(tmp_path / "none.toml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not TOML"):
        read_nodes(tmp_path / "bytes")
