"""API model -> what the engine is asked for. The one home of defaults, and of refusals that need to know the model.

    CompletionRequest, ChatCompletionRequest --Converter--> Work: prompts as token ids, SamplingParams, in choice order

Knows no HTTP and no JSON. Everything that can be wrong with a request is found here, before anything is queued.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from engine.client import AsyncEngine
from engine.core import ModelInfo
from engine.errors import RequestError
from engine.messages import Deadlines
from engine.params import MAX_LOGPROBS, SamplingParams
from engine.text.detokenizer import Detokenizer
from server import limits
from server.chat.conversation import Conversation
from server.chat.dialect import Dialect, offered_tools
from server.chat.messages import to_template
from server.chat.reader import Reading
from server.chat.reasoning import thoughts_before_form
from server.chat.tools.forced import forced_functions, grammar_of_calls
from server.errors import ModelNotFound
from server.prompts import PromptEncoder
from server.protocol.chat import ChatCompletionRequest, ChatMessage
from server.protocol.completions import CompletionRequest, Prompt
from server.protocol.generation import GenerationRequest
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from server.structured import grammar_of

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where it is left out, as OpenAI has it. Chat goes on up to the context length."""

TEMPLATE_SWITCHES = frozenset({"enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "date_string"})
"""What clients may set in `chat_template_kwargs`: switches that known templates have, none of its other inputs."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is shown before the output."""

    text: str
    is_clients: bool
    """It is the client's own, with its special tokens; else what the token ids say."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One request to the engine: one choice."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    echo: Echo | None = None


@dataclass(frozen=True, slots=True)
class Reports:
    """What an answer says beside its text. (The engine may be asked for more.)"""

    logprobs: int | None = None
    """Logprobs of each token, also of the prompt if it is echoed, and of this many most likely ones."""
    prompt_logprobs: int | None = None
    """The same of the prompt, apart from the text."""
    token_ids: bool = False
    """The ids of prompt and output."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one API request asks of the engine."""

    generations: tuple[Generation, ...]
    """In choice order: choice j of prompt i is number `i * num_each + j`."""
    n: int
    """Choices that are shown for each prompt."""
    priority: int
    cache_salt: str
    num_each: int
    """Choices that are generated for each prompt; the `n` likeliest of them are shown."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    reports: Reports = Reports()
    reading: Reading | None = None
    """How the text is to be read; None if it is shown as it is."""


def max_output_tokens(body: GenerationRequest) -> int | None:
    """Most tokens that a choice may have, as its client says; None: up to the context length."""
    if isinstance(body, ChatCompletionRequest):
        return _given(body.max_completion_tokens, body.max_tokens)
    return _given(body.max_tokens, DEFAULT_COMPLETION_TOKENS)


class Converter:
    """Converts requests for one engine. Event loop only."""

    def __init__(
        self,
        engine: AsyncEngine,
        dialect: Dialect,
        *,
        max_queue_wait_s: float | None = None,
        request_timeout_s: float | None = None,
    ) -> None:
        """How long a request may wait until it begins, and take in all, if its client does not ask for less."""
        self._engine = engine
        self._dialect = dialect
        self._max_queue_wait_s = max_queue_wait_s
        self._request_timeout_s = request_timeout_s
        self._encoder = PromptEncoder(engine.tokenizer, max_model_len=engine.info.max_model_len)
        self._any_length = PromptEncoder(engine.tokenizer, max_model_len=None)
        """For texts that are counted, or cut afterwards; they have their own thread, and hold no prompt up."""

    async def completion(self, body: CompletionRequest) -> Work:
        """Raises RequestError (with the field's name), ModelNotFound, or EngineDead."""
        reports = Reports(body.logprobs, body.prompt_logprobs, bool(body.return_token_ids))
        work = self._begin(body, reports, num_prompts=len(body.prompt), best_of=body.best_of)
        params = _sampling_params(body, max_output_tokens(body), reports, self._engine.info)
        if work.num_each > work.n and params.logprobs is None:
            params = replace(params, logprobs=0)  # to find the likeliest
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        prompts = [prompt for prompt in body.prompt if not isinstance(prompt, str)]
        if texts:  # then all of them are
            add_special_tokens = _given(body.add_special_tokens, True)
            prompts = await self._encoder_for(body).encode(texts, add_special_tokens=add_special_tokens)
        kept = self._truncated(prompts, body, params)
        echoes = None
        if body.echo:
            echoes = [
                self._echo(each, token_ids, params, is_cut=len(token_ids) < len(before))
                for each, before, token_ids in zip(body.prompt, prompts, kept, strict=True)
            ]
        return self._fill(work, kept, params, echoes)

    async def chat(self, body: ChatCompletionRequest) -> Work:
        """Raises RequestError (with the field's name), ModelNotFound, or EngineDead."""
        reports = Reports(_chat_logprobs(body), body.prompt_logprobs, bool(body.return_token_ids))
        work = self._begin(body, reports, num_prompts=1)
        self._dialect.check(body)
        names = {"prompt": "messages"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        with _renamed(names):
            params = _sampling_params(body, max_output_tokens(body), reports, self._engine.info)
            if forced := forced_functions(body):  # then the answer has no text that a form could be asked of
                params = replace(params, grammar=grammar_of_calls(body, forced))
            prompt = await self._encoder_for(body).encode_chat(
                self._dialect.conversation(_conversation(body, body.messages, offered_tools(body))),
                add_special_tokens=_given(body.add_special_tokens, False),
            )
            has_form = params.grammar is not None
            reading = self._dialect.reading(body, prompt, self._engine.tokenizer, has_form=has_form)
            params = _fit_to_reading(params, reading)
            work = self._fill(work, self._truncated([prompt], body, params), params)
            return replace(work, reading=reading)

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        """The tokens of a text or a conversation, however many. Raises RequestError or ModelNotFound."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise _invalid("prompt", "exactly one of prompt and messages is required")
        if body.messages is not None:
            tools = [tool.to_template() for tool in body.tools or ()]
            conversation = self._dialect.conversation(_conversation(body, body.messages, tools or None))
            add_special_tokens = _given(body.add_special_tokens, False)
            return await self._any_length.encode_chat(conversation, add_special_tokens=add_special_tokens)
        texts = [body.prompt or ""]
        add_special_tokens = _given(body.add_special_tokens, True)
        (tokens,) = await self._any_length.encode(texts, add_special_tokens=add_special_tokens)
        return tokens

    async def num_tokens(self, text: str) -> int:
        """How many tokens a text has, however long it is."""
        (tokens,) = await self._any_length.encode([text], add_special_tokens=False)
        return len(tokens)

    async def detokenize(self, body: DetokenizeRequest) -> str:
        """The tokens' text. Raises RequestError or ModelNotFound."""
        self._check_model(body.model)
        vocab_size = self._engine.info.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise _invalid("tokens", f"tokens has {token_id}; this model's ids are 0 to {vocab_size - 1}")
        return await self._any_length.decode(body.tokens)

    def _encoder_for(self, body: GenerationRequest) -> PromptEncoder:
        """What is cut is read whole first."""
        return self._encoder if body.truncate_prompt_tokens is None else self._any_length

    def _truncated(
        self, prompts: Sequence[Sequence[int]], body: GenerationRequest, params: SamplingParams
    ) -> Sequence[Sequence[int]]:
        """The ends of the prompts, if they are to be cut."""
        num_tokens = body.truncate_prompt_tokens
        if num_tokens is None:
            return prompts
        if num_tokens == -1:
            num_tokens = max(1, self._engine.info.max_model_len - _given(params.max_tokens, 1))
        if num_tokens < 1:
            raise _invalid(
                "truncate_prompt_tokens", f"truncate_prompt_tokens must be -1 or at least 1, got {num_tokens}"
            )
        return [prompt[-num_tokens:] for prompt in prompts]

    def _check_model(self, model: str | None) -> None:
        served = self._engine.info.name
        if model is not None and model != served:
            raise ModelNotFound(f"the model {model[:100]!r} is not served here: {served!r} is", param="model")

    def _begin(
        self, body: GenerationRequest, reports: Reports, *, num_prompts: int, best_of: int | None = None
    ) -> Work:
        """The work without its generations. Refuses what can be refused without the prompt's tokens."""
        self._check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise _invalid("stream_options", "stream_options is for streams: set stream to true, or leave it out")
        if len(body.cache_salt or "") > limits.MAX_CACHE_SALT_LEN:
            raise _invalid("cache_salt", f"cache_salt may have {limits.MAX_CACHE_SALT_LEN} characters at most")
        for name in ("user", "safety_identifier", "prompt_cache_key"):
            if len(getattr(body, name) or "") > limits.MAX_LABEL_LEN:
                raise _invalid(name, f"{name} may have {limits.MAX_LABEL_LEN} characters at most")
        if body.stream and body.prompt_logprobs is not None:
            raise _invalid("prompt_logprobs", "prompt_logprobs is not for streams: leave one of the two out")
        n, num_each = _num_choices(body, num_prompts, best_of)
        priority = _given(body.priority, 0)
        if not -(2**63) <= priority < 2**63:
            raise _invalid("priority", "priority must be a 64-bit integer")
        return Work(
            (),
            n,
            priority=priority,
            cache_salt=body.cache_salt or "",
            deadlines=self._deadlines(body),
            num_each=num_each,
            reports=reports,
        )

    def _deadlines(self, body: GenerationRequest) -> Deadlines:
        """Counted from now: the body is there, its prompts are still to be tokenised."""
        timeout_ms = body.timeout_ms
        if timeout_ms is not None and not 1 <= timeout_ms <= limits.MAX_TIMEOUT_MS:
            raise _invalid("timeout_ms", f"timeout_ms must be from 1 to {limits.MAX_TIMEOUT_MS}, got {timeout_ms}")
        asked_s = None if timeout_ms is None else timeout_ms / 1000
        timeouts_s = [each for each in (asked_s, self._request_timeout_s) if each is not None]
        now_s = time.monotonic()
        return Deadlines(
            start_s=None if self._max_queue_wait_s is None else now_s + self._max_queue_wait_s,
            end_s=now_s + min(timeouts_s) if timeouts_s else None,
        )

    def _fill(
        self,
        work: Work,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        echoes: Sequence[Echo] | None = None,
    ) -> Work:
        """The work with its generations. Refuses what does not fit the engine."""
        for prompt in prompts:
            self._engine.check(prompt, params)
        choices = [replace(params, seed=_choice_seed(params.seed, j)) for j in range(work.num_each)]
        each_echo = [None] * len(prompts) if echoes is None else echoes
        generations = tuple(
            Generation(tuple(prompt), choice, echo)
            for prompt, echo in zip(prompts, each_echo, strict=True)
            for choice in choices
        )
        return replace(work, generations=generations)

    def _echo(self, prompt: Prompt, token_ids: Sequence[int], params: SamplingParams, *, is_cut: bool) -> Echo:
        if isinstance(prompt, str) and not is_cut:
            return Echo(prompt, is_clients=True)
        detokenizer = Detokenizer(self._engine.tokenizer, skip_special_tokens=params.skip_special_tokens)
        # Without `flush`: a character that the prompt leaves unfinished is shown where the output finishes it.
        return Echo(detokenizer.feed(token_ids), is_clients=False)


def _num_choices(body: GenerationRequest, num_prompts: int, best_of: int | None) -> tuple[int, int]:
    """How many choices are shown for each prompt, and how many are generated."""
    n = _given(body.n, 1)
    if not 1 <= n <= limits.MAX_N:
        raise _invalid("n", f"n must be from 1 to {limits.MAX_N}, got {n}")
    num_each = _given(best_of, n)
    if not n <= num_each <= limits.MAX_N:
        raise _invalid("best_of", f"best_of must be from n, which is {n}, to {limits.MAX_N}, got {num_each}")
    if num_each > n and body.stream:
        raise _invalid("best_of", "best_of is not for streams: the best are known only when all have ended")
    if num_each * num_prompts > limits.MAX_CHOICES:
        each = f"n = {n}" if num_each == n else f"best_of = {num_each}"
        what = f"{num_prompts} prompts with {each} make {num_each * num_prompts} choices"
        raise _invalid("prompt", f"{what}: one request may have {limits.MAX_CHOICES}")
    return n, num_each


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    """`logprobs` and `top_logprobs` as one number."""
    num_top = _given(body.top_logprobs, 0)
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise _invalid("top_logprobs", f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {num_top}")
    if num_top > 0 and not body.logprobs:
        raise _invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    return num_top if body.logprobs else None


_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
"""Fields that SamplingParams has under the same name. Left out: the model's own default, or else the API's."""


def _sampling_params(
    body: GenerationRequest, max_tokens: int | None, reports: Reports, info: ModelInfo
) -> SamplingParams:
    echo = isinstance(body, CompletionRequest) and bool(body.echo)
    if max_tokens is not None and max_tokens < 1 and not (echo or reports.prompt_logprobs is not None):
        raise _invalid("max_tokens", f"max_tokens must be at least 1, got {max_tokens} (0 is for scoring: see echo)")
    of_prompt = [reports.prompt_logprobs, reports.logprobs if echo else None]
    given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    return SamplingParams(
        max_tokens=max_tokens,
        grammar=grammar_of(body.response_format, body.structured_outputs),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=reports.logprobs,
        prompt_logprobs=max((count for count in of_prompt if count is not None), default=None),
        **{**info.sampling_defaults, **given},
    )


def _fit_to_reading(params: SamplingParams, reading: Reading | None) -> SamplingParams:
    """The same, so that what is to be read is in the text, and a form is asked of what follows the thoughts only."""
    if reading is None:
        return params
    if reading.tool_format is not None and reading.tool_format.has_special_marks:
        params = replace(params, skip_special_tokens=False)
    if params.grammar is not None and reading.thinks:
        prefix = thoughts_before_form(is_thinking=reading.is_thinking)
        params = replace(params, grammar=replace(params.grammar, prefix=prefix))
    return params


def _choice_seed(seed: int | None, choice: int) -> int | None:
    """Choice 0 has the seed itself, so that it is what a request for one choice gets; the others have their own."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed % 2**64}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _conversation(
    body: ChatCompletionRequest | TokenizeRequest,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None,
) -> Conversation:
    goes_on = bool(body.continue_final_message)
    return Conversation(
        to_template(messages),
        add_generation_prompt=_given(body.add_generation_prompt, not goes_on),
        continue_final_message=goes_on,
        tools=tools,
        template_kwargs=_template_switches(body.chat_template_kwargs or {}),
    )


def _template_switches(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """`chat_template_kwargs`, if they are switches and nothing that reaches into the template's other inputs."""
    for name, value in given.items():
        if name not in TEMPLATE_SWITCHES:
            allowed = ", ".join(sorted(TEMPLATE_SWITCHES))
            raise _invalid("chat_template_kwargs", f"chat_template_kwargs may have {allowed}, got {name[:64]!r}")
        if not isinstance(value, str | int | float | None):  # bool is an int
            raise _invalid("chat_template_kwargs", f"chat_template_kwargs.{name} must be a string, number or boolean")
        if isinstance(value, str) and len(value) > limits.MAX_TEMPLATE_VALUE_LEN:
            most = limits.MAX_TEMPLATE_VALUE_LEN
            raise _invalid("chat_template_kwargs", f"chat_template_kwargs.{name} may have {most} characters at most")
    return given


_T = TypeVar("_T")


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _invalid(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")


@contextmanager
def _renamed(names: Mapping[str, str]) -> Iterator[None]:
    """The engine and the tokenizer know fields by one name; errors say the one that the client used."""
    try:
        yield
    except RequestError as error:
        param, message = error.param or "", str(error)
        ours = names.get(param, param)
        if "_" in param:  # `prompt` is a word as well
            message = message.replace(param, ours)
        raise RequestError(message, param=ours or None, code=error.code) from error
