"""Makes foreign text safe: text that a model sampled, a tool returned, a row of data holds, or an error quotes.

Python's strings can hold surrogates (U+D800 to U+DFFF), which UTF-8 cannot: a file, a message or a tokenizer that meets
one raises. JSON spells them in plain ASCII, so a model can sample one. Text is made safe once, where it enters.
"""

from __future__ import annotations

from typing import Any, cast


def safe_text(text: str) -> str:
    """The text as UTF-8 can hold it: surrogates that form a pair become its character, and others U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def shown(value: object) -> str:
    """A value in the text of an error: at most 80 characters on one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def safe_value(value: Any) -> Any:
    """A JSON value whose texts are safe, the keys of objects included. Other objects stay as they are."""
    match value:
        case str():
            return safe_text(value)
        case list():
            return [safe_value(part) for part in cast(list[Any], value)]
        case dict():
            return {safe_value(key): safe_value(part) for key, part in cast(dict[Any, Any], value).items()}
        case _:
            return value
