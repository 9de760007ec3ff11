"""What a template may write, and do."""

from __future__ import annotations

import pytest

from engine.errors import RequestError
from engine.text import template
from engine.text.tokenizer import Tokenizer
from tests import factories_text as make

USER = {"role": "user", "content": "0123456789"}

MOST = 1000

LOOPS = "{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_RENDERED_LEN", MOST)


def render(source: str, num_messages: int) -> str:
    return Tokenizer(make.hf_byte_level(chat_template=source)).render_chat([USER] * num_messages)


@pytest.mark.parametrize(
    "source",
    [
        LOOPS,
        "{% set x %}" + LOOPS + "{% endset %}",
        "{% macro m() %}" + LOOPS + "{% endmacro %}{% set x = m() %}",
    ],
    ids=["text", "block", "macro"],
)
def test_a_conversation_that_blows_up_is_refused(source: str) -> None:
    render(source, 10)
    with pytest.raises(RequestError, match="more than 1000 characters") as caught:
        render(source, 11)
    assert caught.value.param == "messages"


def test_each_of_several_templates_is_bounded() -> None:
    source = "{% for a in messages %}{{ a.content }}{% endfor %}"
    tokenizer = Tokenizer(make.hf_byte_level(chat_template={"default": source, "tool_use": source + " "}))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tools in (None, [tool]):
        with pytest.raises(RequestError, match="more than 1000 characters"):
            tokenizer.render_chat([USER] * 101, tools=tools)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ('%c' * 4 | format(95, 95, 97, 95)).__class__ }}{{ ''|attr('__class__') }}",
        "{% set x = messages.append({}) %}",
        "{{ range(10000000) | list }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    """GGUF files and repositories bring templates along: they are other people's programs."""
    try:
        text = render(source, 1)
    except RequestError:
        return
    assert text == ""  # what is forbidden is undefined, which is nothing
