"""How much each API key may ask for in a minute: requests, and tokens of prompt and output.

    RateLimits.count     a request, before its body is parsed        --+
    RateLimits.reserve   its tokens, before it is tokenised            +--> Bucket of the key, or 429
    Charge.correct       its prompt is tokenised                     --+
    Charge.follow        output beyond what was reserved, as it comes
    Charge.release       what it has not used goes back: the end leaves what `usage` says

Clients without a key share one allowance. Their addresses tell nothing: behind a proxy all have the proxy's, what a
proxy says of them can be made up, and there is no end of them. So there are as many buckets as keys, none to forget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import DeadlineExceeded, EngineError
from server.admission import BYTES_PER_TOKEN, hold
from server.errors import RequestRateExceeded, TokenRateExceeded

if TYPE_CHECKING:
    from fastapi import Request

    from config.schema import ServerConfig
    from server.choices import Chunks

Refusal = Literal["requests", "tokens", "too_large"]
"""Which limit refused a request; `too_large`: it would at any time."""

_WHAT = ("limit", "remaining", "reset")
HEADERS = tuple(f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in _WHAT)
"""OpenAI's."""

_MINUTE_S = 60.0
_NEARLY = 1e-3
"""So much of a request or token may be missing: who comes back in time is not refused for the last bit of a float."""
_NO_TIME_S = 1e-6
"""What the rounding of a clock may leave of a wait that is over."""


class Bucket:
    """So many a minute: full at first, refilled evenly, never beyond its limit. Times are time.monotonic().

    It may be overdrawn by what turns out to be more than was thought, to its limit below nothing and no further; what
    comes later waits for that, so two minutes at most.
    """

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._now_s = now_s

    def level(self, now_s: float) -> float:
        """What is left."""
        refill = (now_s - self._now_s) * self.limit / _MINUTE_S
        self._level = min(float(self.limit), self._level + refill)
        self._now_s = now_s
        return self._level

    def seconds_until(self, amount: float, now_s: float) -> float:
        """How long it takes until `amount`, at most the limit, is there; 0 if it is."""
        missing = amount - self.level(now_s)
        wait_s = missing * _MINUTE_S / self.limit
        return 0.0 if missing <= _NEARLY or wait_s <= _NO_TIME_S else wait_s

    def take(self, amount: float, now_s: float) -> float:
        """Take `amount`, be it there or not, but for what would be below its floor; give it back if it is negative.

        Returns what was taken.
        """
        before = self.level(now_s)
        self._level = max(-float(self.limit), min(float(self.limit), before - amount))
        return before - self._level

    def headers(self, unit: str, now_s: float) -> dict[str, str]:
        """Its state, as OpenAI tells it: a reset is when it is full again."""
        left = max(0, math.floor(self.level(now_s) + _NEARLY))
        reset = duration(self.seconds_until(self.limit, now_s))
        values = (str(self.limit), str(left), reset)
        return {f"x-ratelimit-{what}-{unit}": value for what, value in zip(_WHAT, values, strict=True)}


def duration(seconds: float) -> str:
    """A time as OpenAI writes it, rounded up: `120ms`, `1s`, `6m0s`, `1h0m2.5s`."""
    ms = math.ceil(round(seconds * 1000, 3))
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{ms / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a key has left; None: without limit."""

    requests: Bucket | None
    tokens: Bucket | None

    def headers(self, now_s: float) -> Mapping[str, str]:
        """What an answer says of it."""
        buckets = {"requests": self.requests, "tokens": self.tokens}
        return {
            name: value
            for unit, bucket in buckets.items()
            if bucket is not None
            for name, value in bucket.headers(unit, now_s).items()
        }


class Charge:
    """What one API request takes of its key's tokens: those of its prompt, and of its output or what that may be."""

    def __init__(self, limits: RateLimits, bucket: Bucket, num_prompt_tokens: int, num_reserved: int) -> None:
        self._limits = limits
        self._bucket = bucket
        self._num_prompt_tokens = num_prompt_tokens
        self._num_reserved = num_reserved
        self._num_output_tokens = 0
        self._of_choices: dict[int, int] = {}
        self._is_computed = False
        self._num_due = 0
        self._num_taken = 0.0
        """Less than what is due if the bucket was at its floor: that is forgiven, and cannot be given back."""
        self._take()

    def correct(self, num_prompt_tokens: int) -> None:
        """Its prompts are tokenised: they have so many tokens. Raises TokenRateExceeded if it can never pass."""
        self._num_prompt_tokens = num_prompt_tokens
        self._limits.check_size(num_prompt_tokens, self._num_reserved)
        self._take()

    async def follow(self, chunks: Chunks) -> Chunks:
        """The same chunks, counted. They are computed when the first one is asked for; closes them."""
        self._is_computed = True
        try:
            async with aclosing(chunks):
                async for index, chunk in chunks:
                    self._count(index, chunk.usage.num_output_tokens)
                    yield index, chunk
        except EngineError as error:
            if not self._of_choices and not isinstance(error, DeadlineExceeded):
                self._is_computed = False  # refused after all, or it waited too long
            raise
        finally:
            self.release()

    def release(self) -> None:
        """Its answer has ended: give back what it has not used, which is all of it if nothing was computed."""
        self._num_reserved = 0
        if not self._is_computed:
            self._num_prompt_tokens = 0
        self._take()

    def _count(self, choice: int, num_output_tokens: int) -> None:
        """A choice has so many tokens by now."""
        self._num_output_tokens += num_output_tokens - self._of_choices.get(choice, 0)
        self._of_choices[choice] = num_output_tokens
        if self._num_output_tokens > self._num_reserved:
            self._take()

    def _take(self) -> None:
        """Take what is due beyond what was due before, or give back what was taken beyond it."""
        num_due = self._num_prompt_tokens + max(self._num_reserved, self._num_output_tokens)
        more = num_due - self._num_due
        amount = more if more > 0 else min(0.0, num_due - self._num_taken)
        self._num_taken += self._bucket.take(amount, self._limits.clock())
        self._num_due = num_due


class RateLimits:
    """The limits, and what each key has left. Event loop only."""

    def __init__(
        self,
        *,
        requests: int | None,
        tokens: int | None,
        has_keys: bool,
        on_refused: Callable[[Refusal], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`requests`, `tokens`: per minute, None without limit. `on_refused` is told of each refusal."""
        self.clock = clock
        self._requests = requests
        self._tokens = tokens
        self._whose = "for this API key" if has_keys else "for all clients together"
        self._on_refused = on_refused
        self._allowances: dict[str, Allowance] = {}

    @classmethod
    def of(cls, config: ServerConfig, *, has_keys: bool, on_refused: Callable[[Refusal], None]) -> RateLimits:
        """As the operator has them."""
        return cls(
            requests=config.requests_per_minute,
            tokens=config.tokens_per_minute,
            has_keys=has_keys,
            on_refused=on_refused,
        )

    @property
    def is_on(self) -> bool:
        """Whether anything is limited."""
        return self._requests is not None or self._tokens is not None

    def count(self, request: Request) -> None:
        """Count a request, whatever becomes of it. Raises RequestRateExceeded, and then it does not count."""
        if not self.is_on:
            return
        allowance = request.scope["state"]["allowance"] = self._of(request)
        if (bucket := allowance.requests) is None:
            return
        now_s = self.clock()
        if wait_s := bucket.seconds_until(1, now_s):
            self._on_refused("requests")
            message = f"{bucket.limit} requests per minute is the limit {self._whose}"
            raise RequestRateExceeded(f"{message}: try again in {duration(wait_s)}", retry_after_s=wait_s)
        bucket.take(1, now_s)

    def reserve(self, request: Request, *, num_bytes: int, num_output_tokens: int) -> None:
        """Take the tokens of a request that was counted: of a body of so many bytes, and the most its output may have.

        Raises TokenRateExceeded, and then the request does not count either.
        """
        if self._tokens is None:
            return
        allowance: Allowance = request.scope["state"]["allowance"]
        assert allowance.tokens is not None
        now_s = self.clock()
        try:
            self.check_size(0, num_output_tokens)
            # A guess may be wrong: it refuses for now, and only what is sure refuses for ever.
            num_prompt_tokens = min(num_bytes // BYTES_PER_TOKEN, self._tokens - num_output_tokens)
            self._check_tokens(allowance.tokens, num_prompt_tokens + num_output_tokens, now_s)
        except TokenRateExceeded:
            if allowance.requests is not None:
                allowance.requests.take(-1, now_s)
            raise
        charge = Charge(self, allowance.tokens, num_prompt_tokens, num_output_tokens)
        request.scope["state"]["charge"] = charge
        hold(request.scope, charge)

    def check_size(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Raise TokenRateExceeded for a request that is more than a full bucket."""
        num_needed = num_prompt_tokens + num_output_tokens
        if self._tokens is None or num_needed <= self._tokens:
            return
        self._on_refused("too_large")
        parts = f"{num_prompt_tokens} in its prompt and " if num_prompt_tokens else "not counting its prompt, "
        raise TokenRateExceeded(
            f"this request is too large to pass at any time: it needs {num_needed} tokens, {parts}{num_output_tokens} "
            f"that its output may have, and {self._tokens} tokens per minute is the limit {self._whose}",
            retry_after_s=None,
        )

    def _check_tokens(self, bucket: Bucket, num_needed: int, now_s: float) -> None:
        if wait_s := bucket.seconds_until(num_needed, now_s):
            self._on_refused("tokens")
            num_used = bucket.limit - math.floor(bucket.level(now_s))
            raise TokenRateExceeded(
                f"{bucket.limit} tokens per minute is the limit {self._whose}: {num_used} are used, and this request "
                f"needs about {num_needed}, its prompt and what its output may have: try again in {duration(wait_s)}",
                retry_after_s=wait_s,
            )

    def _of(self, request: Request) -> Allowance:
        """The key's, by its id: there are no more than keys, since others are refused before."""
        key_id = getattr(request.state, "key_id", "")
        if (allowance := self._allowances.get(key_id)) is None:
            now_s = self.clock()
            allowance = self._allowances[key_id] = Allowance(
                None if self._requests is None else Bucket(self._requests, now_s),
                None if self._tokens is None else Bucket(self._tokens, now_s),
            )
        return allowance


class TellAllowance:
    """ASGI middleware: puts what a key has left into the headers of each answer to a request that was counted."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float]) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def telling_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                allowance: Allowance | None = scope.get("state", {}).get("allowance")
                if allowance is not None:
                    MutableHeaders(scope=message).update(allowance.headers(self._clock()))
            await send(message)

        await self._app(scope, receive, telling_send)
