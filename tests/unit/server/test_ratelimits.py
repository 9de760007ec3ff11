"""Buckets, what a request takes of them, and who is refused. The clock is the test's."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from engine.client import Chunk, Usage
from engine.errors import DeadlineExceeded, EngineError, Overloaded, RequestError
from server.errors import RequestRateExceeded, TokenRateExceeded, to_api_error
from server.ratelimits import Bucket, Charge, RateLimits, duration
from tests.factories_http import Clock

Chunks = AsyncGenerator[tuple[int, Chunk], None]


class Limits(RateLimits):
    """With a clock that stands still until told, and a list of the refusals."""

    def __init__(self, **limits: Any) -> None:
        self.now = Clock()
        self.refused: list[str] = []
        given = {"requests": None, "tokens": None, "has_keys": True} | limits
        super().__init__(**given, on_refused=self.refused.append, clock=self.now)

    def ask(self, key: str = "a", *, num_bytes: int = 0, num_output_tokens: int = 0) -> Request:
        """A request that gets through."""
        request = Request({"type": "http", "state": {"key_id": key}})
        self.count(request)
        self.reserve(request, num_bytes=num_bytes, num_output_tokens=num_output_tokens)
        return request

    def left(self, request: Request, unit: str = "tokens") -> int:
        headers = request.state.allowance.headers(self.now())
        return int(headers[f"x-ratelimit-remaining-{unit}"])


def charge_of(request: Request) -> Charge:
    charge: Charge = request.state.charge
    return charge


async def chunks_of(*items: tuple[int, int] | Exception) -> Chunks:
    """Each item is a choice and how many tokens it has by now."""
    for item in items:
        if isinstance(item, Exception):
            raise item
        choice, num_tokens = item
        yield choice, Chunk("", (), Usage(0, 0, num_tokens))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (0.9999, "1s"),
        (1.0, "1s"),
        (18.642, "18.642s"),
        (59.9999, "1m0s"),
        (360.0, "6m0s"),
        (62.5, "1m2.5s"),
        (3602.5, "1h0m2.5s"),
        (90000.0, "25h0m0s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_bucket_is_full_at_first_and_refills_evenly_up_to_its_limit() -> None:
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(100.0) == 0
    assert bucket.level(110.5) == 10.5
    assert bucket.seconds_until(11, 110.5) == pytest.approx(0.5)
    assert bucket.level(1e6) == 60
    bucket.take(-5, 1e6)  # what comes back late is not saved up
    assert bucket.level(1e6) == 60


def test_what_is_overdrawn_is_waited_for() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(90, 0.0)
    assert bucket.headers("tokens", 0.0) == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m30s",
    }
    assert bucket.seconds_until(1, 0.0) == 31


def test_it_is_overdrawn_by_a_minutes_worth_at_most() -> None:
    bucket = Bucket(60, 0.0)
    assert bucket.take(1000, 0.0) == 120
    assert bucket.take(1, 0.0) == 0
    assert bucket.headers("tokens", 0.0)["x-ratelimit-reset-tokens"] == "2m0s"
    assert bucket.seconds_until(1, 0.0) == 61
    assert bucket.level(120.0) == 60


def test_headers_are_as_in_openais_own_example() -> None:
    bucket = Bucket(150_000, 0.0)
    bucket.take(16, 0.0)
    assert list(bucket.headers("tokens", 0.0).values()) == ["150000", "149984", "7ms"]  # 6.4 ms


@given(
    limit=st.integers(1, 10**9),
    start_s=st.floats(0, 1e7),
    amounts=st.lists(st.integers(1, 10**9), min_size=1, max_size=20),
)
def test_who_comes_back_when_told_gets_in_and_no_more_than_the_limit_gets_through(
    limit: int, start_s: float, amounts: list[int]
) -> None:
    bucket, now_s, num_taken = Bucket(limit, start_s), start_s, 0
    for amount in (min(each, limit) for each in amounts):
        now_s += bucket.seconds_until(amount, now_s)
        assert bucket.seconds_until(amount, now_s) == 0
        bucket.take(amount, now_s)
        num_taken += amount
        assert num_taken <= limit + (now_s - start_s) * limit / 60 + 1e-3 * len(amounts) + 1e-6 * limit


def test_each_key_has_its_own_requests_and_a_refusal_takes_nothing() -> None:
    limits = Limits(requests=2)
    for _ in range(2):
        limits.ask("a")
    for _ in range(3):
        with pytest.raises(RequestRateExceeded, match="2 requests per minute is the limit for this API key") as caught:
            limits.ask("a")
        assert caught.value.retry_after_s == 30
    limits.ask("b")
    limits.now.s += 30
    assert limits.left(limits.ask("a"), "requests") == 0
    assert limits.refused == ["requests"] * 3


def test_without_keys_all_clients_share_one() -> None:
    limits = Limits(requests=1, has_keys=False)
    first = Request({"type": "http", "state": {}, "client": ("10.0.0.1", 1)})
    limits.count(first)
    with pytest.raises(RequestRateExceeded, match="for all clients together"):
        limits.count(Request({"type": "http", "state": {}, "client": ("10.0.0.2", 1)}))


def test_without_limits_nothing_is_held_and_nothing_told() -> None:
    limits = Limits()
    assert not limits.is_on
    assert limits.ask(num_bytes=10**9, num_output_tokens=10**9).scope["state"] == {"key_id": "a"}


def test_tokens_are_guessed_from_bytes_then_corrected() -> None:
    limits = Limits(tokens=100)
    request = limits.ask(num_bytes=80, num_output_tokens=30)
    assert limits.left(request) == 50
    charge_of(request).correct(40)
    assert limits.left(request) == 30
    charge_of(request).correct(10)
    assert limits.left(request) == 60
    for _ in range(2):  # the second time is nothing
        charge_of(request).release()
        assert limits.left(request) == 100


def test_too_many_tokens_wait_and_their_request_does_not_count() -> None:
    limits = Limits(requests=10, tokens=60)
    request = limits.ask(num_output_tokens=50)
    with pytest.raises(TokenRateExceeded, match=r"50 are used.* needs about 20.* try again in 10s") as caught:
        limits.ask(num_bytes=40, num_output_tokens=10)
    assert caught.value.retry_after_s == pytest.approx(10)
    assert limits.left(request, "requests") == 9
    limits.now.s += 10
    limits.ask(num_bytes=40, num_output_tokens=10)
    assert limits.left(request, "requests") == 9  # one more, and one is there again
    assert limits.refused == ["tokens"]


def test_what_can_never_pass_is_told_so() -> None:
    limits = Limits(requests=10, tokens=60)
    with pytest.raises(TokenRateExceeded, match=r"too large to pass at any time.* needs 61 tokens, not counting"):
        limits.ask(num_output_tokens=61)
    request = limits.ask(num_bytes=10**6, num_output_tokens=20)  # a guess is not sure
    assert (limits.left(request), limits.left(request, "requests")) == (0, 9)
    with pytest.raises(
        TokenRateExceeded, match="61 tokens, 41 in its prompt and 20 that its output may have"
    ) as caught:
        charge_of(request).correct(41)
    charge_of(request).release()
    assert (limits.left(request), limits.left(request, "requests")) == (60, 9)
    error = to_api_error(caught.value)
    assert (error.status, error.type, error.headers) == (429, "tokens", {"X-Should-Retry": "false"})
    assert limits.refused == ["too_large"] * 2


def test_a_guess_beyond_the_limit_waits_for_a_full_bucket() -> None:
    limits = Limits(tokens=60)
    limits.ask(num_output_tokens=1)
    with pytest.raises(TokenRateExceeded) as caught:
        limits.ask(num_bytes=10**6)
    assert caught.value.retry_after_s == 1


@pytest.mark.anyio
async def test_output_beyond_what_was_reserved_counts_as_it_comes_and_the_rest_goes_back() -> None:
    limits = Limits(tokens=100)
    request = limits.ask(num_output_tokens=10)
    charge_of(request).correct(20)
    chunks = charge_of(request).follow(chunks_of((0, 4), (1, 5), (0, 8), (1, 6)))
    left = [limits.left(request) async for _ in chunks]
    assert left == [70, 70, 67, 66]
    assert limits.left(request) == 66
    other = limits.ask(num_output_tokens=50)
    async for _ in charge_of(other).follow(chunks_of((0, 3))):
        pass
    assert limits.left(other) == 63


@pytest.mark.anyio
async def test_outputs_far_beyond_the_limit_shut_nobody_out_for_hours() -> None:
    """Ten chats at once without `max_tokens`, of 4000 tokens each, against 100 a minute: 400 minutes' worth."""
    limits = Limits(tokens=100)
    requests = [limits.ask(num_bytes=4) for _ in range(10)]
    follows = [charge_of(request).follow(chunks_of((0, 2000), (0, 4000))) for request in requests]
    for follow in follows:
        await anext(follow)
    limits.now.s += 3600  # they run on, and while they do nothing begins
    for follow in follows:
        assert [_ async for _ in follow]
    with pytest.raises(TokenRateExceeded) as caught:
        limits.ask(num_output_tokens=100)
    assert caught.value.retry_after_s == 120
    limits.now.s += 120
    assert limits.left(limits.ask(num_output_tokens=100)) == 0


@pytest.mark.anyio
async def test_what_was_forgiven_is_not_given_back() -> None:
    limits = Limits(tokens=100)
    ended, long = limits.ask(num_bytes=4, num_output_tokens=50), limits.ask(num_bytes=4)
    [_ async for _ in charge_of(long).follow(chunks_of((0, 1000)))]
    charge_of(ended).correct(50)  # 49 more than was thought: the bucket is at its floor
    charge_of(ended).release()  # refused after all: 51 were taken
    limits.now.s += 60
    assert limits.left(ended) == 51


@pytest.mark.anyio
async def test_a_client_that_leaves_has_used_its_prompt_and_what_came() -> None:
    limits = Limits(tokens=100)
    request = limits.ask(num_bytes=80, num_output_tokens=40)
    follow = charge_of(request).follow(chunks_of((0, 3), (0, 4)))
    await anext(follow)
    await follow.aclose()
    assert limits.left(request) == 77


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "left"),
    [
        (RequestError("the grammar is refused"), 100),
        (Overloaded("it waited too long", retry_after_s=1), 100),
        (EngineError("it broke"), 100),
        (DeadlineExceeded("too late"), 80),  # its prompt may have been computed
    ],
)
async def test_what_fails_before_it_has_begun_used_nothing(error: Exception, left: int) -> None:
    limits = Limits(tokens=100)
    request = limits.ask(num_bytes=80, num_output_tokens=40)
    with pytest.raises(type(error)):
        await anext(charge_of(request).follow(chunks_of(error)))
    assert limits.left(request) == left
    request = limits.ask(num_output_tokens=0)
    charge_of(request).correct(10)
    with pytest.raises(type(error)):
        [_ async for _ in charge_of(request).follow(chunks_of((0, 2), error))]
    assert limits.left(request) == left - 12


def test_there_are_as_many_buckets_as_keys() -> None:
    limits = Limits(requests=1000, tokens=1000)
    for i in range(300):
        charge_of(limits.ask(f"key {i % 3}", num_bytes=4)).release()
    assert len(limits._allowances) == 3
