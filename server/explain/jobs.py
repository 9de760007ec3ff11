"""The prompts that are run both ways, each with the length of its output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer

LIGHTHOUSE = (
    "You are the keeper of a lighthouse on a small island. Every evening you climb the stairs and write in your log."
)

DEFAULT_PROMPTS: tuple[tuple[str, int], ...] = (
    ("The capital of France is", 6),
    ("Three reasons to learn to play the piano:\n1.", 50),
    (f"{LIGHTHOUSE} Tonight a storm is coming, and you write:", 300),
    ("Once upon a time, in a small village by the sea, there lived an old clockmaker who", 30),
    ("Water boils at one hundred degrees Celsius, and", 180),
    (f"{LIGHTHOUSE} Tonight the sea is calm, and", 45),
)
"""Text and length of the output. The last begins like the third, so that the prefix cache has something to find."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt. Its place in the list of jobs is its request id."""

    label: str
    """One capital letter."""
    prompt: str
    token_ids: tuple[int, ...]
    num_output_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that go through the model: the last one of the output does not."""
        return len(self.token_ids) + self.num_output_tokens - 1


def make_jobs(prompts: Sequence[tuple[str, int]], tokenizer: Tokenizer) -> list[Job]:
    """Jobs A, B, C ... Raises ConfigError for no prompts, more than there are letters, or an empty one."""
    if not 1 <= len(prompts) <= len(ascii_uppercase):
        raise ConfigError(f"{len(prompts)} prompts to explain with; it takes 1 to {len(ascii_uppercase)}")
    jobs = []
    for label, (prompt, num_output_tokens) in zip(ascii_uppercase, prompts, strict=False):
        token_ids = tuple(tokenizer.encode(prompt))
        if not token_ids:
            raise ConfigError(f"prompt {label} has no tokens")
        jobs.append(Job(label, prompt, token_ids, num_output_tokens))
    return jobs


def read_prompts(path: Path) -> list[tuple[str, int]]:
    """Prompts from a JSON Lines file: `{"prompt": "Hello", "max_tokens": 20}` a line. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _parse(line: str, where: str) -> tuple[str, int]:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    match entry:
        case {"prompt": str(prompt), "max_tokens": int(max_tokens)} if (
            max_tokens >= 1 and max_tokens is not True and len(entry) == 2
        ):
            return prompt, max_tokens
    raise ConfigError(f'{where}: expected {{"prompt": "some text", "max_tokens": 20}}, got {line.strip()[:60]}')
