"""Bucket bounds of the histograms.

Those of the `chairlift_*` names begin at 1 ms and lie close together where small models live. Those of the `vllm:*`
names are vLLM's own, bound for bound, so that a dashboard's thresholds (`le="0.5"`) find their bucket.
"""

from __future__ import annotations

REQUEST_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5),
    *(10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Of a request or a part of it: time to first token, end to end, queue, prefill, decode."""

TOKEN_SECONDS = (
    *(0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008),
    *(0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0),
)
"""Between two tokens of a request."""

PHASE_SECONDS = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
"""Of one phase of a step: scheduling takes microseconds, a forward pass up to seconds."""

LAG_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""By which the event loop was late."""

STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

VLLM_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
VLLM_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
VLLM_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
VLLM_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def request_tokens(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `max_model_len`: for counts of a request's tokens (vLLM's bounds too)."""
    powers = (10**exponent for exponent in range(len(str(max_model_len))))
    return tuple(bound for power in powers for bound in (power, 2 * power, 5 * power) if bound <= max_model_len)
