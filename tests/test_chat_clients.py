"""The packages ``openai`` and ``anthropic`` hold conversations with tools against ``serve``."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from chat_service import CONVERSATIONS, ChatService

pytestmark = pytest.mark.runtime

FIX = CONVERSATIONS["two steps"]
QUESTION = FIX["messages"][0]["content"]
READ, FILE, WRITE, WRITTEN, END = FIX["messages"][1:]
# This API has no temperature any more, the server has one.
GREEDY = {"temperature": 0}


def _arguments(message: dict[str, Any]) -> Any:
    return message["tool_calls"][0]["function"]["arguments"]


@pytest.fixture
def openai_client(chat: ChatService) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{chat.address}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def anthropic_client(chat: ChatService) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=chat.address, api_key="none", max_retries=0, timeout=120)


def test_openai_reads_and_writes_a_file(openai_client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    seen = []
    for result in (FILE["content"], WRITTEN["content"], None):
        answer = openai_client.chat.completions.create(
            model="tiny-chat", messages=history, tools=FIX["tools"], temperature=0, max_tokens=300
        )
        message = answer.choices[0].message
        history.append(message.model_dump(exclude_none=True))
        seen.append(message)
        for call in message.tool_calls or ():
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert [message.reasoning_content for message in seen] == [m["reasoning_content"] for m in (READ, WRITE, END)]  # type: ignore[attr-defined]
    calls = [json.loads(message.tool_calls[0].function.arguments) for message in seen[:2]]  # type: ignore[index,union-attr]
    assert calls == [_arguments(READ), _arguments(WRITE)]
    assert seen[2].content == END["content"]


def test_openai_streams(openai_client: openai.OpenAI) -> None:
    stream = openai_client.chat.completions.create(
        model="tiny-chat", messages=[{"role": "user", "content": "Count to twenty."}], temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == CONVERSATIONS["counting"]["messages"][1]["content"]
    assert sum(bool(piece) for piece in pieces) > 10


def test_openai_has_its_newer_interface_too(openai_client: openai.OpenAI) -> None:
    answer = openai_client.responses.create(model="tiny-chat", input="Hello", temperature=0)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text == CONVERSATIONS["greeting"]["messages"][-1]["content"]


def test_openai_hears_of_a_bad_request(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        openai_client.chat.completions.create(model="tiny-chat", messages=[{"role": "user"}])  # type: ignore[typeddict-item]


def test_anthropic_reads_and_writes_a_file(anthropic_client: anthropic.Anthropic) -> None:
    tools: list[Any] = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"]["description"],
            "input_schema": tool["function"]["parameters"],
        }
        for tool in FIX["tools"]
    ]
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    thoughts, inputs, texts, reasons = [], [], [], []
    for result in (FILE["content"], WRITTEN["content"], None):
        with anthropic_client.messages.stream(
            model="tiny-chat", max_tokens=300, tools=tools, messages=history, extra_body=GREEDY
        ) as stream:
            message = stream.get_final_message()
        history.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        thoughts += [block.thinking for block in message.content if block.type == "thinking"]
        texts += [block.text for block in message.content if block.type == "text"]
        used = [block for block in message.content if block.type == "tool_use"]
        inputs += [block.input for block in used]
        reasons.append(message.stop_reason)
        if used:
            answers = [{"type": "tool_result", "tool_use_id": block.id, "content": result} for block in used]
            history.append({"role": "user", "content": answers})
    assert thoughts == [message["reasoning_content"] for message in (READ, WRITE, END)]
    assert inputs == [_arguments(READ), _arguments(WRITE)]
    assert [text for text in texts if text] == [READ["content"], END["content"]]
    assert reasons == ["tool_use", "tool_use", "end_turn"]


def test_anthropic_without_streaming_and_its_count_of_tokens(anthropic_client: anthropic.Anthropic) -> None:
    question: list[Any] = [{"role": "user", "content": "Hello"}]
    message = anthropic_client.messages.create(
        model="tiny-chat", max_tokens=100, system="You are a pirate.", messages=question, extra_body=GREEDY
    )
    (text,) = [block.text for block in message.content if block.type == "text"]
    assert text == CONVERSATIONS["system prompt"]["messages"][-1]["content"]
    counted = anthropic_client.messages.count_tokens(model="tiny-chat", system="You are a pirate.", messages=question)
    cached = message.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == message.usage.input_tokens + cached
