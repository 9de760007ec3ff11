"""Calls of tools in the model's own writing, a file for each way of writing them. `FORMATS` has them by name."""

from __future__ import annotations

from collections.abc import Mapping

from server.chat.tools.format import Format
from server.chat.tools.hermes import Hermes
from server.chat.tools.llama3_json import Llama3Json
from server.chat.tools.mistral import Mistral
from server.chat.tools.pythonic import Pythonic

FORMATS: Mapping[str, Format] = {each.name: each for each in (Hermes(), Llama3Json(), Mistral(), Pythonic())}


def detect(chat_template: str) -> Format | None:
    """The format that a chat template shows the model; None if it shows none that is known here."""
    # In this order: Llama 4's template has the marks of Llama 3's too.
    if "<tool_call>" in chat_template:
        has_own_syntax = "<function=" in chat_template or "<arg_key>" in chat_template  # Qwen3-Coder, GLM
        return None if has_own_syntax else FORMATS["hermes"]
    if "[TOOL_CALLS]" in chat_template:
        return FORMATS["mistral"]
    if "[func_name1(" in chat_template:
        return FORMATS["pythonic"]
    if "ipython" in chat_template and '"parameters"' in chat_template:
        return FORMATS["llama3_json"]
    return None
