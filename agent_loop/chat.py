"""Messages <-> token ids through the tokenizer's chat template. Sampled tokens are never retokenized.

Only text that the model did not write is rendered: the prompt once, and each reply (tool results, user messages) as
the text that the template puts after an assistant turn. That text is cut from a rendering of a stand-in conversation,
so nothing depends on how the template would re-render earlier turns. The text of a message gives no control token; see
`agent_loop.control_tokens`.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import datetime
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from agent_loop.control_tokens import ControlTokens, Tokenizer
from agent_loop.decoder import FindStop
from agent_loop.loop import Message, openai_message
from agent_loop.text import safe_value
from message_queue.errors import ChatTemplateError
from message_queue.tokens import Int32Array

CHARS_PER_TOKEN = 8  # of the longest texts that are worth a look: prose and code have 3 to 5
LONG_TEXT = 20_000  # characters that take some 20 ms to tokenize
MAX_VARIANTS = 64  # chats with tools and stop strings of requests that are kept
# Long and odd enough not to occur in a template. Two stand-ins show whether a reply depends on the turn before it.
NONE_SAMPLED: Mapping[int, Int32Array] = MappingProxyType({})
STAND_INS = ("stand-in assistant turn 7f3a", "another stand-in assistant turn, 91c4")


async def encoded(encode: Callable[[Sequence[Message]], Int32Array], messages: Sequence[Message]) -> Int32Array:
    """`encode(messages)`, in a thread if the messages are long, so that other rollouts go on."""
    if sum(len(message.content) for message in messages) < LONG_TEXT:
        return encode(messages)
    return await asyncio.to_thread(encode, messages)


class Chat:
    """Renders prompts and replies, and reads sampled turns.

    Args:
        end_of_turn: text of the token that ends a turn; an added token. None finds it: the one that the chat template
            puts after an assistant turn. The tokenizer's eos_token ends a decode too, as base models write it.
        tools: JSON descriptions of the tools, given to the template. Replies of role "tool" are possible only then.
        stop_tokens: further tokens that end a decode; a turn that ends with one is not a finished turn.

    Attributes:
        tools_key: equal for chats with equal tools.
        is_dated: whether the template prints the date of the construction; a restart may change it.

    Raises:
        ChatTemplateError: a stop token that is not one token, an end of turn that is no added token or is not found, or
            a template that renders a reply differently depending on the turn before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end_of_turn: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        stop_tokens: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer)
        self._variants: dict[str, Chat] = {}  # shared by all variants
        self._secret = secrets.token_hex(8)  # no message knows it
        self._strftime = datetime.now().strftime
        self._set(tools, ())
        eos: str = getattr(tokenizer, "eos_token", None) or ""
        self._end_of_turn = end_of_turn or self._find_end(eos)
        if self._end_of_turn not in self._control:
            raise ChatTemplateError(
                f"end_of_turn is {self._end_of_turn!r}, which is no added token of the tokenizer, so the text of a "
                "message could end a turn; add it to the tokenizer as a special token"
            )
        ends = (eos,) if eos in self._control else ()
        markers = (self._end_of_turn, *stop_tokens, *ends)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(self._single_id(text) for text in markers))
        self._end_id = self.stop_token_ids[0]
        self._hidden_ids = {self._end_id, *map(self._single_id, ends)}
        self._opening = self._after([{"role": "user", "content": STAND_INS[0]}])
        if tools:
            self.check_role("tool")

    def variant(self, *, tools: Sequence[Mapping[str, Any]], stop_strings: Sequence[str]) -> Chat:
        """This chat with the tools and stop strings of one request. The newest variants are kept for later requests.

        Args:
            stop_strings: texts that finish a turn anywhere in it, also across and inside tokens. The turn keeps its
                sampled tokens unchanged, up to the token in which the text ends.

        Raises:
            ChatTemplateError: a stop string is empty.
        """
        key = json.dumps([tools, stop_strings], default=dict)
        if (chat := self._variants.get(key)) is None:
            chat = copy(self)
            chat._set(tools, stop_strings)
            self._variants[key] = chat
            if len(self._variants) > MAX_VARIANTS:
                del self._variants[next(iter(self._variants))]
        return chat

    def prompt(self, messages: Sequence[Message], *, sampled: Mapping[int, Int32Array] = NONE_SAMPLED) -> Int32Array:
        """int32 [n]: the conversation up to the start of the model's turn.

        Args:
            sampled: index of an assistant message -> its tokens [m] as the model sampled them.
        """
        marked, tokens = self._with_marks(messages, sampled)
        return self._encode_around(self._render(marked), tokens)

    def reply(
        self, messages: Sequence[Message], *, after: Int32Array, sampled: Mapping[int, Int32Array] = NONE_SAMPLED
    ) -> Int32Array:
        """int32 [n]: the tokens after the sampled turn `after`, up to the start of the model's next turn.

        The end-of-turn token comes first if the turn lacks it (stopped at the end of a tool call).

        Args:
            sampled: see `prompt`.
        """
        marked, tokens = self._with_marks(messages, sampled)
        ids = self._encode_around(self._end_of_turn + self._tail(marked, STAND_INS[0]), tokens)
        return ids[1:] if self.ends_turn(after) else ids

    def reply_texts(self, token_ids: Int32Array, *, count: int) -> list[str]:
        """Texts of the `count` messages of role "tool" that a reply was made of, as the model saw them.

        If the template does not put them between own texts, or a reply holds such a text and it has no control token,
        this is the text of the whole reply.
        """
        marks = [f"stand-in reply {number:06d}, 5be1" for number in range(count)]
        tail = self._tail([{"role": "tool", "content": mark} for mark in marks], STAND_INS[0])
        shape = self._control.decode(self._encode(self._end_of_turn + tail).tolist())
        pieces = re.split("|".join(marks), shape)  # fewer if the tokenizer cannot write the marks
        first, between, last = pieces[0], pieces[1:-1], pieces[-1]
        end = [] if self.ends_turn(token_ids[:1]) else [self._end_id]
        text = self._control.decode([*end, *token_ids.tolist()])
        rest = text[len(first) : len(text) - len(last)]
        # If the text between replies has no control token, a reply may hold it too, and nothing tells them apart.
        is_clear = all(len(re.findall(f"(?={re.escape(each)})", rest)) == between.count(each) for each in between)
        is_clear = is_clear and all(between) and len(pieces) == count + 1
        if not (is_clear and text.startswith(first) and text.endswith(last)):
            return [self.decode(token_ids).removeprefix(self._end_of_turn)]
        found = list[str]()
        for separator in between:
            reply, _, rest = rest.partition(separator)
            found.append(reply)
        return [*found, rest]

    def ends_turn(self, turn: Int32Array) -> bool:
        """Whether the sampled tokens end with the end-of-turn token."""
        return len(turn) > 0 and int(turn[-1]) == self._end_id

    def text(self, turn: Int32Array) -> str:
        """Text of a sampled turn without its end-of-turn or eos_token; any other token stays visible."""
        return self.decode(turn[:-1] if len(turn) and int(turn[-1]) in self._hidden_ids else turn)

    @property
    def find_stop(self) -> FindStop | None:
        """The search for stop strings of one decoder. It continues where it ended before; None without any."""
        seen = np.zeros(0, np.int32)

        def find(turn: Int32Array) -> int | None:
            nonlocal seen
            before, seen = seen, turn
            is_longer = np.array_equal(turn[: len(before)], before)  # else it is another turn
            return self._find_stop(turn, searched=len(before) if is_longer else 0)

        return find if self._stop_strings else None

    # ---- inside

    def _set(self, tools: Sequence[Mapping[str, Any]], stop_strings: Sequence[str]) -> None:
        if "" in stop_strings:
            raise ChatTemplateError("a stop string is empty, so every turn would end at once; leave it out")
        self.tools_key = json.dumps(tools, sort_keys=True, default=dict)
        self._tools = [self._swapped_values(safe_value(tool)) for tool in tools] or None
        template = getattr(self._tokenizer, "get_chat_template", None)
        self._template = None if template is None else self._control.swap_sought(template(tools=self._tools))
        self.is_dated = "strftime_now" in (self._template or "")
        self._stop_strings = tuple(stop_strings)
        self._overlap = 8 + 4 * max(map(len, stop_strings), default=0)  # a character has at most 4 tokens

    def _find_end(self, eos: str) -> str:
        """The control token that the template puts after an assistant turn, the last of a conversation or not."""
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": STAND_INS[0]}
        for conversation in ([question, answer], [question, answer, question]):
            after = self._after(conversation, goes_on=len(conversation) > 2).lstrip()
            if end := eos if eos and after.startswith(eos) else self._control.at_start(after):
                return end
        raise ChatTemplateError(
            "the chat template puts no added token of the tokenizer after an assistant turn, so the end of a turn is "
            f"unknown; name it with Task(end_of_turn=...), such as the eos_token {eos!r}, or use a template that has it"
        )

    def _after(self, conversation: list[dict[str, Any]], *, goes_on: bool = True) -> str:
        """Text that the template renders after a stand-in; "" if it refuses the conversation."""
        try:
            return self._render(conversation, goes_on=goes_on).partition(STAND_INS[0])[2]
        except Exception:  # noqa: BLE001 - a template is foreign code, and raises what it likes
            return ""

    def _find_stop(self, turn: Int32Array, *, searched: int) -> int | None:
        """As FindStop, after a search of the first tokens. Only the others are decoded, if no stop string is there."""
        new = turn[max(0, searched - self._overlap) :]
        if self._stop_end(self.decode(new)) is None or self._stop_end(self.decode(turn)) is None:
            return None
        counts = range(searched + 1, len(turn) + 1)
        return counts[bisect_left(counts, True, key=lambda n: self._stop_end(self.decode(turn[:n])) is not None)]

    def _stop_end(self, text: str) -> int | None:
        """End of the stop string that is complete first, in characters; None without one."""
        return min((text.find(s) + len(s) for s in self._stop_strings if s in text), default=None)

    def decode(self, token_ids: Int32Array) -> str:
        """Text of tokens, control tokens included."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))

    def _encode(self, rendered: str) -> Int32Array:
        return np.asarray(self._control.encode(rendered), dtype=np.int32)

    def _single_id(self, text: str) -> int:
        ids = self._encode(text)
        if len(ids) != 1:
            raise ChatTemplateError(f"stop token {text!r} is {len(ids)} tokens in this tokenizer; name a single token")
        return int(ids[0])

    def _with_marks(
        self, messages: Sequence[Message], sampled: Mapping[int, Int32Array]
    ) -> tuple[list[dict[str, Any]], dict[str, Int32Array]]:
        """Messages for the template, with a mark in place of each sampled one, and mark -> tokens, in order."""
        tokens: dict[str, Int32Array] = {}
        conversation: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            if index in sampled:
                mark = f"stand-in sampled turn {index:06d}, {self._secret}"
                tokens[mark] = sampled[index]
                conversation.append({"role": message.role, "content": mark})
            else:
                conversation.append(self._swapped(message))
        return conversation, tokens

    def _encode_around(self, rendered: str, tokens: Mapping[str, Int32Array]) -> Int32Array:
        """Ids of a rendered text, with the tokens of each mark in its place."""
        parts: list[Int32Array] = []
        for mark, turn in tokens.items():
            before, found, rendered = rendered.partition(mark)
            if not found:
                raise ChatTemplateError("the chat template leaves out an assistant turn, so it cannot be continued")
            if not self._opening.endswith(" "):
                before = before.rstrip(" ")  # the template's space; the sampled tokens have it too
            parts += [self._encode_part(before, is_first=not parts), turn]
            if self.ends_turn(turn):
                rendered = rendered.removeprefix(self._end_of_turn)
        return np.concatenate([*parts, self._encode_part(rendered, is_first=not parts)])

    def _encode_part(self, rendered: str, *, is_first: bool) -> Int32Array:
        """Ids of a part of a rendered text; a tokenizer may put a space before a text that follows no token."""
        return self._encode(rendered) if is_first else self._encode(self._end_of_turn + rendered)[1:]

    def _render(self, conversation: list[dict[str, Any]], *, goes_on: bool = True) -> str:
        dated = {"strftime_now": self._strftime} if self.is_dated else {}
        return str(
            self._tokenizer.apply_chat_template(
                conversation,
                tools=self._tools,
                chat_template=self._template,
                add_generation_prompt=goes_on,
                tokenize=False,
                **dated,
            )
        )

    def _tail(self, messages: list[dict[str, Any]], stand_in: str) -> str:
        """Text that the template renders after the end-of-turn token of an assistant turn `stand_in`."""
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": stand_in}]
        try:
            rendered = self._render(conversation + messages)
        except Exception as error:
            roles = sorted({str(m["role"]) for m in messages})
            raise ChatTemplateError(
                f"the chat template refuses messages of role {roles} after an assistant turn: {error}"
            ) from error
        _, found, rest = rendered.partition(stand_in)
        if not found or not rest.startswith(self._end_of_turn):
            raise ChatTemplateError(
                f"the chat template does not put {self._end_of_turn!r} right after an assistant turn, so a sampled "
                f"turn cannot be continued; use a template that does, or name its end-of-turn token. "
                f"It renders: {rendered!r}"
            )
        return rest.removeprefix(self._end_of_turn)

    def check_role(self, role: str) -> None:
        """Check that the template continues a conversation with messages of a role.

        Raises:
            ChatTemplateError: it leaves them out, or renders them differently depending on the turn before.
        """
        first, second = (self._tail([{"role": role, "content": "0"}], stand_in) for stand_in in STAND_INS)
        if first != second or "0" not in first:
            raise ChatTemplateError(
                f"the chat template renders a message of role {role!r} differently depending on the turn "
                f"before it, or leaves it out: {first!r} and {second!r}; use a template that appends"
            )

    def _swapped_values(self, value: Any) -> Any:
        """A JSON value with its control tokens as text."""
        if isinstance(value, str):
            return self._control.swap(value)
        if isinstance(value, Mapping):
            items = cast(Mapping[str, Any], value).items()
            return {self._control.swap(str(key)): self._swapped_values(each) for key, each in items}
        if isinstance(value, list | tuple):
            return [self._swapped_values(each) for each in cast(Sequence[Any], value)]
        return value

    def _swapped(self, message: Message) -> dict[str, Any]:
        """A message for the template, with its control tokens as text."""
        fields = openai_message(message)
        for call in fields.get("tool_calls", ()):
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        return {name: self._swapped_values(value) for name, value in fields.items()}


def _arguments(text: str) -> Any:
    """The arguments object of a call, as chat templates take it; the text if it is no object."""
    try:
        arguments: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return safe_value(cast(dict[str, Any], arguments)) if isinstance(arguments, dict) else text
