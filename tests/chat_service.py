"""The tiny chat model behind ``serve``: what tests of the server and of its clients share."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_support import ROOT, free_ports, running, until

FOLDER = ROOT / "kimi_gguf" / "data" / "tiny-chat"
Message = dict[str, Any]
Conversation = dict[str, Any]

CONVERSATIONS: dict[str, Conversation] = {
    conversation["name"]: conversation
    for conversation in json.loads((FOLDER / "conversations.json").read_text(encoding="utf-8"))
}
GREEDY = {"temperature": 0, "max_tokens": 300}


def as_sent(message: Message) -> Message:
    """A message as a client sends it: arguments of calls are a string of JSON."""
    if "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def request_of(conversation: Conversation, messages: list[Message]) -> dict[str, Any]:
    """The request that continues ``messages``, with the conversation's tools and parameters."""
    body: dict[str, Any] = {"messages": [as_sent(message) for message in messages], **GREEDY}
    if "tools" in conversation:
        body["tools"] = conversation["tools"]
    if "effort" in conversation:
        body["reasoning_effort"] = conversation["effort"]
    if not conversation.get("thinking", True):
        body["reasoning_effort"] = "none"
    return body


@dataclass(frozen=True)
class ChatService:
    """A running service."""

    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of an answer; GET without a body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """An answer that must be a good one."""
        status, data = self.call(path, body)
        assert status == 200, data
        return json.loads(data)

    def chat(self, body: dict[str, Any]) -> Any:
        """The only choice of a chat completion."""
        (choice,) = self.ask("/v1/chat/completions", body)["choices"]
        return choice

    def stream(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Choices of the events of a streamed chat completion."""
        status, data = self.call("/v1/chat/completions", body | {"stream": True})
        assert status == 200, data
        events = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return [choice for event in events[:-1] for choice in json.loads(event)["choices"]]


@contextmanager
def chat_service(folder: Path) -> Iterator[ChatService]:
    """``serve`` for two conversations at once, ready."""
    model = folder / "tiny-chat.gguf"
    convert = [sys.executable, "-m", "kimi_gguf", "convert", str(FOLDER), "--quant", "MXFP4_MOE"]
    subprocess.run([*convert, "--outfile", str(model), "--quiet"], cwd=ROOT, check=True, timeout=120)
    (port,) = free_ports(1)
    arguments = ["serve", str(model), "--port", str(port), "--context", "1024", "--parallel", "2", "--threads", "1"]
    with running([*arguments, "--log", str(folder / "serve.log")], folder / "serve.txt") as head:
        until("the service is ready", lambda: "ready after" in head.text or head.process.poll() is not None, 120)
        assert head.process.poll() is None, head.text
        yield ChatService(port)
