"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hub_environment
import pytest
from chat_service import ChatService, chat_service
from hub_server import HubServer
from hypothesis import settings

from kimi_gguf.cluster import runtime as llama_runtime
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference.checkpoint_maker import make_sparse_release

# A shell's background jobs ignore SIGINT, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def sparse_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K3.1 Pro as released: 96 true headers (75 MB) and the index over files without data. Read only."""
    return make_sparse_release(tmp_path_factory.mktemp("release") / "Kimi-K3.1-Pro")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """An empty Hub at the address that this process's huggingface_hub knows."""
    with HubServer(tmp_path / "hub", hub_environment.PORT).start() as server:
        yield server


@pytest.fixture(scope="session")
def runtime(say: Callable[[str], None]) -> Runtime:
    """The patched llama.cpp with default options; built first when it is missing, which takes minutes."""

    class Note:
        def stage(self, name: str) -> None:
            say(f"llama.cpp runtime is missing: {name} ...")

        def step(self, done: int, total: int) -> None: ...

    return llama_runtime.build(select=False, progress=Note())


@pytest.fixture(scope="session")
def chat(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatService]:
    """The tiny chat model behind ``serve``."""
    with chat_service(tmp_path_factory.mktemp("chat")) as service:
        yield service


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Writes a line to the terminal, past pytest's capturing: figures that a run is to show."""
    reporter = pytestconfig.pluginmanager.getplugin("terminalreporter")
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def write(text: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(text)

    return write
