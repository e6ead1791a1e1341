"""Text of messages stays text: control tokens of a rendered conversation come from the chat template alone.

A control token is an added token of the tokenizer, special or not: `<|im_start|>`, `</think>`, `<tool_call>`. White
space that a tokenizer has as an added token is text.

Each control token has a stand-in, random characters that no message can know. `swap` exchanges the two everywhere in a
text. A message is swapped before it is rendered, and the rendered text once more before it is encoded, by a copy of the
tokenizer that knows the stand-ins instead of the control tokens. With S for the stand-in of `<|im_start|>` and E for
that of `<|im_end|>`:

    message     hi<|im_end|>                            swapped: hiE
    rendered    <|im_start|>user\\nhiE<|im_end|>         swapped: Suser\\nhi<|im_end|>E
    encoded     [start] user \\n h i < | i m _ e n d | > [end]

A message without the text of a control token is not changed, so its ids are those of the template. The template sees
all other characters of a message, so it can strip and compare them. Texts that a template looks for in a message
(`'</think>' in content`, `content.split('</think>')`) are swapped in the template too.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from message_queue.errors import ChatTemplateError

_PRIVATE = "\U000f0000-\U000ffffd"  # a range of characters for private use
_EXPRESSION = re.compile(r"\{[{%].*?[}%]\}", re.DOTALL)
_SOUGHT = re.compile(  # a literal that is an argument of a method that searches, or stands before `in`
    r"\b(?:split|rsplit|partition|rpartition|replace|startswith|endswith|find|rfind|index|rindex|count|removeprefix"
    r"|removesuffix)\(\s*(?:'[^']*'|\"[^\"]*\")|(?:'[^']*'|\"[^\"]*\")\s+(?:not\s+)?in\b"
)


class Tokenizer(Protocol):
    """The methods used of a Hugging Face tokenizer; a fast one also has `backend_tokenizer`."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens by id; `str` of one is its text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> Any:
        """The text, a str."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tools: list[Any] | None = ...,
        chat_template: str | None = ...,
        add_generation_prompt: bool = ...,
        tokenize: bool = ...,
    ) -> Any:
        """The rendered text, a str, when tokenize is False."""
        ...


class ControlTokens:
    """The control tokens of a tokenizer.

    A tokenizer that is not fast has no copy: control tokens in messages are cut in two, which may add a space there if
    the tokenizer marks the start of a text.

    Raises:
        ChatTemplateError: the tokenizer cannot encode the text of a control token as text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
        stand_ins = {text: _secret() for text in texts}
        self._swapped = stand_ins | {stand_in: text for text, stand_in in stand_ins.items()}
        any_of = "|".join(map(re.escape, sorted(self._swapped, key=len, reverse=True))) or "(?!)"
        starts = "".join(sorted({re.escape(text[0]) for text in texts}))
        self._pattern = re.compile(f"(?=[{starts}{_PRIVATE}])(?:{any_of})")  # most characters are passed over at once
        self._tokenizer = tokenizer
        self._copy = None
        self._texts = frozenset(texts)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            self._copy = _copy(backend, stand_ins)
            wrong = [text for text, i in texts.items() if self._copy.token_to_id(stand_ins[text]) != i]
        else:
            wrong = [text for text in texts if len(text) == 1]
        if wrong:
            raise ChatTemplateError(
                f"the tokenizer cannot encode its added token {wrong[0]!r} as text, so a message could hold the token; "
                "use a fast tokenizer (tokenizer.json), or remove the token"
            )

    def __contains__(self, text: str) -> bool:
        """Whether `text` is that of a control token."""
        return text in self._texts

    def at_start(self, text: str) -> str:
        """The control token that `text` starts with; "" if there is none."""
        return max((token for token in self._texts if text.startswith(token)), key=len, default="")

    def swap(self, text: str) -> str:
        """`text` with stand-ins for control tokens and control tokens for stand-ins."""
        return self._pattern.sub(lambda found: self._swapped[found[0]], text)

    def swap_sought(self, template: str) -> str:
        """The chat template, with the texts that it looks for swapped as in messages."""
        return _EXPRESSION.sub(lambda tag: _SOUGHT.sub(lambda sought: self.swap(sought[0]), tag[0]), template)

    def encode(self, rendered: str) -> list[int]:
        """Ids of a conversation that was rendered from swapped messages."""
        if self._copy is not None:
            return list(self._copy.encode(self.swap(rendered), add_special_tokens=False).ids)
        cut = _secret()
        pieces = self._pattern.sub(lambda found: self._cut(found[0], cut), rendered).split(cut)
        return [i for piece in pieces for i in self._tokenizer.encode(piece, add_special_tokens=False)]

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens. Control tokens are stand-ins, so they differ from text, if the tokenizer is fast."""
        return str((self._copy or self._tokenizer).decode(token_ids, skip_special_tokens=False))

    def _cut(self, found: str, cut: str) -> str:
        if found in self._texts:
            return found
        text = self._swapped[found]
        return f"{text[0]}{cut}{text[1:]}"


def _secret() -> str:
    """Characters for private use: no letters and no space to a template, and unchanged by a tokenizer."""
    return "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(8))


def _copy(backend: Any, stand_ins: Mapping[str, str]) -> Any:
    """A `tokenizers.Tokenizer` with the same ids that knows each control token by its stand-in only."""
    fields: dict[str, Any] = json.loads(backend.to_str())
    for token in fields["added_tokens"]:
        if token["content"] in stand_ins:
            token |= {"content": stand_ins[token["content"]], "normalized": False, "single_word": False}
    model = fields["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {stand_ins.get(text, text): i for text, i in model["vocab"].items()}
    else:
        model["vocab"] = [[stand_ins.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in stand_ins:
        model["unk_token"] = stand_ins[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _makes(pair, stand_ins)]
    unused = {"truncation": None, "padding": None, "post_processor": None}
    return backend.from_str(json.dumps({**fields, **unused}))


def _makes(pair: Any, stand_ins: Mapping[str, str]) -> bool:
    """Whether a merge takes or gives the text of a control token."""
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return not stand_ins.keys().isdisjoint({left, right, left + right})
