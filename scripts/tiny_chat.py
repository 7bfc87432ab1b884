"""Conversations of the tiny chat model as tokens: rendered by the project's template, answers marked as targets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import tiktoken
from jinja2.sandbox import ImmutableSandboxedEnvironment

from convert.model_card import own_chat_template
from kimi_gguf.reference import tokenizer

CHAT = Path(__file__).resolve().parent.parent / "kimi_gguf" / "data" / "tiny-chat"
MARKERS = {"<|end_of_msg|>": 2, "<|open|>": 3, "<|close|>": 4, "<|sep|>": 5}
"""Distance of each marker from the first special slot."""

_MARKER = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")
Message = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One conversation as tokens; ``targets`` are the positions of tokens that an assistant writes."""

    ids: list[int]
    targets: list[int]


def load_conversations(folder: Path = CHAT) -> list[dict[str, Any]]:
    """name, messages, and where they differ from the template's defaults: tools, effort, thinking."""
    conversations: list[dict[str, Any]] = json.loads((folder / "conversations.json").read_text(encoding="utf-8"))
    return conversations


def compile_template() -> jinja2.Template:
    """The project's chat template, with the settings of Hugging Face's library."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, ensure_ascii=False: json.dumps(value, ensure_ascii=ensure_ascii)
    return environment.from_string(own_chat_template())


def render(template: jinja2.Template, conversation: dict[str, Any], messages: list[Message], *, open_end: bool) -> str:
    """``messages`` with the parameters of ``conversation``; ``open_end`` when an answer is to follow."""
    return template.render(
        messages=messages,
        tools=conversation.get("tools"),
        thinking=conversation.get("thinking", True),
        thinking_effort=conversation.get("effort", "max"),
        add_generation_prompt=open_end,
    )


def train_vocabulary(texts: Iterable[str], size: int) -> bytes:
    """``tiktoken.model`` with ``size`` ranks of what stands between the markers of ``texts``."""
    plain = "\n".join(_MARKER.sub("\n", text) for text in texts)
    return tokenizer.dump_ranks(tokenizer.train_ranks(plain, size))


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Tokens of a rendered text: markers by their ids, the rest as ordinary text."""
    ids: list[int] = []
    for piece in _MARKER.split(text):
        ids += [encoding.n_vocab + MARKERS[piece]] if piece in MARKERS else encoding.encode_ordinary(piece)
    return ids


def samples(template: jinja2.Template, encoding: tiktoken.Encoding, conversation: dict[str, Any]) -> list[Sample]:
    """What is learned of one conversation: all of its answers, and for clients that do not send reasoning back, each
    later answer after others without their reasoning.
    """
    messages = conversation["messages"]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    found = [_sample(template, encoding, conversation, messages, answers)]
    for last in answers[1:]:
        bare = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages[:last]]
        found.append(_sample(template, encoding, conversation, [*bare, messages[last]], [last]))
    return found


def _sample(
    template: jinja2.Template,
    encoding: tiktoken.Encoding,
    conversation: dict[str, Any],
    messages: list[Message],
    answers: list[int],
) -> Sample:
    text = render(template, conversation, messages, open_end=False)
    targets: list[int] = []
    for i in answers:
        prompt = render(template, conversation, messages[:i], open_end=True)
        whole = render(template, conversation, messages[: i + 1], open_end=False)
        if not (whole.startswith(prompt) and text.startswith(whole)):
            raise SystemExit(f"{conversation['name']}: a turn is not rendered as it is prompted")
        targets += range(len(encode(encoding, prompt)), len(encode(encoding, whole)))
    return Sample(encode(encoding, text), targets)
