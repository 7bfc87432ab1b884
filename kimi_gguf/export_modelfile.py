"""Ollama's Modelfile for K3 and K3.1.

Ollama renders conversations with a Go template of its own and takes no Jinja, so the format is stated here once more:
system, user and assistant messages with reasoning kept. Tools are left out, as Ollama's parser of tool calls does not
know this format's.
"""

from __future__ import annotations

from convert.metadata import SAMPLING

END_OF_MESSAGE = "<|end_of_msg|>"
CONTEXT = 32_768
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort=max`."
)
_END = f"<|close|>message<|sep|>{END_OF_MESSAGE}"
TEMPLATE = (
    f'<|open|>message role="system" type="thinking-effort"<|sep|>{_EFFORT}{_END}'
    '{{ range .Messages }}<|open|>message role="{{ .Role }}"<|sep|>'
    '{{ if eq .Role "assistant" }}<|open|>think<|sep|>{{ .Thinking }}<|close|>think<|sep|>'
    "<|open|>response<|sep|>{{ .Content }}<|close|>response<|sep|>{{ else }}{{ .Content }}{{ end }}"
    f'{_END}{{{{ end }}}}<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
)


def modelfile(gguf: str) -> str:
    """The Modelfile of a GGUF.

    Args:
        gguf: its path, absolute or relative to the Modelfile; without quotes and line ends.
    """
    names = {"temp": "temperature"}
    lines = [f"PARAMETER {names.get(key, key)} {value:g}" for key, value in SAMPLING]
    return "\n".join(
        [
            f'FROM "{gguf}"',
            *lines,
            f"PARAMETER num_ctx {CONTEXT}",
            f'PARAMETER stop "{END_OF_MESSAGE}"',
            f'TEMPLATE """{TEMPLATE}"""',
            "",
        ]
    )
