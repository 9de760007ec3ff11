"""Text -> thoughts, content and calls: the same wherever the text is cut, and nothing lost or told twice."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat.reader import Reading
from server.chat.reasoning import opens_thoughts
from server.chat.said import Call, Said
from server.chat.tools import FORMATS

NAMES = frozenset({"f", "get.time"})
F = Call("f", '{"a": 1}')


def read(reading: Reading, *pieces: str) -> Said:
    reader = reading.reader()
    return sum((reader.feed(piece) for piece in pieces), Said()) + reader.flush()


def tools(name: str, *, has_parallel_calls: bool = True) -> Reading:
    return Reading(tool_format=FORMATS[name], tool_names=NAMES, has_parallel_calls=has_parallel_calls)


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


# --- Any text, however it is cut ---

PIECES = {
    "think": ["<think>", "</think>", "<thi", "</", "nk>"],
    "hermes": [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {"a": 1}}',
        '"',
        "{",
        "<tool",
        '"</tool_call>"',
    ],
    "llama3_json": ["<|python_tag|>", '{"name": "f", "parameters": {"a": 1}}', ";", "{", "}", "<|py", '"'],
    "mistral": ["[TOOL_CALLS]", '[{"name": "f", "arguments": {"a": 1}}]', 'f{"a": 1}', "[TOOL", "[", "]", "f[ARGS]{"],
    "pythonic": ["[f(a=1)]", "[", "]", "f(", ")", "'", "get.time()", ","],
}


def texts(*kinds: str) -> st.SearchStrategy[str]:
    marks = [piece for kind in kinds for piece in PIECES[kind]]
    piece = st.sampled_from([*marks, "\n", " ", "hello"]) | st.text(max_size=3)
    return st.lists(piece, max_size=8).map("".join)


@given(data=st.data(), name=st.sampled_from(sorted(FORMATS)), thinks=st.booleans(), is_thinking=st.booleans())
def test_it_makes_no_difference_where_the_text_is_cut(
    data: st.DataObject, name: str, thinks: bool, is_thinking: bool
) -> None:
    reading = Reading(thinks, thinks and is_thinking, FORMATS[name], NAMES)
    text = data.draw(texts("think", name))
    whole = read(reading, text)
    assert read(reading, *text) == whole
    assert read(reading, *cut(text, data.draw(st.lists(st.integers(0, 200), max_size=4)))) == whole
    assert all(call.arguments.startswith("{") for call in whole.calls)
    assert {call.name for call in whole.calls} <= NAMES


@given(text=texts("think"), is_thinking=st.booleans())
def test_thoughts_and_content_have_every_character_but_the_tags(text: str, is_thinking: bool) -> None:
    said = read(Reading(thinks=True, is_thinking=is_thinking), *text)
    opens = text.lstrip().startswith("<think>")
    if not is_thinking and not opens:
        assert said == Said(text)
        return
    thoughts, _, content = (text if is_thinking else text.replace("<think>", "", 1)).partition("</think>")
    assert said == Said(content, thoughts)


@given(data=st.data(), name=st.sampled_from(sorted(FORMATS)))
def test_a_text_without_calls_is_content_whole(data: st.DataObject, name: str) -> None:
    text = data.draw(texts(name))
    reading = Reading(tool_format=FORMATS[name], tool_names=frozenset({"another"}))
    assert read(reading, text) == Said(text)


# --- Thoughts ---


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>Hm.\n</think>\n\nYes.", Said("\n\nYes.", "Hm.\n")),
        ("\n<think>Hm", Said("", "\nHm")),
        ("Yes.<think>Hm</think>", Said("Yes.<think>Hm</think>")),
        ("<think></think>Yes.</think>", Said("Yes.</think>")),
        ("<thin", Said("<thin")),
        ("<think>Hm</thin", Said("", "Hm</thin")),
    ],
)
def test_thoughts(text: str, said: Said) -> None:
    assert read(Reading(thinks=True), *text) == said


def test_thoughts_that_the_prompt_has_opened() -> None:
    assert read(Reading(thinks=True, is_thinking=True), *"Hm.</think>Yes.") == Said("Yes.", "Hm.")
    assert opens_thoughts("<|im_start|>assistant\n<think>\n")
    assert not opens_thoughts("<think>\n\n</think>\n\n")


def test_content_is_told_at_once_where_no_tag_can_come_of_it() -> None:
    reader = Reading(thinks=True).reader()
    assert reader.feed("<") == Said()
    assert reader.feed("b>") == Said("<b>")
    assert reader.feed("</think>") == Said("</think>")


def test_thoughts_may_come_before_calls_and_none_are_made_in_them() -> None:
    reading = Reading(True, False, FORMATS["hermes"], NAMES)
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert read(reading, *f"<think>{call}</think>\n\n{call}") == Said("", call, (F,))


# --- Calls ---

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALLS = [
    ("hermes", HERMES, Said("", "", (F,))),
    ("hermes", f"Well:\n{HERMES}\n{HERMES}\n", Said("Well:\n", "", (F, F))),
    ("hermes", f"{HERMES}\nDone.", Said("\nDone.", "", (F,))),
    ("hermes", HERMES.removesuffix("\n</tool_call>"), Said("", "", (F,))),
    ("hermes", HERMES.replace("1", '"</tool_call>"'), Said("", "", (Call("f", '{"a": "</tool_call>"}'),))),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', Said("", "", (Call("f", "{}"),))),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', Said("", "", (F,))),
    ("llama3_json", '<|python_tag|>{"name": "f", "arguments": {"a": 1}}', Said("", "", (F,))),
    ("llama3_json", '\n{"name": "f", "parameters": {"a": 1}}; {"name": "f"}', Said("", "", (F, Call("f", "{}")))),
    ("llama3_json", '{"name": "Bob"} is JSON', Said('{"name": "Bob"} is JSON')),
    ("llama3_json", "<|python_tag|>print(1)", Said("<|python_tag|>print(1)")),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]',
        Said("", "", (F, Call("f", "{}"))),
    ),
    ("mistral", 'So: [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 1}', Said("So: ", "", (F, F))),
    ("mistral", "[TOOL_CALLS]" + "x" * 200, Said("[TOOL_CALLS]" + "x" * 200)),
    ("pythonic", "[f(a=1), get.time()]", Said("", "", (F, Call("get.time", "{}")))),
    ("pythonic", "[f(a=[1, {'b': None}])]", Said("", "", (Call("f", '{"a": [1, {"b": null}]}'),))),
    ("pythonic", "[f(a='it\\'s ] ok')] Done", Said(" Done", "", (Call("f", '{"a": "it\'s ] ok"}'),))),
    ("pythonic", "[a link](x) and [f(a=1)]", Said("[a link](x) and [f(a=1)]")),
]


@pytest.mark.parametrize(("name", "text", "said"), CALLS)
def test_calls(name: str, text: str, said: Said) -> None:
    assert read(tools(name), text) == said
    assert read(tools(name), *text) == said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>oh</tool_call> well"),
        ("hermes", '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": '),
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("llama3_json", '{"name": "f", "parameters"'),
        ("mistral", '[TOOL_CALLS]f[{"a": 1}]'),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(**{})]"),
        ("pythonic", "[f(a=g())]"),
        ("pythonic", "[f(a=b'x')]"),
        ("pythonic", "[f(a={1, 2})]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a=" + "(" * 10_000 + ")" * 10_000 + ")]"),
        ("pythonic", "[f(a="),
    ],
)
def test_what_is_malformed_before_a_call_begins_stays_content(name: str, text: str) -> None:
    assert read(tools(name), text) == Said(text)


def test_only_the_first_call_is_kept_if_one_is_wanted() -> None:
    assert read(tools("hermes", has_parallel_calls=False), HERMES + HERMES) == Said("", "", (F,))
    both = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]'
    assert read(tools("mistral", has_parallel_calls=False), both) == Said("", "", (F,))


def test_content_streams_where_no_call_can_come_of_it() -> None:
    reader = tools("hermes").reader()
    assert [reader.feed(piece) for piece in ("Hel", "lo <", "b", "> <to")] == [
        Said("Hel"),
        Said("lo "),
        Said("<b"),
        Said("> "),
    ]


# --- Calls as they come ---

HEADS = {
    "hermes": ('<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
    "llama3_json": ('{"name": "f", "parameters": ', "}"),
    "mistral": ("[TOOL_CALLS]f[ARGS]", ""),
}
"""What stands before and behind a call's arguments."""
objects = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(['"}', "</tool_call>", "\\"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
).map(lambda value: {"a": value})


@given(name=st.sampled_from(sorted(HEADS)), values=st.lists(objects, min_size=1, max_size=3), indent=st.booleans())
def test_arguments_are_told_to_the_character_as_they_come(name: str, values: list[object], indent: bool) -> None:
    head, tail = HEADS[name]
    texts = [json.dumps(value, ensure_ascii=False, indent=1 if indent else None) for value in values]
    reader = tools(name).reader()
    told = Said()
    for text in texts:
        for character in f"{head}{text}{tail}\n":
            news = reader.feed(character)
            told += news
            is_within = told.calls and told.calls[-1].arguments and reader.is_in_call
            assert not is_within or news.calls  # nothing is held back
    told += reader.flush()
    assert told == Said(calls=tuple(Call("f", text) for text in texts))
    assert not reader.is_in_call


@pytest.mark.parametrize("name", sorted(HEADS))
def test_a_call_that_is_cut_off_has_arguments_that_are(name: str) -> None:
    head, _ = HEADS[name]
    reader = tools(name).reader()
    assert sum(map(reader.feed, head + '{"a": "}'), Said()) + reader.flush() == Said(calls=(Call("f", '{"a": "}'),))
    assert reader.is_in_call


def test_names_that_no_tool_has_begin_nothing_and_neither_does_a_second_call_where_one_is_allowed() -> None:
    head, tail = HEADS["hermes"]
    nobodys = f'{head.replace("f", "g", 1)}{{"a": 1}}{tail}'
    assert read(tools("hermes"), *nobodys) == Said(nobodys)
    one = f'{head}{{"a": 1}}{tail}'
    assert read(tools("hermes", has_parallel_calls=False), *(one + one)) == Said("", "", (F,))


def test_a_call_whose_name_comes_late_is_told_whole() -> None:
    late = '<tool_call>{"arguments": {"a":1}, "name": "f"}</tool_call>'
    far = f'<tool_call>{" " * 600}{{"name": "f", "arguments": {{"a":1}}}}</tool_call>'
    for text in (late, far):
        assert read(tools("hermes"), text) == read(tools("hermes"), *text) == Said("", "", (F,))
