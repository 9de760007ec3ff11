"""What crosses between the event loop's thread and the engine's thread. All of it frozen; times are time.monotonic().

In:  Submit, Abort.     Out: one StepReport per step, carrying every request's events; EngineStats, by reference.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineError
from engine.params import SamplingParams
from engine.plan import TokenLogprobs
from engine.request import FinishReason, Grammar


@dataclass(frozen=True, slots=True)
class Deadlines:
    """By when a request must have come how far (time.monotonic()); None: whenever it may be."""

    start_s: float | None = None
    """It is in a step, or it fails with Overloaded and is never computed. The core sees to that, between steps."""
    end_s: float | None = None
    """Its output is complete, or it fails with DeadlineExceeded. `engine.client` sees to that."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A request for the engine. Its fit has been checked (`engine.core.check_fit`)."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    arrival_s: float = 0.0
    deadlines: Deadlines = Deadlines()
    grammar: Grammar | None = None
    """`params.grammar`, compiled: a request waits for that before it is submitted."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request now. Unknown and ended ids are ignored: the race with its own end is normal."""

    request_id: int
    reason: FinishReason = FinishReason.ABORT
    """STOP when a stop string was found in its text."""


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """When a request passed each gate; None: it never came there."""

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float


@dataclass(frozen=True, slots=True)
class TokensOut:
    """New tokens of one request, or logprobs of its prompt, or both."""

    request_id: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each of `token_ids`, if they are wanted."""
    queue_s: float | None = None
    """Seconds from arrival until it began to run."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the next tokens of the prompt, if they are wanted; all but the first token's come before the first output."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one request. Its last tokens came in a TokensOut before it, in the same report."""

    request_id: int
    reason: FinishReason
    stop_token_id: int | None
    """The end-of-text or stop token that ended it (it is the last of its tokens), if one did."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_tokens: int
    timings: RequestTimings


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of one request by an error."""

    request_id: int
    error: EngineError


Event = TokensOut | Finished | Failed


@dataclass(frozen=True, slots=True)
class StepStats:
    """Figures of one step, for the metrics."""

    num_prefill_tokens: int
    num_decode_tokens: int
    num_rows: int
    num_sampled_tokens: int
    num_preempted: int
    num_prefix_queries: int
    """Prompt tokens of requests admitted in this step."""
    num_prefix_hits: int
    """... of which the prefix cache had this many."""
    schedule_s: float
    forward_s: float
    sample_s: float
    update_s: float
    ttft_s: tuple[float, ...]
    """Arrival to first token, of the requests whose first token this step made."""
    itl_s: tuple[float, ...]
    """Gap to the request's previous token, of the other sampled tokens."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Everything that one turn of the engine loop has to say; delivered in one piece."""

    events: tuple[Event, ...]
    stats: StepStats | None = None
    """None when no step ran (aborts while idle, say)."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state now. The engine thread swaps in a new one each turn; readers never wait."""

    num_running: int
    num_waiting: int
    num_used_blocks: int
    """Blocks held by requests. Cached blocks that nobody holds count as free."""
    num_total_blocks: int
    num_steps: int
    last_step_s: float | None
    """When the last step ended (time.monotonic())."""
    step_started_s: float | None = None
    """When the step now running began; None while idle."""
