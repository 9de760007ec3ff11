from __future__ import annotations

from typing import cast

import pytest

from engine.errors import EngineError
from engine.messages import Event, Failed, Finished, RequestTimings, TokensOut
from engine.output import RequestOutput, Usage
from engine.plan import TokenLogprobs
from engine.request import FinishReason
from engine.text.tokenizer import Tokenizer
from tests.factories import LetterTokenizer, make_submit

A, B, C, D, SPECIAL = 0, 1, 2, 3, 49


def make_output(**params: object) -> RequestOutput:
    return RequestOutput(cast(Tokenizer, LetterTokenizer()), make_submit(7, [5, 6], **params))


def tokens(*token_ids: int) -> TokensOut:
    return TokensOut(7, token_ids, num_cached_tokens=1)


def end(reason: FinishReason = FinishReason.LENGTH, stop_token_id: int | None = None) -> Finished:
    return Finished(7, reason, stop_token_id, 2, 1, 3, 16, RequestTimings(0, 0, 0, 0, 0))


def test_tokens_become_text_and_usage_adds_up():
    output = make_output()
    assert output.take([tokens(A)]).text == "A"
    chunk = output.take([tokens(B), tokens(C)])
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("BC", (B, C), None)
    last = output.take([tokens(D), end()])
    assert (last.text, last.finish_reason, last.stop_reason) == ("D", FinishReason.LENGTH, None)
    assert last.usage == Usage(num_prompt_tokens=2, num_cached_tokens=1, num_output_tokens=4)


def test_an_end_without_tokens_flushes_what_was_held():
    output = make_output(stop=("ABX",))
    assert output.take([tokens(A, B)]).text == ""
    assert output.take([end(FinishReason.ABORT)]).text == "AB"


def test_a_stop_string_ends_it_before_the_engine_does():
    output = make_output(stop=("BC",))
    assert output.take([tokens(A, B)]).text == "A"
    chunk = output.take([tokens(C, D)])
    assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == ("", FinishReason.STOP, "BC")


def test_a_stop_string_in_the_last_tokens_wins_over_the_length():
    chunk = make_output(stop=("B",)).take([tokens(A, B), end()])
    assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == ("A", FinishReason.STOP, "B")


@pytest.mark.parametrize(
    ("stop_token_ids", "include", "text", "stop_reason"),
    [((), False, "A", None), ((B,), False, "A", B), ((B,), True, "AB", B)],
)
def test_a_stop_token_is_hidden_unless_asked_for(
    stop_token_ids: tuple[int, ...], include: bool, text: str, stop_reason: int | None
):
    output = make_output(stop_token_ids=stop_token_ids, include_stop_str_in_output=include)
    chunk = output.take([tokens(A, B), end(FinishReason.STOP, stop_token_id=B)])
    assert (chunk.text, chunk.stop_reason) == (text, stop_reason)
    assert chunk.hides_last_token == (not include)
    assert chunk.usage.num_output_tokens == 2


def test_stop_strings_pass_before_min_tokens():
    output = make_output(stop=("AB", "C"), min_tokens=3)
    assert output.take([tokens(A, B)]).text == "AB"
    assert output.take([tokens(C)]).text == "C"
    assert output.take([tokens(A)]).text == ""
    last = output.take([tokens(B, D)])
    assert (last.text, last.finish_reason, last.stop_reason) == ("", FinishReason.STOP, "AB")


def test_min_tokens_within_one_piece():
    chunk = make_output(stop=("B",), min_tokens=2).take([tokens(A, B, C, B, D)])
    assert (chunk.text, chunk.stop_reason) == ("ABC", "B")


def test_what_comes_behind_a_stop_string_is_as_if_never_made():
    scores = tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in (A, B, C, D))
    events = [TokensOut(7, (score.token_id,), 1, (score,)) for score in scores]
    output = make_output(stop=("B",), stop_token_ids=(D,), logprobs=0)
    chunk = output.take([*events, end(FinishReason.STOP, stop_token_id=D)])
    assert (chunk.text, chunk.token_ids, chunk.logprobs) == ("A", (A, B), scores[:2])
    assert (chunk.stop_reason, chunk.hides_last_token) == ("B", False)
    assert chunk.usage.num_output_tokens == 2


@pytest.mark.parametrize(("skip", "text"), [(True, "AB"), (False, f"A{chr(65 + SPECIAL)}B")])
def test_special_tokens_are_skipped_unless_asked_for(skip: bool, text: str):
    assert make_output(skip_special_tokens=skip).take([tokens(A, SPECIAL, B)]).text == text


def test_logprobs_come_with_their_tokens_and_the_prompts_before_them():
    output = make_output(logprobs=0, prompt_logprobs=0, stop=("AB",))
    scores = [TokenLogprobs(token_id, -float(token_id), 1) for token_id in (A, B, C)]
    chunk = output.take([TokensOut(7, (), 0, prompt_logprobs=(scores[2],))])
    assert (chunk.text, chunk.token_ids, chunk.logprobs, chunk.prompt_logprobs) == ("", (), (), (scores[2],))
    chunk = output.take([TokensOut(7, (A,), 0, (scores[0],))])
    assert (chunk.text, chunk.logprobs) == ("", (scores[0],))  # held back: its logprobs are not
    chunk = output.take([TokensOut(7, (C,), 0, (scores[2],)), TokensOut(7, (B,), 0, (scores[1],))])
    assert (chunk.text, chunk.logprobs, chunk.prompt_logprobs) == ("ACB", (scores[2], scores[1]), ())


def test_a_failure_raises_its_error():
    events: list[Event] = [tokens(A), Failed(7, EngineError("no luck"))]
    with pytest.raises(EngineError, match="no luck"):
        make_output().take(events)
