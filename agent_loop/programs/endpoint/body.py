"""Reads the JSON body of a request. Each error names the field, its value and a way out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from agent_loop.programs.endpoint.errors import RequestError

T = TypeVar("T")
Body = Mapping[str, Any]
OBJECT: type[dict[str, Any]] = dict
LIST: type[list[Any]] = list

MAX_OBJECTS = 20_000  # and lists; the messages and parts of a body are read in about 10 microseconds each
_LONE = re.compile(rb"(\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\(?!u[dD][89a-fA-F]).)|\\u....", re.DOTALL)
_SHOWN = 80  # characters of a value in an error
_KINDS: Mapping[type, str] = {
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def decode_body(data: bytes) -> Body:
    """The object of a body. A lone surrogate, as agents send it of a page that they read, becomes U+FFFD.

    Raises:
        RequestError: the body is no UTF-8, no JSON (NaN is none), too deep, no object, or has too
            many objects.
    """
    try:
        try:
            body: object = msgspec.json.decode(data)
        except ValueError:
            body = msgspec.json.decode(_LONE.sub(lambda found: found[1] or rb"\ufffd", data))
    except (ValueError, RecursionError) as error:
        cause = "it is nested too deep" if isinstance(error, RecursionError) else "it cannot be decoded"
        raise RequestError(f"the body is not valid JSON in UTF-8: {cause}; send a JSON object") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is {shown(body)}; send a JSON object")
    count, found = 0, [cast(Any, body)]
    while found:
        part = found.pop()
        parts: Iterable[Any] = cast(Body, part).values() if isinstance(part, dict) else part
        found += [each for each in parts if isinstance(each, dict | list)]
        count += 1
        if count + len(found) > MAX_OBJECTS:
            raise RequestError(f"the body has more than {MAX_OBJECTS} objects and lists; send fewer messages or parts")
    return cast(Body, body)


def shown(value: object) -> str:
    """A value in the text of an error, in one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def wrong(field: str, value: object, way_out: str) -> RequestError:
    """The error of a field."""
    return RequestError(f"{field} is {shown(value)}; {way_out}", field=field)


def optional(body: Body, name: str, kind: type[T], *, at: str = "") -> T | None:
    """A field of a type, or None if it is absent or null.

    Args:
        at: path of `body` in the request, for errors, such as `messages[0].`.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise wrong(at + name, value, f"give {_KINDS[kind]}")
    return cast(T, value)


def required(body: Body, name: str, kind: type[T], *, at: str = "") -> T:
    """As `optional`, of a field that cannot be absent."""
    value = optional(body, name, kind, at=at)
    if value is None:
        raise RequestError(f"{at}{name} is missing; give {_KINDS[kind]}", field=at + name)
    return value


def objects(body: Body, name: str, *, at: str = "") -> Sequence[tuple[str, Body]]:
    """(path, object) of each element of a list; an absent list is empty."""
    found = [(f"{at}{name}[{n}]", item) for n, item in enumerate(optional(body, name, LIST, at=at) or [])]
    for path, item in found:
        if not isinstance(item, dict):
            raise wrong(path, item, "give an object")
    return found


def texts(body: Body, name: str) -> tuple[str, ...]:
    """A text or a list of texts that are not empty; an absent field has none."""
    value = body.get(name)
    found: list[Any] = [value] if isinstance(value, str) else optional(body, name, LIST) or []
    if not all(isinstance(text, str) and text for text in found):
        raise wrong(name, value, "give texts that are not empty")
    return tuple(found)


def positive(body: Body, name: str, *, at: str = "") -> int | None:
    """A whole number of at least 1, or None if it is absent."""
    value = optional(body, name, int, at=at)
    if value is not None and value < 1:
        raise wrong(at + name, value, "give a whole number of at least 1")
    return value


def refuse(body: Body, reasons: Mapping[str, str], *, at: str = "") -> None:
    """Refuse fields whose effect an answer would lack; null, false and empty values ask for nothing.

    Args:
        reasons: name of the field -> way out.
    """
    for name, way_out in reasons.items():
        if body.get(name):
            raise wrong(at + name, body[name], way_out)


def text_of(value: object, *, at: str, kinds: Sequence[str], separator: str) -> str:
    """Text of a message's content: a text, or a list of parts of type text.

    Args:
        at: path of the content.
        kinds: values of `type` that are texts.
        separator: put between parts.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(at, value, "give a text, or a list of text parts")
    parts = list[str]()
    for path, part in objects({at: value}, at):
        kind = part.get("type")
        if kind not in kinds:
            raise wrong(f"{path}.type", kind, f"only text is supported: {' or '.join(kinds)}")
        parts.append(required(part, "text", str, at=f"{path}."))
    return separator.join(parts)


def function_tool(function: Body, *, schema: str, at: str) -> Mapping[str, Any]:
    """Description of a tool in OpenAI's function format, from an object with name, description and a schema.

    Args:
        schema: field of the JSON schema of the arguments.
        at: path of the object.
    """
    described: dict[str, Any] = {"name": required(function, "name", str, at=at)}
    description = optional(function, "description", str, at=at)
    if description is not None:
        described["description"] = description
    described["parameters"] = optional(function, schema, OBJECT, at=at) or {"type": "object", "properties": {}}
    return {"type": "function", "function": described}
