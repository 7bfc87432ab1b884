"""The chat template of ``convert`` renders what another encoder of Kimi K3's format renders, token for token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import jinja2
import pytest
import tiktoken
from chat_samples import HELLO, LITERAL, SAMPLES, Message, Sample, assistant, call, tool, user
from template_oracle import compile_template, load_encoder

from convert.model_card import own_chat_template
from kimi_gguf.reference.tokenizer import dump_ranks, encoding, train_ranks

MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))


@pytest.fixture(scope="module")
def template() -> jinja2.Template:
    return compile_template(own_chat_template())


@pytest.fixture(scope="session")
def encoder() -> ModuleType:
    return load_encoder()


@pytest.fixture(scope="module")
def tokenizer() -> tiktoken.Encoding:
    """A vocabulary with merges that cross words, quotes and tags."""
    text = own_chat_template() + json.dumps([sample for sample, _ in SAMPLES.values()], ensure_ascii=False)
    return encoding(dump_ranks(train_ranks(text, 700)))


def render(template: jinja2.Template, messages: list[Message], **parameters: Any) -> str:
    return template.render(messages=messages, **({"add_generation_prompt": True} | parameters))


def segments(encoder: ModuleType, sample: Sample) -> list[Any]:
    messages, parameters = sample
    return list(encoder.build_chat_segments(messages, **({"thinking_effort": "max"} | parameters)))


def ids(tokenizer: tiktoken.Encoding, pieces: Iterable[tuple[str, bool]]) -> list[int | str]:
    """Tokens of texts; of a piece that may hold markers, each marker is one token, written as itself."""
    tokens: list[int | str] = []
    for text, special in pieces:
        if special:
            assert text in MARKERS
            tokens.append(text)
        else:
            tokens += tokenizer.encode_ordinary(text)
    return tokens


def cut(text: str) -> list[tuple[str, bool]]:
    """A rendered conversation as a server sees it: markers, and the text between them."""
    pieces: list[tuple[str, bool]] = []
    position = 0
    for match in _MARKER.finditer(text):
        pieces += [(text[position : match.start()], False), (match[0], True)]
        position = match.end()
    return [*pieces, (text[position:], False)]


@pytest.mark.parametrize("name", SAMPLES)
def test_tokens_are_those_of_the_other_encoder(
    name: str, template: jinja2.Template, encoder: ModuleType, tokenizer: tiktoken.Encoding
) -> None:
    messages, parameters = SAMPLES[name]
    theirs = segments(encoder, SAMPLES[name])
    ours = render(template, messages, **parameters)
    assert ours == "".join(segment.text for segment in theirs)
    expected = ids(tokenizer, ((segment.text, segment.allow_special) for segment in theirs))
    assert ids(tokenizer, cut(ours)) == expected


@pytest.mark.parametrize("name", LITERAL)
def test_text_that_looks_like_markup_is_rendered_alike(
    name: str, template: jinja2.Template, encoder: ModuleType
) -> None:
    messages, parameters = LITERAL[name]
    expected = "".join(segment.text for segment in segments(encoder, LITERAL[name]))
    assert render(template, messages, **parameters) == expected


@pytest.mark.parametrize(("name", "level"), [("minimal", "low"), ("low", "low"), ("medium", "high"), ("high", "high")])
def test_the_openai_names_of_effort_are_understood(name: str, level: str, template: jinja2.Template) -> None:
    assert render(template, HELLO, reasoning_effort=name) == render(template, HELLO, thinking_effort=level)


def test_effort_is_max_and_thinking_is_on_unless_told_otherwise(template: jinja2.Template) -> None:
    plain = render(template, HELLO)
    assert plain == render(template, HELLO, thinking=True, thinking_effort="max")
    assert plain.endswith("<|open|>think<|sep|>")


def test_the_name_that_llama_cpp_has_for_thinking_is_understood(template: jinja2.Template) -> None:
    assert render(template, HELLO, enable_thinking=False) == render(template, HELLO, thinking=False)
    assert render(template, HELLO, enable_thinking=True) == render(template, HELLO)
    assert render(template, HELLO, enable_thinking=True, thinking=False) == render(template, HELLO, thinking=False)


REFUSED: dict[str, tuple[list[Message], dict[str, Any], str]] = {
    "an unknown effort": (HELLO, {"thinking_effort": "huge"}, "huge"),
    "an unknown role": ([{"role": "boss", "content": "x"}], {}, "boss"),
    "a result of no call": ([user("x"), tool("y")], {}, "tool result"),
    "a call without a name": ([assistant("", tool_calls=[call("", {})])], {}, "name"),
    "arguments that are a list": ([assistant("", tool_calls=[call("f", [1])])], {}, "arguments"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rendered_is_refused_in_words(name: str, template: jinja2.Template) -> None:
    messages, parameters, word = REFUSED[name]
    with pytest.raises(jinja2.TemplateError, match=word):
        render(template, messages, **parameters)


def test_there_are_conversations_enough() -> None:
    assert len(SAMPLES) >= 30
