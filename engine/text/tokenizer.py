"""The tokenizer: text to ids and back, chat messages to text. A thin layer over transformers and tokenizers.

*Threads.* One Tokenizer serves all threads at once; no copy is needed. Encoding and decoding go to the Rust tokenizer
directly, which nothing changes after loading (transformers' own `__call__` sets its truncation and padding anew each
time, which fails while another thread encodes). Encoding lets other threads run meanwhile, so that a long prompt, given
to a worker thread, holds up nobody. Chat templates are Python and hold the interpreter as any Python does.

*TOKENIZERS_PARALLELISM* makes no difference here: it is about batches, and text is encoded one at a time.

Only what the directory holds is read: no network, no code of the model's own.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import EngineError, ModelError, RequestError, is_fault
from engine.text.pieces import Pieces
from engine.text.template import bound_output

Message = Mapping[str, Any]
"""A chat message: `role`, `content` (a string, a list of text parts, or None), and what else the template knows."""


class Tokenizer:
    """Text to ids and back, chat messages to text. Safe to use from several threads at once."""

    def __init__(self, hf_tokenizer: Any, *, eos_token_ids: frozenset[int] = frozenset()) -> None:
        """`hf_tokenizer`: a fast tokenizer of transformers. `eos_token_ids`: end-of-text tokens beside its own.

        Raises ModelError for a tokenizer that is written in Python.
        """
        if not getattr(hf_tokenizer, "is_fast", False):
            raise ModelError(
                f"the tokenizer is a slow one, written in Python ({type(hf_tokenizer).__name__})",
                setting="model",
                hint="serve a model that has a tokenizer.json",
            )
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()  # some tokenizer.json ask for one of these
        self._backend.no_padding()
        own_eos = hf_tokenizer.eos_token_id
        self.eos_token_ids = eos_token_ids | (frozenset() if own_eos is None else {own_eos})
        """Tokens that end a text or a turn."""
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        self.vocab_size: int = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """Ids are below this; added tokens count. (The model's own vocabulary may be padded beyond it.)"""
        self.special_token_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        """Tokens that `skip_special_tokens` leaves out."""
        self.pieces = Pieces.of(self._backend)
        """Each token's bytes, for `Detokenizer`; None if this tokenizer's tokens do not stand for bytes."""

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load the tokenizer of a model's directory, with the end-of-text tokens of its generation config.

        Raises ModelError if there is none that can be used.
        """
        from transformers import AutoTokenizer

        eos_token_ids = _generation_eos(directory)
        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever is wrong with the files, the model cannot be served
            raise ModelError(f"the tokenizer in {directory} cannot be loaded: {error}", setting="model") from error
        return cls(hf_tokenizer, eos_token_ids=eos_token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids. Give the text of a chat without special tokens: its template has written them.

        Raises RequestError for text that is not Unicode (lone surrogates).
        """
        _check_unicode(text, param="prompt")
        # A batch of one, since `encode` keeps the interpreter to itself while it works (tokenizers 0.23), and works
        # out offsets that nobody asks for.
        with _no_panics():
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text, spaces and all (no `clean_up_tokenization_spaces`). Ids past the vocabulary have no text."""
        with _no_panics():
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def to_json(self) -> str:
        """The Rust tokenizer with all that was set on it, as a tokenizer.json has it. Some tenths of a second."""
        text: str = self._backend.to_str()
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The text of one token in UTF-8, or a part of a character if that is what it is.

        Where tokens do not stand for bytes (`pieces` is None) it is what the token is alone, not among others.
        """
        if self.pieces is not None:
            return self.pieces[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return bool(self._hf.chat_template)

    @property
    def chat_template(self) -> str:
        """The template's source, or several templates' one after another; "" if there is none."""
        template = self._hf.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the text that the model was trained on: encode it with add_special_tokens=False.

        `content` may be a list of text parts, which are joined by newlines (as vLLM and llama.cpp do), or None, which
        is an empty text. `add_generation_prompt` opens the assistant's turn; `continue_final_message` leaves the last
        message open instead. `template_kwargs` are given to the template.

        Raises RequestError naming the field: for parts that are not text, messages that the template refuses (with its
        own words), and models without a template.
        """
        if not self.has_chat_template:
            raise RequestError(
                "This model has no chat template, so it does not know roles and turns: use /v1/completions, "
                "or serve its instruct variant",
                param="messages",
            )
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: the first leaves the last "
                "message open, the second opens a new one",
                param="continue_final_message",
            )
        extra = dict(template_kwargs or {})
        if reserved := sorted(extra.keys() & _reserved_names()):
            raise RequestError(f"{', '.join(reserved)} cannot be set for the template", param="chat_template_kwargs")
        plain = [{**message, "content": _flatten(message.get("content"))} for message in messages]
        text = self._render(
            plain,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **extra,
        )
        _check_unicode(text, param="messages")
        return text

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        from jinja2 import TemplateError

        try:
            bound_output(self._hf.get_chat_template(tools=options["tools"]))  # there may be several
            text: str = self._hf.apply_chat_template(messages, tokenize=False, **options)
        except TemplateError as error:  # the template's raise_exception() too
            raise RequestError(str(error), param="messages", code="invalid_value") from error
        except Exception as error:  # a template is a program: these messages do not suit it, others may
            message = f"The model's chat template cannot render these messages: {error}"
            raise RequestError(message, param="messages", code="invalid_value") from error
        return text


@contextmanager
def _no_panics() -> Iterator[None]:
    """Turn a panic of the Rust tokenizer, which is no Exception, into an error of the one request."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        raise EngineError("the tokenizer failed on this text") from error


@cache
def _reserved_names() -> frozenset[str]:
    """What `apply_chat_template` takes as its own, and so can not be handed on to the template."""
    from transformers import PreTrainedTokenizerBase

    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(own) | {"messages", "conversations"}


def _flatten(content: Any) -> str:
    """A message's content as one string."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError("content must be a string or a list of parts", param="messages", code="invalid_value")
    return "\n".join([_text_of(part) for part in content])


def _text_of(part: Any) -> str:
    """The text of one content part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        said = f'"{kind}"' if isinstance(kind, str) else "one without a type"
        raise RequestError(
            f'a content part must be {{"type": "text", "text": "..."}}, got {said}',
            param="messages",
            code="invalid_value",
        )
    return text


def _check_unicode(text: str, *, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} holds a lone surrogate, which is not Unicode text", param=param, code="invalid_value"
        ) from error


def _generation_eos(directory: Path) -> frozenset[int]:
    """`eos_token_id` of generation_config.json, or of config.json if there is none; it may be a list.

    Chat models list their end-of-turn token there, beside the end-of-text token.
    """
    for name in ("generation_config.json", "config.json"):
        try:
            config = json.loads((directory / name).read_text("utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ModelError(f"{directory / name} cannot be read: {error}", setting="model") from error
        eos = config.get("eos_token_id") if isinstance(config, dict) else None
        return frozenset(eos if isinstance(eos, list) else () if eos is None else (eos,))
    return frozenset()
