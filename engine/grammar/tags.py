"""Tags such as `</think>` and `<tool_call>` that are tokens: text for grammars, as they are for everybody else.

llguidance takes whatever was added to a tokenizer and is written `<...>` for a special token, which no text matches. So
a model could end its thoughts by spelling `</think>` out only, not by the token that it was trained to write. Tokens
that are marked special stay special.
"""

from __future__ import annotations

import json
import re
from typing import Any

_TAG = re.compile("<[!-~]*>")
"""Written in characters that stand for themselves in the vocabulary of any tokenizer."""


def with_tags_as_text(tokenizer_json: str) -> str:
    """The tokenizer (a tokenizer.json) with its added tags, but the special ones, moved into its plain vocabulary.

    Good for asking which token has which text, no longer for tokenizing. Vocabularies that are not tables (those of
    Unigram models) stay as they are.
    """
    tokenizer: dict[str, Any] = json.loads(tokenizer_json)
    vocabulary = tokenizer["model"]["vocab"]
    if not isinstance(vocabulary, dict):
        return tokenizer_json
    added = tokenizer["added_tokens"]
    tags = [token for token in added if not token["special"] and _TAG.fullmatch(token["content"])]
    vocabulary.update({token["content"]: token["id"] for token in tags})
    tokenizer["added_tokens"] = [token for token in added if token not in tags]
    return json.dumps(tokenizer)
