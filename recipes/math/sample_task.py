"""The task of the sample. It needs no checkpoint: it builds a tiny model, and shows it solutions before RL."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from pathlib import Path
from typing import cast

import numpy as np
from transformers import PreTrainedTokenizerFast

from async_rl.rollout.task import Demonstration, Task

from .model import build_tokenizer, save_tiny_checkpoint


class SampleTask(Task):
    """A Task whose rows have a column `solution`; its model knows only the words of prompts and solutions."""

    def save_initial_checkpoint(self, path: Path) -> None:
        """Write a randomly initialised model and tokenizer."""
        save_tiny_checkpoint(path, tokenizer=self._words(), seed=self.seed)

    def demonstrations(self, start: int, count: int) -> Sequence[Demonstration]:
        """Prompts `start` to `start + count - 1`, each with its solution in the loss."""
        tokenizer = self._words()
        chat = self.chat(tokenizer)

        def demonstrate(index: int) -> Demonstration:
            prompt = self.train_prompt(index)
            asked = chat.prompt(prompt.messages)
            text = f"{prompt.target['solution']}{tokenizer.eos_token}"
            written = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
            mask = np.arange(len(asked) + len(written)) >= len(asked)
            return np.concatenate([asked, written]), mask

        return [demonstrate(index) for index in range(start, start + count)]

    def _words(self) -> PreTrainedTokenizerFast:
        prompts = [self.train_prompt(index) for index in range(len(cast(Sized, self._prompts)))]
        texts = [message.content for prompt in prompts for message in prompt.messages]
        return build_tokenizer([*texts, *(prompt.target["solution"] for prompt in prompts)])
