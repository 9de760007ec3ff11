"""Small tokenizers of the kinds that language models have, made in memory: nothing is downloaded or read."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from engine.text.tokenizer import Tokenizer

CORPUS = [
    "The chairlift never stops: riders get on and off at every chair.",
    "A step carries one packed row of tokens from many requests, 1 2 3 4 5 67 890.",
    "缆车从不停止。リフトは止まりません。",
    "Émile naïvely ordered crème brûlée.",
]
"""Some words become tokens; Chinese and emoji are left in bytes, several tokens a character."""

CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def hf_byte_level(**settings: Any) -> Any:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it; with ChatML. `settings` go to transformers."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=_SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return _wrap(backend, bos_token="<|im_start|>", eos_token="<|im_end|>", **{"chat_template": CHATML, **settings})


def hf_sentencepiece(*, strip_space: bool = True, **settings: Any) -> Any:
    """SentencePiece BPE with byte fallback: Llama 2 and Mistral; Gemma without `strip_space`."""
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>"])}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [("▁", "a"), ("l", "i"), ("li", "f"), ("lif", "t"), ("▁", "lift"), ("▁a", "b"), ("▁", "▁")]
    for token in ["▁", *"abcdefghilnorstuv.,!", "é", "好", *("".join(pair) for pair in merges)]:
        vocab[token] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip_space else steps)
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return _wrap(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings)


def hf_word_piece(**settings: Any) -> Any:
    """WordPiece, as BERT has it and small Chinese GPT-2 models do: a token's text depends on the one before."""
    words = ["[UNK]", "[SEP]", "你", "好", "chair", "##lift", "##s", "never", "stop", ".", ",", "'", "t", "don"]
    backend = Backend(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _wrap(backend, eos_token="[SEP]", unk_token="[UNK]", **settings)


def hf_metaspace(**settings: Any) -> Any:
    """Words marked by a space in front, without bytes: XGLM and other Unigram models."""
    words = ["<unk>", "</s>", "▁", "▁chair", "lift", "▁▁", "s", "▁never", "▁stops", "."]
    backend = Backend(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _wrap(backend, eos_token="</s>", unk_token="<unk>", **settings)


@cache
def byte_level() -> Tokenizer:
    """One for all tests: tokenizers do not change."""
    return Tokenizer(hf_byte_level())


@cache
def sentencepiece(*, strip_space: bool = True) -> Tokenizer:
    return Tokenizer(hf_sentencepiece(strip_space=strip_space))


@cache
def word_piece() -> Tokenizer:
    return Tokenizer(hf_word_piece())


@cache
def metaspace() -> Tokenizer:
    return Tokenizer(hf_metaspace())


def _wrap(backend: Backend, **settings: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
