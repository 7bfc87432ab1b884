"""The machines of a cluster, as ``nodes.toml`` describes them.

[[node]]
name = "studio-1"
address = "10.0.0.11:50052"     # of its RPC worker; the head needs none
memory = "512G"                 # what it gives to the model; G is 1e9 bytes, GiB is 2^30
link = "10Gbit"                 # speed of its network, if known
head = true                     # the machine that has the file and serves
layers = false                  # it holds no layers, though it has memory for some
devices = ["80G", "80G"]        # GPUs: they hold the layers, and ``memory`` is the RAM beside them
backend = "CUDA"                # of the head's own GPUs
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.flags import parse_size
from kimi_gguf.cluster.rpc import ask_worker, parse_endpoint
from quant.errors import InputError, UsageError

if TYPE_CHECKING:
    from kimi_gguf.cluster.runtime import Runtime

MAX_DEVICES = 16
"""llama.cpp takes no more devices, RPC workers included."""

_KEYS = ("name", "address", "memory", "devices", "link", "head", "layers", "backend")
_BACKENDS = ("CUDA", "ROCm", "Vulkan", "MTL")
Ask = Callable[[str], tuple[int, ...]]

_STEADY = 0.98
_MAX_FILE = 1 << 20
_MAX_NODES = 64
_LARGEST = 1 << 60
_BINARY = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])iB")
_LINK = re.compile(r"(\d+(?:\.\d+)?) ?([MG])(?:bit(?:/s)?|bps|b/s)", re.IGNORECASE)
_EXAMPLE = 'for example: [[node]] name = "a", address = "10.0.0.2:50052", memory = "512G", link = "10Gbit"'


@dataclass(frozen=True, slots=True)
class Node:
    """One machine.

    Attributes:
        name: for messages and tables.
        address: ``host:port`` of its RPC worker; None for a head.
        memory: bytes of RAM given to the model; None when not stated.
        devices: bytes of each GPU; empty when layers lie in RAM.
        link: bytes per second of its network; None when not stated.
        head: it has the file and runs the server.
        layers: it may hold layers.
        backend: what llama.cpp calls the head's GPUs: ``CUDA0``, ``CUDA1`` ...
    """

    name: str
    address: str | None = None
    memory: int | None = None
    devices: tuple[int, ...] = ()
    link: float | None = None
    head: bool = False
    layers: bool = True
    backend: str = "CUDA"

    @property
    def pools(self) -> tuple[int, ...]:
        """Bytes of each place for layers: its GPUs, else its RAM."""
        if not self.layers:
            return ()
        return self.devices or (() if self.memory is None else (self.memory,))


IMPLICIT_HEAD = Node("head", head=True, layers=False)
"""Where no node is called the head: the machine that runs the command, of which nothing is known."""


def ask_memory(address: str, runtime: Runtime | None = None) -> tuple[int, ...]:
    """Bytes of each device of the worker at ``address``: what is free there now, less a little that comes and goes.

    Raises:
        UsageError: there is no runtime, whose protocol would be spoken.
        RuntimeFault: nobody answers.
    """
    # Plans of files that state all memory need no runtime.
    from kimi_gguf.cluster.runtime import find

    return tuple(int(free * _STEADY) for free, _ in ask_worker(address, (runtime or find()).facts.rpc_protocol).memory)


def read_nodes(path: str | os.PathLike[str], *, ask: Ask = ask_memory) -> tuple[Node, ...]:
    """The nodes of a file, the head first; one without memory is added where no node is the head.

    Args:
        ask: memory of the devices of a worker whose memory the file does not state.

    Raises:
        InputError: not readable, no TOML, an unknown key, or a value that makes no sense; names node and key.
    """
    file = Path(path)
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_FILE + 1)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}", "name a file that describes the nodes") from None
    if len(data) > _MAX_FILE:
        raise InputError(f"{file} has more than {_MAX_FILE:,} bytes", "a list of nodes is small")
    try:
        tree = tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not TOML: {error}", _EXAMPLE) from None
    return parse_nodes(tree, str(file), ask=ask)


def parse_nodes(tree: Mapping[str, Any], file: str, *, ask: Ask = ask_memory) -> tuple[Node, ...]:
    """As ``read_nodes``, from the parsed content of ``file``."""
    _known(tree, ("node",), file)
    entries = tree.get("node")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{file} has no [[node]] tables", _EXAMPLE)
    if len(entries) > _MAX_NODES:
        raise InputError(f"{file} has {len(entries)} nodes, at most {_MAX_NODES} are read", "name fewer")
    nodes = [_node(entry, number, file) for number, entry in enumerate(entries, 1)]
    _distinct([node.name for node in nodes], "name", file)
    _distinct([node.address for node in nodes if node.address], "address", file)
    nodes = [_asked(node, ask) for node in nodes]
    heads = [node for node in nodes if node.head]
    if len(heads) > 1:
        raise InputError(f"{file}: {' and '.join(node.name for node in heads)} are both the head", "one machine serves")
    if not any(node.pools for node in nodes):
        raise InputError(f"{file}: no node has memory for layers", 'give memory = "512G" or devices = ["80G"]')
    return (*(heads or [IMPLICIT_HEAD]), *(node for node in nodes if not node.head))


def parse_link(text: str) -> float:
    """Bytes per second of ``10Gbit``, ``2.5 Gbit/s``, ``100Mbps``.

    Raises:
        UsageError: another spelling, or nothing.
    """
    match = _LINK.fullmatch(text.strip())
    speed = float(match[1]) * {"M": 1e6, "G": 1e9}[match[2].upper()] / 8 if match else 0.0
    if not speed or speed > _LARGEST:
        raise UsageError(f"{text!r:.60} is not the speed of a link", "write for example 10Gbit or 100Mbit")
    return speed


def parse_memory(text: str | int) -> int:
    """Bytes of ``96G`` (96e9), ``96GiB`` (96 * 2^30) or a number.

    Raises:
        UsageError: another spelling, nothing, or more than an exbibyte.
    """
    match = _BINARY.fullmatch(text.strip()) if isinstance(text, str) else None
    try:
        size = round(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1)) if match else parse_size(text)
    except (UsageError, OverflowError, ValueError):
        size = 0
    if not 0 < size < _LARGEST:
        raise UsageError(
            f"{str(text)[:60]!r} is not an amount of memory", "write for example 96G (1e9) or 96GiB (2^30)"
        )
    return size


def _node(entry: Mapping[str, Any], number: int, file: str) -> Node:
    named = entry.get("name", entry.get("address"))
    where = f"{file}, node {number}" + (f" ({named:.60})" if isinstance(named, str) else "")
    _known(entry, _KEYS, where)
    try:
        head = _flag(entry, "head", False)
        address = _text(entry, "address")
        if address is not None:
            parse_endpoint(address)
        devices = entry.get("devices", [])
        if not isinstance(devices, list):
            raise UsageError("devices is not a list", 'write devices = ["80G", "80G"]')
        memory, link = entry.get("memory"), _text(entry, "link")
        backend = _text(entry, "backend") or "CUDA"
        if backend not in _BACKENDS:
            raise UsageError(f"backend {backend!r:.40} is unknown", f"known are {', '.join(_BACKENDS)}")
        node = Node(
            name=_text(entry, "name") or address or "head",
            address=address,
            memory=None if memory is None else _memory(memory),
            devices=tuple(_memory(device) for device in devices),
            link=None if link is None else parse_link(link),
            head=head,
            layers=_flag(entry, "layers", True),
            backend=backend,
        )
    except UsageError as fault:
        raise InputError(f"{where}: {fault.message}", fault.hint) from None
    if not head and address is None:
        raise InputError(f"{where} has no address", 'write the address of its worker: address = "10.0.0.2:50052"')
    if head and address is not None:
        raise InputError(
            f"{where}: the head holds its layers itself, and no worker", "drop its address, or head = true"
        )
    if not head and not node.layers:
        raise InputError(f"{where}: a worker without layers has nothing to do", "leave it out")
    return node


def _asked(node: Node, ask: Ask) -> Node:
    """The node with its memory: one device of a worker counts as RAM, of which loading needs more."""
    if node.address is None or node.pools:
        return node
    found = ask(node.address)
    return replace(node, memory=found[0]) if len(found) == 1 else replace(node, devices=found)


def _memory(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UsageError(f"{value!r:.60} is not an amount of memory", "write for example 96G (1e9) or 96GiB (2^30)")
    return parse_memory(value)


def _text(entry: Mapping[str, Any], key: str) -> str | None:
    value = entry.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or len(value) > 200 or not value.isprintable():
        raise UsageError(f"{key} is {value!r:.60}, expected a short text", f'write {key} = "..."')
    return value.strip()


def _flag(entry: Mapping[str, Any], key: str, default: bool) -> bool:
    value = entry.get(key, default)
    if not isinstance(value, bool):
        raise UsageError(f"{key} is {value!r:.60}, expected true or false", f"write {key} = true")
    return value


def _known(entry: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    unknown = [key for key in entry if key not in keys]
    if unknown:
        raise InputError(f"{where}: the key {unknown[0]!r:.60} is unknown", f"known are {', '.join(keys)}")


def _distinct(values: Sequence[str], what: str, file: str) -> None:
    for value in values:
        if values.count(value) > 1:
            raise InputError(f"{file}: two nodes have the {what} {value!r:.60}", "each node stands in the file once")
