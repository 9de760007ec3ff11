"""A hypothesis state machine over the real core, scheduler and block manager, with a fake model.

Whatever the order of submits, aborts, failures and steps: every request ends exactly once, with exactly the tokens
that it would get alone, and blocks and requests always agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import event as note
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.messages import Abort, Failed, Finished, StepReport, Submit, TokensOut
from engine.plan import TokenLogprobs
from engine.request import FinishReason
from tests.factories import EOS, expected_output, fake_logprobs, make_core, make_submit

# Prompts that begin alike often, and end on block borders often; caches that hold only one or two of them at once.
PROMPTS = st.builds(
    lambda tail_at, length, tail: ([1] * tail_at + [2, 1, tail] * 8)[:length],
    st.sampled_from([0, 4, 7, 8, 16, 23]),
    st.sampled_from([1, 2, 3, 4, 5, 8, 9, 12, 16, 20, 24]),
    st.integers(1, 3),
)


@dataclass
class Expected:
    prompt: list[int]
    output: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    got: list[int] = field(default_factory=list)
    got_logprobs: list[TokenLogprobs] = field(default_factory=list)
    got_prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    aborted: bool = False
    poisoned: bool = False
    ended: bool = False


class EngineMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        num_tokens=st.sampled_from([32, 36, 40, 48, 64]),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.sampled_from([1, 7, 32, 64]),
        max_num_seqs=st.integers(1, 5),
        chunked=st.booleans(),
        prefix_caching=st.booleans(),
    )
    def start(
        self, num_tokens: int, block_size: int, budget: int, max_num_seqs: int, chunked: bool, prefix_caching: bool
    ) -> None:
        self.core, self.runner = make_core(
            num_blocks=num_tokens // block_size,
            block_size=block_size,
            prefix_caching=prefix_caching,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            enable_chunked_prefill=chunked,
        )
        self.budget = budget
        self.chunked = chunked
        self.expected: dict[int, Expected] = {}

    @rule(
        target=requests,
        prompt=PROMPTS,
        max_tokens=st.sampled_from([0, 1, 2, 5, 8, 8, 8]),
        logprobs=st.sampled_from([None, None, 0]),
        prompt_logprobs=st.sampled_from([None, None, 0, 3]),
        ignore_eos=st.booleans(),
        stop_token_ids=st.lists(st.integers(0, 49), max_size=2),
        priority=st.integers(-1, 1),
        cache_salt=st.sampled_from(["", "other"]),
    )
    def submit(
        self,
        *,
        prompt: list[int],
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        ignore_eos: bool,
        stop_token_ids: list[int],
        priority: int,
        cache_salt: str,
    ) -> int:
        request_id = len(self.expected)
        message: Submit = make_submit(
            request_id,
            prompt,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            ignore_eos=ignore_eos,
            stop_token_ids=tuple(stop_token_ids),
            priority=priority,
            cache_salt=cache_salt,
            arrival_s=float(request_id),
        )
        stop_ids = frozenset(stop_token_ids) | (frozenset() if ignore_eos else {EOS})
        output = expected_output(prompt, max_tokens, stop_ids)
        known = prompt + output
        scores = [fake_logprobs(known[:i], known[i]) for i in range(1, len(known))]
        self.expected[request_id] = Expected(
            prompt,
            output,
            logprobs=[] if logprobs is None else scores[len(prompt) - 1 :],
            prompt_logprobs=[] if prompt_logprobs is None else scores[: len(prompt) - 1],
        )
        self.core.submit(message)
        return request_id

    @rule(request_id=consumes(requests))
    def abort(self, request_id: int) -> None:
        if not self.expected[request_id].ended:
            self.expected[request_id].aborted = True
        self.core.abort(Abort(request_id))
        self.core.abort(Abort(request_id))  # twice is harmless

    @rule(request_id=consumes(requests))
    def poison(self, request_id: int) -> None:
        if not self.expected[request_id].ended:
            self.expected[request_id].poisoned = True
        self.runner.poisoned.add(request_id)

    @rule(request_id=consumes(requests))
    def break_(self, request_id: int) -> None:
        """Each step with this request in it raises from now on."""
        if not self.expected[request_id].ended:
            self.expected[request_id].poisoned = True
        self.runner.broken.add(request_id)

    @rule()
    def glitch(self) -> None:
        """One step raises. Nobody fails of it, unless alone in that step."""
        self.runner.num_glitches = 1

    @rule()
    def abort_unknown(self) -> None:
        self.core.abort(Abort(10**6))

    @precondition(lambda self: self.core.has_work)
    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.core.has_work:
                self.step()

    def step(self) -> None:
        first = len(self.runner.plans)
        report = self.core.step()
        plan, *parts = self.runner.plans[first:]
        if parts:
            note("a step was computed in parts")
            if len(plan.rows) == 1:
                self.expected[plan.rows[0].request_id].poisoned = True  # broken, or met by a glitch
        assert plan.rows, "a step with work computed nothing"
        assert all(row.token_ids for row in plan.rows)
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        if self.chunked:
            assert plan.num_tokens <= self.budget
        assert report.stats is not None
        assert report.stats.num_prefill_tokens + report.stats.num_decode_tokens == plan.num_tokens
        note("a step preempted") if report.stats.num_preempted else None
        note("a prefix was found") if report.stats.num_prefix_hits else None
        note("a prompt was scored in pieces") if any(
            r.scoring and r.scoring.targets.start > 1 for r in plan.rows
        ) else None
        self.take(report)
        self.core.check_integrity()

    @rule()
    def drain(self) -> None:
        for _ in range(1000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "work does not end"
        self.take(self.core.flush())
        assert all(each.ended for each in self.expected.values())
        assert self.core.stats().num_used_blocks == 0

    def take(self, report: StepReport) -> None:
        for event in report.events:
            expected = self.expected[event.request_id]
            assert not expected.ended, "an event after the end"
            if isinstance(event, TokensOut):
                expected.got += event.token_ids
                expected.got_logprobs += event.logprobs
                expected.got_prompt_logprobs += event.prompt_logprobs
                assert expected.got_logprobs == expected.logprobs[: len(expected.got)]
                if expected.got:
                    assert expected.got_prompt_logprobs == expected.prompt_logprobs
                assert expected.got == expected.output[: len(expected.got)]
            elif isinstance(event, Failed):
                expected.ended = True
                assert expected.poisoned
            else:
                expected.ended = True
                self.check_end(expected, event)

    def check_end(self, expected: Expected, event: Finished) -> None:
        assert event.num_output_tokens == len(expected.got)
        if event.reason is FinishReason.ABORT:
            assert expected.aborted
            return
        assert expected.got == expected.output
        assert expected.got_logprobs == expected.logprobs
        assert expected.got_prompt_logprobs == expected.prompt_logprobs
        if event.reason is FinishReason.STOP:
            assert event.stop_token_id == expected.got[-1]
        else:
            assert event.reason is FinishReason.LENGTH
            assert len(expected.got) == event.max_tokens

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.drain()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
