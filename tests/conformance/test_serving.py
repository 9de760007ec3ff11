"""18 to 22: clients that leave, busy servers, ids, grammars, and how much is reported."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.conformance.api import CHAT, COMPLETIONS, Api, error_of

RUNNING = re.compile(
    r"^(?:vllm:num_requests_(?:running|waiting)|llamacpp:requests_(?:processing|deferred))"
    r"(?:\{[^}]*\})? ([0-9.e+]+)$",
    re.MULTILINE,
)


def requests_inside(api: Api) -> float:
    """Running and waiting, by the metrics that several servers have."""
    numbers = RUNNING.findall(api.http.get("/metrics").text)
    if not numbers:
        pytest.skip("no metrics that say how many requests run")
    return sum(map(float, numbers))


@pytest.mark.parametrize("stream", [False, True], ids=["full", "stream"])
def test_18_a_client_that_leaves_frees_its_place(api: Api, stream: bool) -> None:
    requests_inside(api)
    body = {"model": api.model, "prompt": "Once", "max_tokens": 2000, "stream": stream}
    if api.takes(COMPLETIONS, "ignore_eos"):
        body["ignore_eos"] = True

    def leave(_: int) -> None:
        if stream:
            with api.http.stream("POST", COMPLETIONS, json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                api.http.post(COMPLETIONS, json=body, timeout=1.0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, range(4)))
    deadline = time.monotonic() + 20  # a busy machine is no failure
    while requests_inside(api) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert requests_inside(api) == 0


def test_19_health_answers_while_a_huge_prompt_is_tokenised(api: Api) -> None:
    probe = "/health" if api.http.get("/health").status_code == 200 else "/v1/models"
    statuses = []
    thread = threading.Thread(
        target=lambda: statuses.append(api.post(COMPLETIONS, {"prompt": "word " * 2_000_000}).status_code)
    )
    thread.start()
    slowest = 0.0
    while thread.is_alive():
        start = time.monotonic()
        assert api.http.get(probe).status_code == 200
        slowest = max(slowest, time.monotonic() - start)
    thread.join()
    assert statuses in ([400], [413])
    assert slowest < 2.0  # a busy machine is no failure; a blocked server is


def test_20_request_ids_are_echoed_and_may_repeat(api: Api) -> None:
    def ask(_: int) -> str | None:
        response = api.http.post(
            COMPLETIONS,
            json={"model": api.model, "prompt": "Hi", "max_tokens": 4},
            headers={"X-Request-Id": "the-same"},
        )
        assert response.status_code == 200
        return response.headers.get("x-request-id")

    with ThreadPoolExecutor(2) as pool:
        echoed = list(pool.map(ask, range(2)))
    assert echoed == ["the-same"] * 2 or not api.is_ours  # OpenAI's are its own


EXPLOSIVE = {
    "nested counts": {"structured_outputs": {"regex": "((a{0,1000}){0,1000}){0,1000}"}},
    "no regex": {"structured_outputs": {"regex": "("}},
    "deep schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"$ref": "#/$defs/none"}},
        }
    },
    "no grammar": {"structured_outputs": {"grammar": "start: undefined_rule"}},
}


@pytest.mark.parametrize(
    ("may_work", "body"), [(name == "nested counts", body) for name, body in EXPLOSIVE.items()], ids=EXPLOSIVE.keys()
)
def test_21_grammars_that_blow_up_are_refused_or_work_in_time_and_others_go_on(
    api: Api, may_work: bool, body: dict[str, object]
) -> None:
    if "structured_outputs" in body and not api.takes(CHAT, "structured_outputs"):
        pytest.skip("the server has no structured_outputs")
    start = time.monotonic()
    response = api.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4} | body)
    if not (may_work and response.status_code == 200):
        assert response.status_code == 400
        error_of(response)
    assert time.monotonic() - start < 30
    assert api.complete("Hi", max_tokens=2).finish_reason == "length"


def test_models_are_listed_and_found_by_id(api: Api) -> None:
    [model, *_] = api.http.get("/v1/models").json()["data"]
    assert model["object"] == "model"
    assert api.http.get(f"/v1/models/{model['id'].replace('/', '%2F')}").json()["id"] == model["id"]
    response = api.http.get("/v1/models/no-such-model")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"
    response = api.http.post(COMPLETIONS, json={"model": "no-such-model", "prompt": "Hi"})
    assert response.status_code == 404
    error_of(response)


def test_usage_counts_prompts_once_and_choices_together(api: Api) -> None:
    [once] = api.complete("Hello there", max_tokens=3).usages
    answer = api.complete(["Hello there", "Hello there"], max_tokens=3, n=2, temperature=0.1, seed=1)
    [usage] = answer.usages
    assert usage["prompt_tokens"] == 2 * once["prompt_tokens"]
    assert [choice.finish_reasons for choice in answer.choices.values()] == [["length"]] * 4
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_tokenize_and_detokenize_are_inverse(api: Api) -> None:
    text = "naïve café 😀\n\tdone"
    api.ids_of(text)
    answer = api.post("/tokenize", {"prompt": text}).json()
    assert answer["count"] == len(answer["tokens"])
    assert api.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"] == text
