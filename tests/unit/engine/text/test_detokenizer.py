"""Joined, the pieces are what `decode` makes of all tokens; each piece comes as soon as its characters are whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from tests import factories_text as make

BAD = "\ufffd"
TEXTS = [
    "The chairlift never stops.",
    "缆车从不停止，リフトは止まりません。",
    "👩‍🚀 and 🏳️‍🌈, é or é; don't 1234",
    "  two spaces,\n\n\ttabs  ",
    "",
]
texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=20), st.text("a好é👩\u200d🚀 \n", max_size=20)).filter(
    lambda text: BAD not in text
)


def token_lists(tokenizer: Tokenizer):
    """Any ids at all, also just past the vocabulary."""
    return st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24)


def stream(detokenizer: Detokenizer, ids: Sequence[int], *, size: int = 1):
    """The text in the pieces in which it comes, `size` tokens at a time; the last is what was held."""
    return [detokenizer.feed(ids[i : i + size]) for i in range(0, len(ids), size)] + [detokenizer.flush()]


def joined(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool, size: int = 1, prompt: Sequence[int] = ()):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, prompt_token_ids=prompt)
    return "".join(stream(detokenizer, ids, size=size))


def whole_characters(tokenizer: Tokenizer, ids: Sequence[int]):
    """The text of these tokens, without a character that they leave incomplete."""
    if tokenizer.pieces is None:
        return tokenizer.decode(ids)
    text = b"".join([tokenizer.pieces[i] for i in ids if i not in tokenizer.special_token_ids]).decode(errors="ignore")
    return text.removeprefix(" ") if tokenizer.pieces.strip_space else text


# --- The same text as decode() ---


@given(token_lists(make.byte_level()), st.booleans(), st.integers(1, 5))
def test_byte_level_any_tokens_at_all(ids, skip, size):
    tokenizer = make.byte_level()
    assert joined(tokenizer, ids, skip=skip, size=size) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("make_tokenizer", [make.word_piece, make.metaspace])
@given(st.data(), st.booleans(), st.integers(1, 5))
def test_other_decoders_any_tokens_at_all(make_tokenizer, data, skip, size):
    tokenizer = make_tokenizer()
    assert tokenizer.pieces is None
    ids = data.draw(token_lists(tokenizer))
    assert joined(tokenizer, ids, skip=skip, size=size) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("strip_space", [True, False])
@given(texts, st.booleans(), st.integers(1, 5))
def test_sentencepiece_texts(strip_space, text, skip, size):
    tokenizer = make.sentencepiece(strip_space=strip_space)
    ids = tokenizer.encode(text)
    assert joined(tokenizer, ids, skip=skip, size=size) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("strip_space", [True, False])
@given(st.data(), st.booleans(), st.integers(1, 5))
def test_sentencepiece_any_tokens_at_all(strip_space, data, skip, size):
    """Unless bytes are broken the text is decode()'s; if they are, fewer characters are lost."""
    tokenizer = make.sentencepiece(strip_space=strip_space)
    ids = data.draw(token_lists(tokenizer))
    text, whole = joined(tokenizer, ids, skip=skip, size=size), tokenizer.decode(ids, skip_special_tokens=skip)
    if BAD in whole:
        assert len(text.encode()) >= len(whole.replace(BAD, "").encode())
        assert text.count(BAD) <= whole.count(BAD)
    else:
        assert text == whole


def byte_ids(tokenizer: Tokenizer, data: bytes):
    """The tokens of single bytes."""
    return [tokenizer.pieces.by_id.index(bytes([byte])) for byte in data]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("好".encode()[:2], BAD * 2),  # cut off: each byte, as decode() has it
        ("好".encode() + b"\xff", "好" + BAD),  # decode() would lose the good character
        (b"\xff" + "好".encode(), BAD + "好"),
        (b"\xe5\xe5" + "好".encode(), BAD * 2 + "好"),
        (b"\x80\x80", BAD * 2),
        (BAD.encode(), BAD),
    ],
)
def test_sentencepiece_broken_bytes(data, text):
    tokenizer = make.sentencepiece()
    assert joined(tokenizer, byte_ids(tokenizer, data), skip=True) == text


def test_byte_level_cut_off_character_is_one_replacement():
    tokenizer = make.byte_level()
    ids = byte_ids(tokenizer, "好".encode()[:2])
    assert stream(Detokenizer(tokenizer, skip_special_tokens=True), ids) == ["", "", BAD]
    assert tokenizer.decode(ids) == BAD


# --- As soon as it is there ---


@pytest.mark.parametrize("make_tokenizer", [make.byte_level, make.sentencepiece])
@given(texts)
@example("👩‍🚀🏳️‍🌈缆车从不停止。リフト")
def test_each_character_comes_with_its_last_token(make_tokenizer, text):
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        piece = detokenizer.feed([token_id])
        assert BAD not in piece
        shown += piece
        assert shown == whole_characters(tokenizer, ids[:count])
    assert detokenizer.flush() == ""


def test_emoji_of_several_characters_comes_one_by_one():
    tokenizer = make.byte_level()
    pieces = stream(Detokenizer(tokenizer, skip_special_tokens=True), tokenizer.encode("👩‍🚀"))
    assert [piece for piece in pieces if piece] == ["👩", "\u200d", "🚀"]


# --- Special tokens ---


def test_special_tokens_are_skipped_or_shown():
    tokenizer = make.byte_level()
    ids = tokenizer.encode("<|im_start|>a<tool>b<|im_end|>")
    assert joined(tokenizer, ids, skip=True) == "a<tool>b"
    assert joined(tokenizer, ids, skip=False) == "<|im_start|>a<tool>b<|im_end|>"


def test_a_skipped_token_does_not_break_a_character():
    tokenizer = make.sentencepiece()
    first, *rest = byte_ids(tokenizer, "👩".encode())
    ids = [first, tokenizer.bos_token_id, *rest]
    assert joined(tokenizer, ids, skip=True) == tokenizer.decode(ids) == "👩"
    assert joined(tokenizer, ids, skip=False) == BAD + "<s>" + BAD * 3


def test_ids_outside_the_vocabulary_have_no_text():
    for tokenizer in (make.byte_level(), make.word_piece()):
        assert joined(tokenizer, [tokenizer.vocab_size, 10**6], skip=True) == ""


# --- After a prompt ---


def test_the_space_of_the_first_word_stays_after_a_prompt():
    tokenizer = make.sentencepiece()
    prompt, output = tokenizer.encode("a lift"), tokenizer.encode("lift", add_special_tokens=False)
    assert joined(tokenizer, output, skip=True, prompt=prompt) == " lift"
    assert joined(tokenizer, output, skip=True) == "lift"


def test_a_prompt_without_text_is_the_start_of_the_text():
    tokenizer = make.sentencepiece()
    output = tokenizer.encode("lift", add_special_tokens=False)
    assert joined(tokenizer, output, skip=True, prompt=[tokenizer.bos_token_id]) == "lift"
    assert joined(tokenizer, output, skip=False, prompt=[tokenizer.bos_token_id]) == " lift"


@pytest.mark.parametrize("make_tokenizer", [make.byte_level, make.sentencepiece, make.word_piece, make.metaspace])
@given(st.data(), texts)
def test_the_text_is_what_comes_after_the_prompts(make_tokenizer, data, text):
    """Wherever the prompt ends, also inside a character, which the output then completes."""
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    before, whole = whole_characters(tokenizer, ids[:cut]), tokenizer.decode(ids)
    if cut < len(ids):
        assert joined(tokenizer, ids[cut:], skip=True, prompt=ids[:cut]) == whole[len(before) :]


# --- Work per token ---


class Spy:
    """A tokenizer that keeps how much was decoded at a time."""

    def __init__(self, tokenizer: Tokenizer):
        self.pieces, self.special_token_ids = tokenizer.pieces, tokenizer.special_token_ids
        self.vocab_size = tokenizer.vocab_size
        self.sizes: list[int] = []
        self._tokenizer = tokenizer

    def decode(self, token_ids, **options):
        self.sizes.append(len(token_ids))
        return self._tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("text", ["chair lift s . chair stops" * 50, "?" * 200])
def test_other_decoders_decode_a_few_tokens_at_a_time(text):
    spy = Spy(make.word_piece())
    ids = make.word_piece().encode(text, add_special_tokens=False)
    # Tokens without text must not pile up either.
    ids += [10**6] * 300
    stream(Detokenizer(spy, skip_special_tokens=True), ids)
    assert max(spy.sizes) <= 8


def test_byte_decoders_never_decode_anew():
    spy = Spy(make.byte_level())
    stream(Detokenizer(spy, skip_special_tokens=True), list(range(300)))
    assert spy.sizes == []
