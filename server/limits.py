"""Bounds on what one request may ask of the server. The engine has its own (`SamplingParams`, the context length)."""

from __future__ import annotations

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Longest body. A body is held and parsed whole, and parsing one of this size takes a tenth of a second."""

MAX_MARKS = 500_000
"""Most `[` in a body, most `{` and most `:`, those in its texts too. Each may stand for an array, an object or a
member, and to parse five million of those takes seconds. A text with as many is longer than any context."""

MAX_VALUES = 100_000
"""Most values in a body, counted through all its arrays and objects, but for token ids. Each is looked at by itself."""

MAX_MESSAGES = 10_000
"""Most messages in a conversation; of a response, items, those before it too. To check as many takes a tenth of a
second."""

MAX_TOOLS = 128
"""Most tools in one request, as OpenAI has it."""

MAX_DETOKENIZED = 1_000_000
"""Most token ids that are made text of at once."""

MAX_LABEL_LEN = 1024
"""Longest `user`, `safety_identifier` and `prompt_cache_key`, in characters. A response says them back, several times
in a stream."""

MAX_N = 128
"""Most choices for one prompt, as OpenAI has it."""

MAX_CHOICES = 1024
"""Most choices in one answer: prompts times `n`. Each is a request to the engine."""

MAX_CACHE_SALT_LEN = 1024
"""Longest `cache_salt`, in characters. It is hashed with every block of the prompt."""

MAX_TEMPLATE_VALUE_LEN = 1024
"""Longest text given to a chat template's switch, in characters."""

MAX_TEMPLATE_S = 2.0
"""Longest that a chat template may work on one conversation. Ten thousand messages take a tenth of it."""

MAX_TIMEOUT_MS = 24 * 60 * 60 * 1000
"""Longest `timeout_ms`: a day."""

MAX_REQUEST_ID_LEN = 128
"""Longest `X-Request-Id` that is taken over from a client, in characters."""

MAX_METADATA = 16
"""Most values in a response's `metadata`, as OpenAI has it."""

MAX_METADATA_NAME_LEN = 64
"""Longest name in `metadata`, in characters."""

MAX_METADATA_VALUE_LEN = 512
"""Longest value in `metadata`, in characters."""

MAX_BACKGROUND_RESPONSES = 256
"""Most responses that are made in the background at once. Unlike others, they are not bounded by connections."""

MAX_URL_BYTES = 8192
"""Longest URL, as nginx has it."""

MAX_HEADERS = 100
"""Most headers of a request, its trailers among them."""

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes in them together."""

MAX_PIPELINED = 16
"""Most requests that wait on one connection behind the one that is being answered."""
