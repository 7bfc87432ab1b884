"""RPC workers as seen from the outside: protocol version and devices, asked for before any weight is sent.

A worker (``ggml-rpc-server``) serves one client at a time, so a busy one accepts the connection and stays silent.
Message: command u8, size u64, data; answer: size u64, data. HELLO is command 14 in every version.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from dataclasses import dataclass

from kimi_gguf.cluster.errors import RuntimeFault
from quant.errors import UsageError

_HELLO, _DEVICE_COUNT, _DEVICE_MEMORY = 14, 15, 11
_HELLO_CAPABILITIES = bytes(24)
_HELLO_ANSWER = struct.Struct("<3Bx24s")
_MEMORY_ANSWER = struct.Struct("<QQ")
_MAX_ANSWER = 1 << 16
_MAX_DEVICES = 64
_MAX_HOST = 253
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")
_PORT = re.compile(r"[0-9]{1,5}")

_LOST = re.compile(r"RPC server (\S+) (?:crashed|was lost)|no usable RPC server at (\S+)")

Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker says of itself.

    Attributes:
        endpoint: ``host:port``.
        protocol: major, minor, patch.
        memory: (free, total) bytes of each device.
    """

    endpoint: str
    protocol: Version
    memory: tuple[tuple[int, int], ...]


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of ``host:port``.

    Raises:
        UsageError: not of this form (llama.cpp takes IPv4 addresses and names alone).
    """
    host, _, port = endpoint.rpartition(":")
    good = _HOST.fullmatch(host) and len(host) <= _MAX_HOST and _PORT.fullmatch(port)
    if not good or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{endpoint!r:.80} is not a worker's address", "write HOST:PORT, for example 10.0.0.2:50052")
    return host, int(port)


def check_free(host: str, port: int, hint: str) -> None:
    """Raise ``UsageError`` with ``hint`` when ``port`` of this machine's address ``host`` cannot be listened on."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        # The text of the exception itself says the address once more.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        raise UsageError(f"{host}:{port} cannot be listened on: {why}", hint) from None


def ask_worker(endpoint: str, expected: Version, *, timeout: float = 5.0) -> Worker:
    """Shake hands with the worker at ``endpoint`` and ask for its devices.

    Args:
        expected: the protocol of this runtime.
        timeout: seconds for the whole conversation.

    Raises:
        UsageError: no address.
        RuntimeFault: nobody answers there in time, or with another protocol; names the endpoint and both versions.
    """
    host, port = parse_endpoint(endpoint)
    deadline = time.monotonic() + timeout
    connected = False
    try:
        with socket.create_connection((host, port), timeout) as connection:
            connected = True
            protocol = _hello(_Talk(connection, deadline), endpoint, expected)
            talk = _Talk(connection, deadline)
            (count,) = struct.unpack("<I", talk.ask(_DEVICE_COUNT, b"", 4))
            if count > _MAX_DEVICES:
                raise RuntimeFault(f"worker {endpoint} claims {count} devices", "is it an RPC worker at all?")
            memory = [
                _MEMORY_ANSWER.unpack(talk.ask(_DEVICE_MEMORY, struct.pack("<I", device), _MEMORY_ANSWER.size))
                for device in range(count)
            ]
    except TimeoutError:
        if not connected:
            raise RuntimeFault(
                f"worker {endpoint} cannot be reached: no connection within {timeout:g} s",
                "the machine is down, its address is another one, or a firewall drops what is sent there",
            ) from None
        raise RuntimeFault(
            f"worker {endpoint} did not answer within {timeout:g} s",
            "it serves one client at a time: end the other one, or restart the worker",
        ) from None
    except (OSError, EOFError) as error:
        raise RuntimeFault(
            f"no RPC worker at {endpoint}: {error}", "start it there: kimi-gguf cluster worker --bind HOST:PORT"
        ) from None
    return Worker(endpoint, protocol, tuple(memory))


def lost_worker(text: str) -> str | None:
    """The worker that llama.cpp's output names as lost last, if it does."""
    found = _LOST.findall(text)
    return (found[-1][0] or found[-1][1]).rstrip(",.") if found else None


class _Talk:
    """Requests and answers on a connection, until a deadline."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def ask(self, command: int, data: bytes, size: int) -> bytes:
        """The answer to ``command``, of ``size`` bytes."""
        self._arm()
        self._connection.sendall(struct.pack("<BQ", command, len(data)) + data)
        (length,) = struct.unpack("<Q", self._read(8))
        if length != size:
            many = f"{length} bytes" if length <= _MAX_ANSWER else "what is no answer"
            raise EOFError(f"it answers command {command} with {many}, expected {size} bytes")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._arm()
            piece = self._connection.recv(size - len(data))
            if not piece:
                raise EOFError("it closed the connection")
            data += piece
        return data

    def _arm(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)


def _hello(talk: _Talk, endpoint: str, expected: Version) -> Version:
    hint = "run the same runtime on every node: kimi-gguf runtime build"
    text = ".".join(map(str, expected))
    try:
        answer = talk.ask(_HELLO, _HELLO_CAPABILITIES, _HELLO_ANSWER.size)
    except EOFError as error:
        raise RuntimeFault(
            f"worker {endpoint} does not shake hands in RPC protocol {text}: {error}",
            f"it is older, newer, or no RPC worker; {hint}",
        ) from None
    major, minor, patch, _ = _HELLO_ANSWER.unpack(answer)
    if major != expected[0] or minor > expected[1]:
        raise RuntimeFault(f"worker {endpoint} speaks RPC protocol {major}.{minor}.{patch}, this runtime {text}", hint)
    return major, minor, patch
