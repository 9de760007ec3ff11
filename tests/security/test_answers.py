"""What a model can be made to write, by whoever asks it: it is read, and must not break who reads it."""

from __future__ import annotations

import pytest

from server.chat.tools import FORMATS
from server.chat.tools.reader import CallReader

DEEP = 100_000
NESTED = "[" * DEEP + "]" * DEEP
JSON = '{"name": "f", "arguments": {"a": %s}}'
TEXTS = {
    "hermes": [
        f"<tool_call>{JSON % NESTED}</tool_call>",
        f"<tool_call>{JSON % '9'}</tool_call>" + "<tool_call>" * DEEP,
    ],
    "llama3_json": [JSON.replace('"name": "f", ', "").replace("}}", '}, "name": "f"}') % NESTED],
    "mistral": [f"[TOOL_CALLS][{JSON % NESTED}]"],
    "pythonic": [
        f"[f(a={text})]" for text in (NESTED, "-" * DEEP + "1", "1+" * DEEP + "1", "a." * DEEP + "a", "9" * DEEP)
    ],
}


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_are_nested_too_deep_are_content(name: str) -> None:
    for text in TEXTS[name]:
        reader = CallReader(FORMATS[name], {"f"})
        pieces = [reader.feed(text[i : i + 10_000]) for i in range(0, len(text), 10_000)]
        said = [*pieces, reader.flush()]
        arguments = "".join(call.arguments for each in said for call in each.calls)
        content = "".join(each.content for each in said)
        assert content or arguments.count("[") == DEEP  # as the model writes them, if they had begun before
        assert len(content) + len(arguments) <= len(text)
