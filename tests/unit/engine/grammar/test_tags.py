"""Tags that are tokens are text for grammars."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken

from engine.grammar.matcher import Vocabulary, compile_grammar, source_of
from engine.grammar.tags import with_tags_as_text
from engine.params import FreePrefix, GrammarSpec
from engine.text.tokenizer import Tokenizer
from tests.factories_text import hf_byte_level, hf_metaspace, hf_sentencepiece


@pytest.mark.parametrize("hf_tokenizer", [hf_byte_level, hf_sentencepiece])
def test_a_tag_may_be_written_as_one_token_unless_it_is_special(hf_tokenizer) -> None:  # type: ignore[no-untyped-def]
    made = hf_tokenizer()
    tags = [AddedToken(tag, special=False, normalized=False) for tag in ("</think>", "<a b>")]
    made.backend_tokenizer.add_tokens([*tags, AddedToken("<tag>", special=True)])
    tokenizer = Tokenizer(made)
    close, special = (made.backend_tokenizer.token_to_id(tag) for tag in ("</think>", "<tag>"))
    source = with_tags_as_text(tokenizer.to_json())
    vocabulary = Vocabulary(source, vocab_size=448, eos_token_ids=tokenizer.eos_token_ids)
    spec = GrammarSpec("regex", "(好|<tag>)", prefix=FreePrefix(end="</think>"))
    matcher = compile_grammar(source_of(spec), vocabulary).start()
    mask = matcher.mask()
    assert mask[close // 8] >> close % 8 & 1
    assert not mask[special // 8] >> special % 8 & 1
    assert matcher.accept(close)
    mask = matcher.mask()
    assert not mask[special // 8] >> special % 8 & 1
    for token_id in tokenizer.encode("好", add_special_tokens=False)[-1:]:
        assert mask[token_id // 8] >> token_id % 8 & 1 or hf_tokenizer is hf_byte_level


def test_only_tags_move_and_keep_their_ids() -> None:
    made = hf_byte_level()
    before = json.loads(made.backend_tokenizer.to_str())
    after = json.loads(with_tags_as_text(made.backend_tokenizer.to_str()))
    ids = {token["content"]: token["id"] for token in before["added_tokens"]}
    assert after["model"]["vocab"] == before["model"]["vocab"] | {"<tool>": ids["<tool>"]}
    assert [token["content"] for token in after["added_tokens"]] == [name for name in ids if name != "<tool>"]
    unigram = hf_metaspace().backend_tokenizer.to_str()
    assert with_tags_as_text(unigram) == unigram
