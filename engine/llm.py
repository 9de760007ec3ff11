"""LLMEngine: offline use. Many prompts in, their outputs back, over the same core that serves HTTP.

from engine import LLMEngine, SamplingParams
engine = LLMEngine(model="smollm2", max_num_seqs=256)
for completion in engine.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
    print(completion.text)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tqdm import tqdm

from config.schema import DEFAULT_MODEL, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import ModelInfo, check_fit
from engine.errors import RequestError
from engine.grammar.compiler import GrammarCompiler, result_of
from engine.messages import Abort, Event, StepReport, Submit
from engine.output import Chunk, RequestOutput
from engine.params import SamplingParams
from engine.plan import TokenLogprobs
from engine.request import FinishReason
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """The output for one prompt."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or the id of the stop token that ended it."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `token_ids`, if its params ask for them."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each of `prompt_token_ids`, if its params ask for them; None for the first, which nothing predicts."""


class LLMEngine:
    """The engine in the caller's thread. Not thread-safe.

    Keyword arguments are the settings of ModelConfig, CacheConfig and SchedulerConfig (`config/schema.py`). Raises
    ConfigError when they cannot be honoured, TypeError for a name that is none of them.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **settings: Any) -> None:
        from engine.build import build_engine  # brings torch and transformers

        self._core, self._tokenizer = build_engine(_make_config({"model": model, **settings}))
        self._grammars = GrammarCompiler(
            self._tokenizer.to_json, vocab_size=self.info.vocab_size, eos_token_ids=self.info.eos_token_ids
        )
        self._ids = itertools.count()

    @property
    def info(self) -> ModelInfo:
        """What is served, and how large requests may be."""
        return self._core.info

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[Completion]:
        """Complete each prompt (text or token ids), batched continuously; results come in the prompts' order.

        `params` is one for all or one for each; None: SamplingParams(). All prompts are checked before the first is
        started; RequestError names the first that does not fit. An interrupt aborts them all.
        """
        all_params = self._spread(params, len(prompts))
        jobs = [self._make_job(prompt, each) for prompt, each in zip(prompts, all_params, strict=True)]
        for job in jobs:
            self._core.submit(job.submit)
        open_jobs = {job.submit.request_id: job for job in jobs}
        try:
            with _ProgressBar(len(jobs), show_progress) as bar:
                while open_jobs:
                    bar.update(self._deliver(self._core.step(), open_jobs), len(open_jobs))
        finally:
            for request_id in open_jobs:
                self._core.abort(Abort(request_id))
            self._core.flush()
        return [job.completion() for job in jobs]

    def _spread(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise RequestError(f"{count} prompts, but {len(params)} sampling params", param="params")
        return list(params)

    def _make_job(self, prompt: str | Sequence[int], params: SamplingParams) -> _Job:
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        check_fit(self.info, token_ids, params)
        grammar = None
        if params.grammar is not None:
            grammar = result_of(params.grammar, self._grammars.compile(params.grammar).result())
        submit = Submit(next(self._ids), tuple(token_ids), params, arrival_s=time.monotonic(), grammar=grammar)
        return _Job(submit, self._tokenizer)

    def _deliver(self, report: StepReport, open_jobs: dict[int, _Job]) -> int:
        """Hand each job its events and forget those that are complete; returns the number of new tokens."""
        num_tokens = 0
        for request_id, events in itertools.groupby(report.events, lambda event: event.request_id):
            job = open_jobs.get(request_id)
            if job is not None:
                num_tokens += job.take(list(events))
                if job.finish_reason is not None:
                    del open_jobs[request_id]
                    self._core.abort(Abort(request_id, FinishReason.STOP))  # nothing, but for a stop string
        return num_tokens


class _Job:
    """One prompt of a `generate` call and what has come of it."""

    def __init__(self, submit: Submit, tokenizer: Tokenizer) -> None:
        self.submit = submit
        self.finish_reason: FinishReason | None = None
        self._output = RequestOutput(tokenizer, submit)
        self._chunks: list[Chunk] = []

    def take(self, events: list[Event]) -> int:
        """Take in the request's events of one report; returns the number of new tokens."""
        chunk = self._output.take(events)
        self._chunks.append(chunk)
        self.finish_reason = chunk.finish_reason
        return len(chunk.token_ids)

    def completion(self) -> Completion:
        """The complete output."""
        last, params = self._chunks[-1], self.submit.params
        assert last.finish_reason is not None
        logprobs = tuple(itertools.chain.from_iterable(chunk.logprobs for chunk in self._chunks))
        prompt_logprobs = tuple(itertools.chain.from_iterable(chunk.prompt_logprobs for chunk in self._chunks))
        return Completion(
            prompt_token_ids=self.submit.prompt_token_ids,
            text="".join(chunk.text for chunk in self._chunks),
            token_ids=tuple(itertools.chain.from_iterable(chunk.token_ids for chunk in self._chunks)),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_cached_tokens=last.usage.num_cached_tokens,
            logprobs=None if params.logprobs is None else logprobs,
            prompt_logprobs=None if params.prompt_logprobs is None else (None, *prompt_logprobs),
        )


class _ProgressBar:
    """Requests done, and tokens per second beside them."""

    def __init__(self, total: int, show: bool) -> None:
        self._bar = tqdm(total=total, unit="req", desc="Generating", disable=not show, dynamic_ncols=True)
        self._num_tokens = 0
        self._started_s = time.monotonic()

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, num_tokens: int, num_open: int) -> None:
        self._num_tokens += num_tokens
        rate = self._num_tokens / max(time.monotonic() - self._started_s, 1e-9)
        self._bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
        self._bar.update(self._bar.total - num_open - self._bar.n)


def _make_config(settings: dict[str, Any]) -> EngineConfig:
    """Sort flat settings into their config classes. Raises TypeError for a name that is none of theirs."""

    def take(config: type) -> dict[str, Any]:
        return {f.name: settings.pop(f.name) for f in fields(config) if f.name in settings}

    config = EngineConfig(
        model=ModelConfig(**take(ModelConfig)),
        cache=CacheConfig(**take(CacheConfig)),
        scheduler=SchedulerConfig(**take(SchedulerConfig)),
    )
    if settings:
        raise TypeError(f"LLMEngine has no setting {next(iter(settings))!r}; they are listed in config/schema.py")
    return config
