"""llama.cpp's own template engine renders the embedded template as Jinja does, and takes the sampling from the file."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from chat_samples import SAMPLES, SEARCH, WEATHER
from jinja2.sandbox import ImmutableSandboxedEnvironment

from convert.model_card import own_chat_template
from kimi_gguf import convert
from kimi_gguf.cluster.runtime import Runtime
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint

# What llama-server does to a request before the template sees it: it drops keys of messages that OpenAI's API does not
# have, wants arguments that are JSON, gives every tool a description, and keeps tool_choice and response_format.
NORMALISED = frozenset(
    {
        "reasoning under its other name",
        "two tools",
        "two rounds of calls",
        "results with names",
        "arguments that are no JSON",
        "blank arguments",
        "tools added later",
        "no generation prompt",
        "ends with an answer",
        "a tool is required",
        "no tool is allowed",
        "JSON answers",
        "answers of a schema",
        "plain answers",
        "everything at once",
    }
)
SERVED = [name for name in SAMPLES if name not in NORMALISED]


@pytest.fixture(scope="module")
def server(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    model = folder / "tiny.gguf"
    convert(make_checkpoint(folder / "checkpoint", TinyShape(), seed=5), quant="Q8_0", outfile=model)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(runtime.program("llama-server")), "-m", str(model), "-c", "256", "-t", "1", "--jinja"]
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=runtime.environment())
    address = f"http://127.0.0.1:{port}"
    try:
        wait(address, child)
        yield address
    finally:
        child.terminate()
        child.wait(timeout=30)


def wait(address: str, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and child.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise AssertionError("llama-server did not become healthy")


def ask(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.runtime
@pytest.mark.parametrize("name", SERVED)
def test_the_servers_prompt_is_the_templates(name: str, server: str) -> None:
    messages, parameters = SAMPLES[name]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, ensure_ascii=False: json.dumps(value, ensure_ascii=ensure_ascii)
    expected = environment.from_string(own_chat_template()).render(
        messages=messages, **({"add_generation_prompt": True} | parameters)
    )
    body: dict[str, Any] = {"messages": messages}
    for key, value in parameters.items():
        if key in ("tools", "tool_choice"):
            body[key] = value
        else:
            body.setdefault("chat_template_kwargs", {})[key] = value
    assert ask(server, "/apply-template", body)["prompt"] == expected


@pytest.mark.runtime
def test_a_tool_without_description_gets_an_empty_one(server: str) -> None:
    prompt = ask(server, "/apply-template", {"messages": SAMPLES["two tools"][0], "tools": [WEATHER, SEARCH]})["prompt"]
    assert '{"description":"","name":"search"' in prompt


@pytest.mark.runtime
def test_sampling_is_that_of_the_file(server: str) -> None:
    found = ask(server, "/props")["default_generation_settings"]["params"]
    assert found["temperature"] == 1 and found["top_p"] == pytest.approx(0.95)
    assert found["top_k"] == 0 and found["min_p"] == 0


def test_most_conversations_are_compared() -> None:
    assert set(SAMPLES) >= NORMALISED and len(SERVED) >= 30
