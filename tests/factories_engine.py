"""FakeEngine: AsyncEngine's surface without an engine. Tests write what it says, chunk by chunk, and watch it end.

engine = FakeEngine(say("Hel", "lo"))                     two chunks, then finish_reason STOP
engine = FakeEngine(say("a", gate, "b"))                  waits for the asyncio.Event `gate` between them
engine = FakeEngine(say("a", EngineDead("it broke")))     raises after the first
engine = FakeEngine(lambda call: say(str(call.params.seed)))
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.client import Chunk, Usage
from engine.core import ModelInfo, check_fit
from engine.errors import EngineDead, RequestError
from engine.messages import Deadlines, EngineStats, StepReport
from engine.params import SamplingParams
from engine.request import FinishReason
from tests.factories import make_info

VOCAB_SIZE = 0x110000  # a token for each character

NO_DEADLINES = Deadlines()
IDLE = EngineStats(num_running=0, num_waiting=0, num_used_blocks=0, num_total_blocks=16, num_steps=0, last_step_s=None)


class CharacterPieces:
    """Each token is a character."""

    errors = "replace"
    strip_space = False

    def __getitem__(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class FakeTokenizer:
    """One token for each character. Special: 2 begins a text. Chats are rendered as `<role>content` lines."""

    bos_token_id = 2
    vocab_size = VOCAB_SIZE
    has_chat_template = True
    chat_template = "<tool_call> tools"  # as models that call tools have it; `render_chat` is the template
    special_token_ids = frozenset({2})
    pieces = CharacterPieces()

    def __init__(self) -> None:
        self.chats: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        """What `render_chat` was given: messages and the template's arguments."""
        self.tools: Sequence[Mapping[str, Any]] | None = None
        """What it was given last."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.bos_token_id] * add_special_tokens + [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(each) for each in token_ids if not (skip_special_tokens and each == self.bos_token_id))

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        self.tools = tools
        self.chats.append((list(messages), dict(template_kwargs or {})))
        roles = [message["role"] for message in messages]
        if "tool" in roles and "assistant" not in roles:
            raise RequestError("Conversation roles must alternate", param="messages", code="invalid_value")
        lines = [f"<{each['role']}>{self._text(each.get('content') or [])}\n" for each in messages]
        if continue_final_message:
            return "".join(lines)[:-1]
        return "".join(lines) + "<assistant>" * add_generation_prompt

    @staticmethod
    def _text(parts: Sequence[dict[str, str]]) -> str:
        return "\n".join(part["text"] for part in parts)


@dataclass(frozen=True)
class Script:
    """What one engine request says."""

    items: tuple[str | asyncio.Event | Exception, ...]
    finish: FinishReason = FinishReason.STOP
    stop_reason: str | int | None = None
    num_cached: int = 0
    queue_s: float | None = None


def say(*items: str | asyncio.Event | Exception, **end: Any) -> Script:
    """Each text is a chunk with a token for each character ("" is one whose text is held back)."""
    return Script(items, **end)


@dataclass(eq=False)
class Call:
    """One engine request, as it was asked for."""

    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    deadlines: Deadlines
    arrival_s: float = field(default_factory=time.monotonic)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    was_aborted: bool = False
    """It ended before it had said everything."""

    @property
    def prompt(self) -> str:
        """The prompt as text."""
        return "".join(map(chr, self.prompt_token_ids))


class FakeEngine:
    """Says what its script says, to everyone, or to each call what a function of the call says."""

    def __init__(self, script: Script | Callable[[Call], Script] | None = None, **info: object) -> None:
        """`info`: fields of ModelInfo that matter to the test."""
        self._script = script or say("Hello", " world")
        self.info: ModelInfo = make_info(**({"name": "fake/model", "vocab_size": VOCAB_SIZE} | info))
        self.tokenizer = FakeTokenizer()
        self.stats = IDLE
        self.dead: EngineDead | None = None
        self.is_lost = False
        self.turn_began_s: float | None = None
        self.calls: list[Call] = []
        """In the order in which they were made."""
        self.observers: list[Callable[[StepReport], None]] = []
        self._called = asyncio.Condition()

    def add_observer(self, observer: Callable[[StepReport], None]) -> None:
        self.observers.append(observer)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        if self.dead is not None:
            raise EngineDead(*self.dead.args)
        check_fit(self.info, prompt_token_ids, params)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadlines: Deadlines = NO_DEADLINES,
    ) -> AsyncGenerator[Chunk, None]:
        self.check(prompt_token_ids, params)
        call = Call(list(prompt_token_ids), params, priority, cache_salt, deadlines)
        self.calls.append(call)
        return self._generate(call, self._script(call) if callable(self._script) else self._script)

    async def wait_for_calls(self, count: int) -> list[Call]:
        """The first `count` calls, once they have begun."""
        async with self._called:
            await self._called.wait_for(lambda: sum(call.begun.is_set() for call in self.calls) >= count)
        return self.calls[:count]

    async def _generate(self, call: Call, script: Script) -> AsyncGenerator[Chunk, None]:
        num_output = 0
        call.was_aborted = True
        call.begun.set()
        try:
            async with self._called:
                self._called.notify_all()
            for i, item in enumerate(script.items):
                if isinstance(item, asyncio.Event):
                    await item.wait()
                    continue
                if isinstance(item, Exception):
                    raise item
                num_output += len(item) or 1
                usage = Usage(len(call.prompt_token_ids), script.num_cached, num_output)
                call.was_aborted = is_open = i < len(script.items) - 1
                finish, stop_reason = (None, None) if is_open else (script.finish, script.stop_reason)
                begun_s = None if script.queue_s is None else call.arrival_s + script.queue_s
                times = {"queue_s": script.queue_s, "first_scheduled_s": begun_s}
                yield Chunk(item, tuple(map(ord, item)), usage, finish, stop_reason, **times)
        finally:
            call.ended.set()
