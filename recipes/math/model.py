"""A tiny model of the words of the sample, for runs without a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..calculator.model import TinyModelConfig, save_initial_checkpoint
from ..calculator.tokenizer import CHARACTERS, CONTROL, with_chat_template

_WORDS = r"\d| ?[A-Za-z]+|[\s\S]"


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are the control tokens, single characters and the words of `texts`.

    "Ann has 12 pens." has 7 tokens: "Ann", " has", " ", "1", "2", " pens", ".". Other words become a space.
    """
    words = {"user", "assistant", *(word for text in texts for word in re.findall(_WORDS, text))}
    vocabulary = (*CONTROL, *CHARACTERS, *sorted(words - set(CHARACTERS)))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return with_chat_template(tokenizer)


def save_tiny_checkpoint(path: Path, *, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Write a randomly initialised MoE with the tokenizer as a Hugging Face checkpoint folder."""
    save_initial_checkpoint(path, tokenizer=tokenizer, seed=seed, config=TinyModelConfig(dense_first_layer=False))
