"""One answer in its two forms, put into one: what a client that only follows the contract makes of either."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Choice:
    """What one choice says, however it was sent."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    """Name and arguments of each."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: dict[str, list[Any]] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


def of_full(answer: dict[str, Any]) -> tuple[list[Choice], dict[str, Any]]:
    """The choices and the usage of a full answer."""
    choices = []
    for index, given in enumerate(answer["choices"]):
        assert given["index"] == index
        choice = Choice(finish_reason=given["finish_reason"], stop_reason=given["stop_reason"])
        if (message := given.get("message")) is None:
            choice.text = given["text"]
        else:
            assert message["role"] == "assistant"
            calls = message.get("tool_calls", [])
            assert len({call["id"] for call in calls}) == len(calls)
            assert message["content"] is not None or calls
            choice.text = message["content"] or ""
            choice.reasoning = message.get("reasoning_content", "")
            choice.calls = [dict(call["function"]) for call in calls]
        _add_reports(choice, given)
        choices.append(choice)
    return choices, answer["usage"]


def of_stream(events: list[dict[str, Any]]) -> tuple[list[Choice], dict[str, Any] | None]:
    """The choices and the usage of a stream's events; checks what holds for each event on the way."""
    usage = None
    if events and not events[-1]["choices"]:
        usage = events.pop()["usage"]
    choices: dict[int, Choice] = {}
    ids: dict[int, set[str]] = {}
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    for event in events:
        (given,) = event["choices"]
        is_first = given["index"] not in choices
        choice = choices.setdefault(given["index"], Choice())
        assert choice.finish_reason is None, "something follows a choice's last delta"
        if (delta := given.get("delta")) is None:
            choice.text += given["text"]
        else:
            assert ("role" in delta) == is_first
            choice.text += delta.get("content", "")
            choice.reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                _add_call(choice, call, ids.setdefault(given["index"], set()))
        choice.finish_reason = given["finish_reason"]
        choice.stop_reason = given.get("stop_reason")
        _add_reports(choice, given)
    assert sorted(choices) == list(range(len(choices)))
    return [choices[index] for index in sorted(choices)], usage


def _add_call(choice: Choice, call: dict[str, Any], ids: set[str]) -> None:
    """Id, type and name come once, with the call's first delta; arguments come in pieces."""
    function = call["function"]
    if call["index"] == len(choice.calls):
        assert call["type"] == "function"
        assert call["id"] not in ids
        ids.add(call["id"])
        choice.calls.append({"name": function["name"], "arguments": function["arguments"]})
    else:
        assert call["index"] == len(choice.calls) - 1, "a call goes on after the next has begun"
        assert set(call) == {"index", "function"}
        assert set(function) == {"arguments"}
        choice.calls[-1]["arguments"] += function["arguments"]


def _add_reports(choice: Choice, given: dict[str, Any]) -> None:
    """Logprobs and token ids: lists that are joined."""
    if (logprobs := given["logprobs"]) is not None:
        columns = {name: values for name, values in logprobs.items() if isinstance(values, list)}
        if choice.logprobs is None:
            choice.logprobs = {name: [] for name in columns}
        for name, values in columns.items():
            choice.logprobs[name] += values
    for name in ("token_ids", "prompt_token_ids"):
        if name in given:
            setattr(choice, name, (getattr(choice, name) or []) + given[name])
