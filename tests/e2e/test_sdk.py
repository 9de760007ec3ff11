"""OpenAI's own SDK against the real process: sync and async, whole and streamed, chat and completions, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.process import Daemon

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
PROMPT = "Once upon a time, there was a"


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=60.0) as sdk:
        yield sdk


@pytest.fixture
async def async_client(daemon: Daemon) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=60.0) as sdk:
        yield sdk


def test_models(client: OpenAI) -> None:
    [model] = client.models.list()
    assert model.id == "smollm2"
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError) as info:
        client.models.retrieve("gpt-9")
    assert info.value.code == "model_not_found"


def test_chat_knows_the_capital(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=MESSAGES, max_completion_tokens=32, temperature=0)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content is not None
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert "<|im_end|>" not in choice.message.content


def test_streamed_chat_is_the_whole_one_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=32, temperature=0)
    stream = client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    finish_reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert finish_reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_completion_and_its_stream(client: OpenAI) -> None:
    whole = client.completions.create(model="smollm2", prompt=PROMPT, max_tokens=12, temperature=0)
    stream = client.completions.create(model="smollm2", prompt=PROMPT, max_tokens=12, temperature=0, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert choices[-1].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12


def test_a_stop_string_cuts_before_itself(client: OpenAI) -> None:
    whole = client.completions.create(model="smollm2", prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text
    word = whole.split()[4]
    cut = client.completions.create(model="smollm2", prompt=PROMPT, max_tokens=24, temperature=0, stop=word).choices[0]
    assert cut.text == whole[: whole.index(word)]
    assert cut.finish_reason == "stop"


def test_several_prompts_and_choices_come_in_order(client: OpenAI) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    alone = [
        client.completions.create(model="smollm2", prompt=prompt, max_tokens=6, temperature=0).choices[0].text
        for prompt in prompts
    ]
    answer = client.completions.create(model="smollm2", prompt=prompts, n=2, max_tokens=6, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]


def test_a_seed_repeats_itself(client: OpenAI) -> None:
    def sample(seed: int | None) -> str:
        answer = client.completions.create(model="smollm2", prompt=PROMPT, max_tokens=16, temperature=1.5, seed=seed)
        return answer.choices[0].text

    assert sample(7) == sample(7)
    assert len({sample(None) for _ in range(3)}) == 3


def test_a_bad_value_is_a_bad_request_that_names_its_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as info:
        client.completions.create(model="smollm2", prompt=PROMPT, temperature=-1.0)
    assert info.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as info:
        client.chat.completions.create(model="smollm2", messages=[], stream=True)
    assert info.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt=PROMPT)


def test_a_prompt_beyond_the_context_says_both_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as info:
        client.completions.create(model="smollm2", prompt=[1000] * 100_000, max_tokens=1)
    assert info.value.code == "context_length_exceeded"
    assert "100000" in info.value.message.replace(",", "")


@pytest.mark.anyio
async def test_async_chat_and_completion(async_client: AsyncOpenAI) -> None:
    chat = await async_client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=32, temperature=0)
    assert "Paris" in (chat.choices[0].message.content or "")
    completion = await async_client.completions.create(model="smollm2", prompt=PROMPT, max_tokens=4)
    assert completion.choices[0].finish_reason in ("length", "stop")


@pytest.mark.anyio
async def test_async_streams_side_by_side(async_client: AsyncOpenAI) -> None:
    """Two streams read in turn, so that neither can have been finished before the other began."""
    streams = [
        await async_client.completions.create(
            model="smollm2", prompt=prompt, max_tokens=8, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        for prompt in (PROMPT, "The capital of France is")
    ]
    texts = ["", ""]
    for _ in range(4):
        for index, stream in enumerate(streams):
            texts[index] += (await anext(stream)).choices[0].text
    for index, stream in enumerate(streams):
        async for chunk in stream:
            texts[index] += chunk.choices[0].text
    assert all(texts)
    assert "Paris" in texts[1]


@pytest.mark.anyio
async def test_leaving_a_stream_frees_its_place(daemon: Daemon, async_client: AsyncOpenAI) -> None:
    stream = await async_client.completions.create(
        model="smollm2", prompt=PROMPT, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    assert daemon.gauge("chairlift_requests_running") == 1
    await stream.close()
    daemon.wait_idle()


def test_logprobs_by_the_sdk(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    for token in choice.logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob <= 0  # it is greedy
        assert len(token.top_logprobs) == 3
    said = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content).decode()
    assert said == choice.message.content


def test_a_prompt_is_scored_by_the_sdk(client: OpenAI) -> None:
    def score(text: str) -> float:
        answer = client.completions.create(model="smollm2", prompt=text, max_tokens=0, echo=True, logprobs=0)
        [choice] = answer.choices
        assert choice.text == text
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        return sum(each for each in choice.logprobs.token_logprobs if each is not None)

    assert score("The capital of France is Paris") > score("The capital of France is Oslo")


def test_best_of_and_penalties_by_the_sdk(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2",
        prompt=PROMPT,
        max_tokens=8,
        n=2,
        best_of=4,
        seed=1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"28": -100},
    )
    assert len(answer.choices) == 2
    assert answer.usage is not None
    assert 2 * 8 < answer.usage.completion_tokens <= 4 * 8  # all four are counted
    assert all("," not in choice.text for choice in answer.choices)
