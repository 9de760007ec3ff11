from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import EngineError, ModelError, RequestError
from engine.text.tokenizer import Tokenizer
from tests import factories_text as make

USER = {"role": "user", "content": "Hi"}


def save(hf_tokenizer, directory, **configs):
    """A model's directory with its tokenizer and some JSON files, by name."""
    hf_tokenizer.save_pretrained(directory)
    for name, config in configs.items():
        (directory / f"{name}.json").write_text(json.dumps(config))
    return directory


def with_template(template: str | None, **settings) -> Tokenizer:
    return Tokenizer(make.hf_byte_level(chat_template=template, **settings))


# --- Loading ---


def test_a_loaded_tokenizer_is_the_one_saved(tmp_path):
    tokenizer = Tokenizer.load(save(make.hf_byte_level(), tmp_path))
    assert tokenizer.encode("The chair 好") == make.byte_level().encode("The chair 好")
    assert tokenizer.vocab_size == make.byte_level().vocab_size == len(make.hf_byte_level())
    assert tokenizer.has_chat_template
    assert tokenizer.pieces == make.byte_level().pieces


def test_end_of_text_tokens_are_the_tokenizers_and_the_generation_configs(tmp_path):
    directory = save(make.hf_byte_level(), tmp_path, generation_config={"eos_token_id": [0, 7]}, config={})
    assert Tokenizer.load(directory).eos_token_ids == {0, 7, 2}


@pytest.mark.parametrize(
    ("configs", "eos_token_ids"),
    [
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 9}}, {0, 2}),
        ({"config": {"eos_token_id": 0}}, {0, 2}),
        ({"generation_config": {}, "config": {"eos_token_id": 0}}, {2}),
        ({}, {2}),
    ],
)
def test_which_config_names_the_end_of_text(tmp_path, configs, eos_token_ids):
    assert Tokenizer.load(save(make.hf_byte_level(), tmp_path, **configs)).eos_token_ids == eos_token_ids


def test_bos_token():
    assert make.byte_level().bos_token_id == 1
    assert make.word_piece().bos_token_id is None


def test_a_directory_without_a_tokenizer_is_no_model(tmp_path):
    with pytest.raises(ModelError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)


def test_a_broken_generation_config_is_named(tmp_path):
    directory = save(make.hf_byte_level(), tmp_path)
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        Tokenizer.load(directory)


def test_a_tokenizer_written_in_python_is_refused():
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(ModelError, match="slow one, written in Python \\(SlowTokenizer\\)") as error:
        Tokenizer(SlowTokenizer())
    assert "tokenizer.json" in str(error.value.hint)


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    hf_tokenizer = make.hf_byte_level()
    hf_tokenizer.backend_tokenizer.enable_truncation(3)
    hf_tokenizer.backend_tokenizer.enable_padding(length=50)
    hf_tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    text = "The chairlift never stops"
    assert Tokenizer.load(tmp_path).encode(text) == make.byte_level().encode(text)


# --- Encoding and decoding ---


@pytest.mark.parametrize("make_hf", [make.hf_byte_level, make.hf_sentencepiece, make.hf_word_piece, make.hf_metaspace])
@pytest.mark.parametrize("text", ["The chairlift, 好 👩‍🚀", "<|im_end|></s>[SEP]", "", " a  b "])
def test_ids_are_those_of_transformers(make_hf, text):
    hf_tokenizer = make_hf()
    tokenizer = Tokenizer(hf_tokenizer)
    for special in (True, False):
        expected = hf_tokenizer(text, add_special_tokens=special).input_ids
        assert tokenizer.encode(text, add_special_tokens=special) == expected
        assert tokenizer.decode(expected, skip_special_tokens=special) == hf_tokenizer.decode(
            expected, skip_special_tokens=special, clean_up_tokenization_spaces=False
        )


def test_special_tokens_around_the_text_are_a_choice():
    tokenizer = make.sentencepiece()
    assert tokenizer.encode("lift")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("lift", add_special_tokens=False) == tokenizer.encode("lift")[1:]


def test_spaces_are_not_cleaned_up():
    hf_tokenizer = make.hf_metaspace(clean_up_tokenization_spaces=True)
    ids = hf_tokenizer.convert_tokens_to_ids(["▁chair", "▁", "."])
    assert hf_tokenizer.decode(ids) == "chair."
    assert Tokenizer(hf_tokenizer).decode(ids) == "chair ."


def test_ids_past_the_vocabulary_have_no_text():
    tokenizer = make.byte_level()
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.vocab_size, *tokenizer.encode("b")]) == "ab"


@pytest.mark.parametrize("text", ["\ud800", "a\udc00b", "ok \ud83d\u200d"])
def test_lone_surrogates_are_the_requests_fault(text):
    with pytest.raises(RequestError, match="lone surrogate") as error:
        make.byte_level().encode(text)
    assert error.value.param == "prompt"
    with pytest.raises(RequestError, match="lone surrogate") as error:
        make.byte_level().render_chat([{"role": "user", "content": text}])
    assert error.value.param == "messages"


# --- Chat ---


def test_chat_text_encodes_without_further_special_tokens():
    tokenizer = make.byte_level()
    text = tokenizer.render_chat([{"role": "system", "content": "Be brief."}, USER])
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(text, add_special_tokens=False).count(tokenizer.bos_token_id) == 3


def test_without_generation_prompt():
    assert make.byte_level().render_chat([USER], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_the_final_message_can_be_left_open():
    messages = [USER, {"role": "assistant", "content": "Hello, I"}]
    text = make.byte_level().render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello, I"


def test_opening_a_turn_and_continuing_one_exclude_each_other():
    with pytest.raises(RequestError, match="exclude each other") as error:
        make.byte_level().render_chat([USER], continue_final_message=True)
    assert error.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([], ""),
        (None, ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_content_in_parts_or_absent(role, content, text):
    rendered = make.byte_level().render_chat([{"role": role, "content": content}], add_generation_prompt=False)
    assert rendered == f"<|im_start|>{role}\n{text}<|im_end|>\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], 'got "image_url"'),
        ([{"type": "text"}], 'got "text"'),
        ([{"type": "text", "text": 1}], 'got "text"'),
        (["a"], "got one without a type"),
        (1, "must be a string or a list"),
        ({"text": "a"}, "must be a string or a list"),
    ],
)
def test_other_content_is_refused(content, message):
    with pytest.raises(RequestError, match=message) as error:
        make.byte_level().render_chat([{"role": "user", "content": content}])
    assert error.value.param == "messages"


def test_the_callers_messages_stay_as_they_are():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    make.byte_level().render_chat(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_a_templates_own_complaint_is_passed_on():
    with pytest.raises(RequestError, match=r"^Unknown role moderator$") as error:
        make.byte_level().render_chat([{"role": "moderator", "content": "Hi"}])
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].name.first }}",  # undefined
        "{{ messages[0].content + 1 }}",  # TypeError
        "{{ 1 // 0 }}",
        "{% for %}",  # does not parse
    ],
)
def test_whatever_a_template_raises_fails_the_request_alone(template):
    with pytest.raises(RequestError) as error:
        with_template(template).render_chat([USER])
    assert error.value.param == "messages"


def test_no_messages_are_refused():
    with pytest.raises(RequestError, match="empty conversation") as error:
        make.byte_level().render_chat([])
    assert error.value.param == "messages"


def test_without_a_template_the_error_says_what_to_do():
    tokenizer = with_template(None)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template.*/v1/completions"):
        tokenizer.render_chat([USER])


def test_tools_and_arguments_reach_the_template():
    tokenizer = with_template("{{ tools[0].function.name }} {{ enable_thinking }} {{ eos_token }}")
    tools = [{"type": "function", "function": {"name": "lift"}}]
    text = tokenizer.render_chat([USER], tools=tools, template_kwargs={"enable_thinking": False})
    assert text == "lift False <|im_end|>"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "add_generation_prompt"])
def test_arguments_that_are_not_the_templates_are_refused(name):
    with pytest.raises(RequestError, match=name) as error:
        make.byte_level().render_chat([USER], template_kwargs={name: "x"})
    assert error.value.param == "chat_template_kwargs"


# --- Threads ---


def test_many_threads_use_one_tokenizer():
    tokenizer = make.byte_level()
    texts = [f"The chairlift {i} never stops 好👩‍🚀 " * (1 + i % 7 * 20) for i in range(64)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(pool.map(tokenizer.encode, texts))
        assert list(pool.map(tokenizer.decode, encoded)) == texts
        chats = list(pool.map(lambda text: tokenizer.render_chat([{"role": "user", "content": text}]), texts))
    assert encoded == expected
    assert all(text in chat for text, chat in zip(texts, chats, strict=True))


def test_other_threads_run_while_one_encodes():
    tokenizer = make.byte_level()
    text = "The chairlift never stops. " * 40_000
    thread = threading.Thread(target=tokenizer.encode, args=(text,))
    turns = 0
    tick = threading.Event()
    thread.start()
    while thread.is_alive():
        tick.wait(0.0005)
        turns += 1
    # Were the interpreter held, this thread would have had a turn or two: as it starts, and when it has ended.
    assert turns > 10


def test_a_panic_of_the_rust_tokenizer_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panicking:
        def encode_batch_fast(self, *_: object, **__: object) -> None:
            raise type("PanicException", (BaseException,), {})("index out of bounds")

        decode = encode_batch_fast

    tokenizer = Tokenizer(make.hf_byte_level())
    monkeypatch.setattr(tokenizer, "_backend", Panicking())
    for call in (lambda: tokenizer.encode("x"), lambda: tokenizer.decode([1])):
        with pytest.raises(EngineError, match="the tokenizer failed on this text"):
            call()
