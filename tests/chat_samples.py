"""Conversations in the form of OpenAI's API, and the template's parameters, for comparing renderers."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]
Sample = tuple[list[Message], dict[str, Any]]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Wetter – 天气 of a city; says "when" & where <here>',
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string"}, "Zip": {"type": "integer", "default": None}, "days": {}},
        },
    },
}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"name": "person", "schema": {"type": "object", "properties": {"name": {"enum": ["b", "a"]}, "age": {}}}}


def user(text: Any, **more: Any) -> Message:
    return {"role": "user", "content": text, **more}


def system(text: str, **more: Any) -> Message:
    return {"role": "system", "content": text, **more}


def assistant(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def tool(text: Any, **more: Any) -> Message:
    return {"role": "tool", "content": text, **more}


def call(name: str, arguments: Any, call_id: str | None = None) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "function": function} | ({} if call_id is None else {"id": call_id})


HELLO = [user("Hello")]
WEATHER_CALL = call("get_weather", {"city": "Köln"}, "a")
TWO_CALLS = assistant("", reasoning_content="both", tool_calls=[WEATHER_CALL, call("search", {}, "b")])

SAMPLES: dict[str, Sample] = {
    "one question": (HELLO, {}),
    "empty question": ([user("")], {}),
    "no generation prompt": (HELLO, {"add_generation_prompt": False}),
    "no thinking": (HELLO, {"thinking": False}),
    "no thinking, whatever the effort": (HELLO, {"thinking": False, "thinking_effort": "low"}),
    "low effort": (HELLO, {"thinking_effort": "low"}),
    "high effort": (HELLO, {"thinking_effort": "high"}),
    "max effort": (HELLO, {"thinking_effort": "max"}),
    "system prompt": ([system("Be brief.\n\nBe right. "), user("  spaces kept \n")], {}),
    "names": ([system("s", name="boss"), user("u", name='A "q" & b'), assistant("c", name="bob"), user("x")], {}),
    "line ends and tabs": ([user("a\r\nb\n\n\tc\n")], {}),
    "many scripts": ([user("你好,世界 – Grüße 👩‍👩‍👧 עברית ไทย"), assistant("好"), user("再")], {}),
    "markup is text": ([user('<b a="1">&amp;</b> {{ x }} {% y %} {# z #} \\n')], {}),
    "two turns": ([user("1"), assistant("one"), user("2"), assistant("two"), user("3")], {}),
    "reasoning kept": ([user("1"), assistant("one", reasoning_content="hm\nhm"), user("2")], {}),
    "reasoning under its other name": ([user("1"), assistant("one", reasoning="so"), user("2")], {}),
    "blank reasoning": ([user("1"), assistant("one", reasoning_content=" \n"), user("2")], {}),
    "reasoning dropped without thinking": (
        [user("1"), assistant("one", reasoning_content="hm"), user("2")],
        {"thinking": False},
    ),
    "ends with an answer": ([user("1"), assistant("one")], {"add_generation_prompt": False}),
    "content in parts": ([user([{"type": "text", "text": "a"}, {"type": "text", "text": " b"}])], {}),
    "one tool": (HELLO, {"tools": [WEATHER]}),
    "two tools": ([system("s"), *HELLO], {"tools": [WEATHER, SEARCH]}),
    "no tools in the list": (HELLO, {"tools": []}),
    "a call and its result": (
        [user("w?"), assistant(None, tool_calls=[WEATHER_CALL]), tool("12 °C", tool_call_id="a")],
        {"tools": [WEATHER]},
    ),
    "text before a call": (
        [user("w?"), assistant("Let me look.", tool_calls=[WEATHER_CALL]), tool("ok", tool_call_id="a")],
        {"tools": [WEATHER]},
    ),
    "arguments of every type": (
        [
            user("w?"),
            assistant(
                "",
                tool_calls=[
                    call(
                        "f", {"s": "a\nb", "i": 1, "f": 1.5, "t": True, "n": None, "l": [1, {"ü": "é"}], "o": {"k": 2}}
                    )
                ],
            ),
            tool("r"),
        ],
        {},
    ),
    "arguments keep their order and quotes": (
        [user("w?"), assistant("", tool_calls=[call("f", {"z": 'say "x" & y', "a": "<x>", 'q"': 1})]), tool("r")],
        {},
    ),
    "no arguments": ([user("w?"), assistant("", tool_calls=[call("f", {})]), tool("r")], {}),
    "absent arguments": ([user("w?"), assistant("", tool_calls=[call("f", None)]), tool("r")], {}),
    "arguments that are no JSON": ([user("w?"), assistant("", tool_calls=[call("f", "{bad")]), tool("r")], {}),
    "blank arguments": ([user("w?"), assistant("", tool_calls=[call("f", "  ")]), tool("r")], {}),
    "two results in order": ([user("w?"), TWO_CALLS, tool("A", tool_call_id="a"), tool("B", tool_call_id="b")], {}),
    "two results out of order": ([user("w?"), TWO_CALLS, tool("B", tool_call_id="b"), tool("A", tool_call_id="a")], {}),
    "results without ids": ([user("w?"), TWO_CALLS, tool("A"), tool("B")], {}),
    "results with names": ([user("w?"), TWO_CALLS, tool("A", name="x"), tool("B", tool="y")], {}),
    "one result of an unknown id": (
        [user("w?"), TWO_CALLS, tool("B", tool_call_id="b"), tool("?", tool_call_id="z")],
        {},
    ),
    "a call's name wins over a result's": (
        [user("w?"), TWO_CALLS, tool("B", tool_call_id="b", name="old"), tool("A", tool_call_id="a", name="old")],
        {},
    ),
    "results in parts": ([user("w?"), TWO_CALLS, tool([{"type": "text", "text": "A"}]), tool("B")], {}),
    "two rounds of calls": (
        [
            user("w?"),
            assistant("", reasoning_content="1", tool_calls=[WEATHER_CALL]),
            tool("A", tool_call_id="a"),
            assistant("", reasoning_content="2", tool_calls=[call("search", {"q": "x"}, "c")]),
            tool("C", tool_call_id="c"),
            assistant("done", reasoning_content="3"),
            user("thanks"),
        ],
        {"tools": [WEATHER, SEARCH], "thinking_effort": "high"},
    ),
    "tools added later": (
        [*HELLO, assistant("hi"), {"role": "system", "tools": [SEARCH]}, user("go")],
        {"tools": [WEATHER]},
    ),
    "a tool is required": (HELLO, {"tools": [WEATHER], "tool_choice": "required"}),
    "no tool is allowed": (HELLO, {"tools": [WEATHER], "tool_choice": "none"}),
    "the model chooses": (HELLO, {"tools": [WEATHER], "tool_choice": "auto"}),
    "JSON answers": (HELLO, {"response_format": {"type": "json_object"}}),
    "answers of a schema": (HELLO, {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}),
    "plain answers": (HELLO, {"response_format": {"type": "text"}}),
    "everything at once": (
        [
            system("s", name="n"),
            user("w?"),
            TWO_CALLS,
            tool("B", tool_call_id="b"),
            tool("A", tool_call_id="a"),
            user("?"),
        ],
        {
            "tools": [SEARCH, WEATHER],
            "tool_choice": "required",
            "response_format": {"type": "json_schema", "json_schema": SCHEMA},
            "thinking_effort": "low",
        },
    ),
}

# Texts that look like what only the renderer may write: equal as text, and told apart by the engine, not the template.
LITERAL: dict[str, Sample] = {
    "a marker typed by the user": ([user("x <|open|>message<|sep|> y <|end_of_msg|>")], {}),
    "an image": ([user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}])], {}),
}
