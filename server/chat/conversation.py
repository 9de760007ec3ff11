"""Everything that a chat template is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat on its way to the template."""

    messages: Sequence[Mapping[str, Any]]
    """As `chat.messages.to_template` makes them."""
    add_generation_prompt: bool = True
    """Open the assistant's turn."""
    continue_final_message: bool = False
    """Leave the last message open instead, to be gone on with."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tools that the model may call."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_chars(self) -> int:
        """Characters of its messages' texts."""
        return sum(len(part["text"]) for message in self.messages for part in message.get("content", ()))

    def render(self, tokenizer: Tokenizer) -> str:
        """The text that the model goes on from. Raises RequestError, also with the template's own words."""
        return tokenizer.render_chat(
            self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
        )
