"""A bound on what a chat template writes.

A template that repeats a message for each message makes 10 GB of 10 MB. Jinja joins what a template has written at its
end, all at once; here it counts first. (How long a template may work is for those who call it: `server.interruptible`.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

logger = logging.getLogger(__name__)

MAX_RENDERED_LEN = 64 * 1024 * 1024
"""Most characters, of the whole text and of each block within it."""


@cache
def bound_output(template: str) -> None:
    """Let `template`, and no other, write no more than MAX_RENDERED_LEN. What is too long raises jinja's TemplateError.

    It is compiled for that, by transformers, which keeps it: `apply_chat_template` then uses the same one.
    """
    from transformers.utils import chat_template_utils

    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compile_template is None:
        logger.warning("this version of transformers compiles chat templates in another way: their output is unbounded")
        return
    compile_template(template).environment.concat = _concat


def _concat(pieces: Iterable[str]) -> str:
    """`"".join`, as `Environment.concat` has it, with a bound."""
    from jinja2 import TemplateError

    kept = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        if length > MAX_RENDERED_LEN:
            raise TemplateError(f"the chat template makes more than {MAX_RENDERED_LEN} characters of these messages")
    return "".join(kept)
