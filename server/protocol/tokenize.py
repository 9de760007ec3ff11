"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from pydantic import Field

from server import limits
from server.protocol.base import ApiModel, Integers, JsonObject
from server.protocol.chat import Messages, Tools


class TokenizeRequest(ApiModel):
    """A text, or a conversation, whose tokens are wanted. What a prompt becomes, without generating."""

    model: str | None = None
    """The served model's name. May be left out."""
    prompt: str | None = None
    """A text. Either this or `messages`."""
    messages: Messages | None = None
    """A conversation, which the model's chat template makes a text of."""
    add_special_tokens: bool | None = None
    """Begin with the model's begin-of-text token. On by default, but off for messages: templates have it."""
    add_generation_prompt: bool | None = None
    """With `messages`: open the assistant's turn. On by default, unless `continue_final_message` is."""
    continue_final_message: bool | None = None
    """With `messages`: leave the last one open instead."""
    tools: Tools | None = None
    """With `messages`: the tools that the model may call."""
    chat_template_kwargs: JsonObject | None = None
    """With `messages`: switches of the model's chat template."""


class TokenizeAnswer(ApiModel):
    """A text's tokens."""

    tokens: list[int]
    count: int
    max_model_len: int
    """The context length: prompt and output together."""


class DetokenizeRequest(ApiModel):
    """Tokens whose text is wanted."""

    model: str | None = None
    """The served model's name. May be left out."""
    tokens: Integers = Field(max_length=limits.MAX_DETOKENIZED)
    """Token ids."""


class DetokenizeAnswer(ApiModel):
    """The tokens' text, with its special tokens."""

    prompt: str
