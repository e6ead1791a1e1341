"""What the simulated engine writes: tokens, logprobs and rows are pure functions of weights, context and session.

So whoever is given a trajectory can tell of every number in it whether it is right, without having seen the run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from agent_loop.programs.session import ReadTurn
from message_queue.tokens import Int32Array, RoutingSpec

END, USER, ASSISTANT, TOOL_ROLE, CALL, SYSTEM = range(1, 7)
FIRST_WORD, VOCAB = 10, 60
SPECIAL = {"<end>": END, "<user>": USER, "<assistant>": ASSISTANT, "<tool>": TOOL_ROLE, "<system>": SYSTEM}
TEXTS = {number: text for text, number in SPECIAL.items()}
TEXTS[CALL] = r'<tool_call>{"name": "lookup", "arguments": {"\ud83d": "\udc00"}}</tool_call>'  # lone surrogates
ROUTING = RoutingSpec(layers=(1, 2, 4), num_experts=16, top_k=2)
_PIECES = re.compile("|".join([*SPECIAL, "."]), re.DOTALL)


class Weights:
    """What a hexadecimal digest stands for."""

    def __init__(self, digest: str) -> None:
        self._number = int(digest, 16)
        self._rows: dict[int, list[list[int]]] = {}

    def token(self, context: int, session: int, *, calls: bool) -> int:
        """Next token after `context`; about one in eight ends the turn, one in nine is a tool call."""
        draw = hash((self._number, context, session, 1)) & 0xFFFF
        if draw % 8 == 0:
            return END
        if calls and draw % 9 == 0:
            return CALL
        return FIRST_WORD + draw % (VOCAB - FIRST_WORD)

    def logprob(self, context: int, token: int) -> np.float32:
        """Of `token` after `context`."""
        return np.float32(-(1 + (hash((self._number, context, token, 2)) & 0xFFFFF)) / 2**18)

    def kept(self, context: int, token: int) -> list[int]:
        """Ids that the sampler kept after `context`, `token` among them."""
        draw = hash((self._number, context, 4)) & 0xFFFF
        return sorted({token, *((draw * i) % VOCAB for i in range(draw % 4))})

    def row(self, context: int) -> list[list[int]]:
        """[moe_layers, top_k] of the token that ends `context`; not to be changed."""
        if context in self._rows:
            return self._rows[context]
        draw, made = hash((self._number, context, 3)) & 0xFFFFFFFFFFFF, list[list[int]]()
        for _ in ROUTING.layers:
            first, draw = draw % ROUTING.num_experts, draw // ROUTING.num_experts
            step, draw = 1 + draw % (ROUTING.num_experts - 1), draw // ROUTING.num_experts
            made.append([first, (first + step) % ROUTING.num_experts])
        self._rows[context] = made
        return made


weights = lru_cache(maxsize=64)(Weights)


def after(context: int, token: int) -> int:
    """The context of a token and all before it."""
    return hash((context, token))


def contexts(token_ids: Sequence[int]) -> list[int]:
    """contexts[p] stands for tokens 0..p."""
    made, context = list[int](), 0
    for token in token_ids:
        context = after(context, token)
        made.append(context)
    return made


def prompt_ids(index: int) -> Int32Array:
    """int32 [n], the tokens that a trajectory of prompt `index` starts with."""
    return np.array(SimulatedTokenizer().encode(f"<user>{index:03d}<end><assistant>"), np.int32)


def read_turn(turn: Int32Array, observation: Int32Array) -> ReadTurn:
    """A sampled turn as an agent sees it."""
    ids = turn.tolist()
    text = SimulatedTokenizer().decode([token for token in ids if token not in (END, CALL)])
    return ReadTurn(text, None, (("lookup", "{}"),) * ids.count(CALL))


def session_number(session: str) -> int:
    """What distinguishes the rollouts of one prompt."""
    return int.from_bytes(session.encode(), "big")


class SimulatedTokenizer:
    """A letter is a token, and so is each marker of the chat template; `decode` shows other ids as letters."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, str]:
        return {number: text for text, number in SPECIAL.items()}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        text.encode()  # raises at a surrogate, as real tokenizers do
        return [
            SPECIAL.get(piece, FIRST_WORD + ord(piece[0]) % (VOCAB - FIRST_WORD)) for piece in _PIECES.findall(text)
        ]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> Any:
        return "".join(TEXTS.get(token, chr(ord("a") + token % 26)) for token in token_ids)

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tools: list[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
    ) -> Any:
        turns = "".join(f"<{turn['role']}>{turn['content']}<end>" for turn in conversation)
        return turns + ("<assistant>" if add_generation_prompt else "")
