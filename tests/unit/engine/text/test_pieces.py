from __future__ import annotations

import pytest
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers

from engine.text import pieces as pieces_module
from engine.text.pieces import Pieces
from tests import factories_text as make


def test_byte_level_bytes():
    tokenizer = make.byte_level()
    assert tokenizer.pieces is not None
    assert {tokenizer.pieces[i] for i in range(tokenizer.vocab_size)} >= {bytes([byte]) for byte in range(256)}
    (chair,) = tokenizer.encode(" chair")
    assert tokenizer.pieces[chair] == b" chair"
    assert tokenizer.pieces[tokenizer.bos_token_id] == b"<|im_start|>"


def test_every_byte_has_the_character_that_tokenizers_gives_it():
    characters = pieces_module._bytes_of_characters()
    assert sorted(characters) == sorted(pre_tokenizers.ByteLevel.alphabet())
    decode = decoders.ByteLevel().decode
    assert all(decode([char, *"\u0142\u0140"]) for char in characters)
    for char, byte in characters.items():
        assert decode([char]) == bytes([byte]).decode(errors="replace")


def test_sentencepiece_bytes():
    tokenizer = make.sentencepiece()
    pieces = tokenizer.pieces
    assert pieces is not None
    assert pieces.strip_space
    assert not make.sentencepiece(strip_space=False).pieces.strip_space
    assert {pieces[i] for i in tokenizer.encode("好 é")} >= {"好".encode(), b" ", "é".encode()}
    assert pieces.by_id.index(b"\xff") == 3 + 0xFF


def test_ids_outside_the_table_have_no_bytes():
    pieces = make.byte_level().pieces
    assert pieces[-1] == pieces[make.byte_level().vocab_size] == b""


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
        ),
        None,
    ],
)
def test_other_decoders_have_no_table(decoder):
    backend = make.hf_sentencepiece().backend_tokenizer
    backend.decoder = decoder
    assert Pieces.of(backend) is None


def test_a_table_that_disagrees_with_the_tokenizer_is_not_used(monkeypatch):
    backend = make.hf_byte_level().backend_tokenizer
    assert Pieces.of(backend) is not None
    characters = pieces_module._bytes_of_characters()
    monkeypatch.setattr(pieces_module, "_bytes_of_characters", lambda: characters | {"a": ord("b")})
    assert Pieces.of(backend) is None


def test_added_tokens_read_as_the_tokenizer_reads_them():
    """Byte-level decoding takes letters with accents in an added token for bytes. So be it: the text is the same."""
    backend = make.hf_byte_level().backend_tokenizer
    backend.add_tokens([AddedToken("crème"), AddedToken("缆车")])
    pieces = Pieces.of(backend)
    assert pieces is not None
    creme, cable_car = backend.token_to_id("crème"), backend.token_to_id("缆车")
    assert pieces[creme].decode(errors="replace") == backend.decode([creme]) == "cr\ufffdme"
    assert pieces[cable_car].decode() == backend.decode([cable_car]) == "缆车"
