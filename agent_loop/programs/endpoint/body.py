"""JSON bodies of requests and the wire formats that read them. Each error names the field, its value and a way out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import msgspec

from agent_loop.programs.conversation import ChatAnswer, EndpointError, RequestError
from agent_loop.text import shown

T = TypeVar("T")
Request = TypeVar("Request")
Body = Mapping[str, Any]
OBJECT: type[dict[str, Any]] = dict
LIST: type[list[Any]] = list

MAX_OBJECTS = 20_000  # and lists; the messages and parts of a body are read in about 10 microseconds each
_LONE = re.compile(rb"(\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\(?!u[dD][89a-fA-F]).)|\\u....", re.DOTALL)
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


class Fields:
    """The fields of an object in a request.

    Args:
        body: the object.
        at: path of the object, such as `messages[0]`; "" is the request.
    """

    __slots__ = ("at", "body")

    def __init__(self, body: Body, at: str = "") -> None:
        self.body = body
        self.at = at

    def path(self, name: str) -> str:
        """Path of a field."""
        return f"{self.at}.{name}" if self.at else name

    def wrong(self, name: str, way_out: str) -> RequestError:
        """The error of a field."""
        return RequestError(f"{self.path(name)} is {shown(self.body.get(name))}; {way_out}", field=self.path(name))

    def optional(self, name: str, kind: type[T]) -> T | None:
        """A field of a type, or None if it is absent or null."""
        value = self.body.get(name)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, f"give {_KINDS[kind]}")
        return cast(T, value)

    def required(self, name: str, kind: type[T]) -> T:
        """As `optional`, of a field that cannot be absent."""
        value = self.optional(name, kind)
        if value is None:
            raise RequestError(f"{self.path(name)} is missing; give {_KINDS[kind]}", field=self.path(name))
        return value

    def inner(self, name: str) -> Fields:
        """The fields of an inner object; an absent object is empty."""
        return Fields(self.optional(name, OBJECT) or {}, self.path(name))

    def objects(self, name: str) -> Sequence[Fields]:
        """The objects of a list; an absent list is empty."""
        found = [Fields(item, f"{self.path(name)}[{n}]") for n, item in enumerate(self.optional(name, LIST) or [])]
        for each in found:
            if not isinstance(cast(object, each.body), dict):
                raise RequestError(f"{each.at} is {shown(each.body)}; give an object", field=each.at)
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or a list of texts that are not empty; an absent field has none."""
        value = self.body.get(name)
        found: list[Any] = [value] if isinstance(value, str) else self.optional(name, LIST) or []
        if not all(isinstance(text, str) and text for text in found):
            raise self.wrong(name, "give texts that are not empty")
        return tuple(found)

    def positive(self, name: str) -> int | None:
        """A whole number of at least 1, or None if it is absent."""
        value = self.optional(name, int)
        if value is not None and value < 1:
            raise self.wrong(name, "give a whole number of at least 1")
        return value

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuse fields whose effect an answer would lack; null, false and empty values ask for nothing.

        Args:
            reasons: name of the field -> way out.
        """
        for name, way_out in reasons.items():
            if self.body.get(name):
                raise self.wrong(name, way_out)

    def refuse_structured(self, name: str) -> None:
        """Refuse a format of the answer other than text."""
        if (form := self.inner(name)).body.get("type", "text") != "text":
            raise form.wrong("type", "only text is supported; describe the format in the prompt")

    def content(self, name: str, *, kinds: Sequence[str] = ("text",), separator: str = "\n") -> str:
        """Text of a message: a text, or a list of parts of type text.

        Args:
            kinds: values of `type` that are texts.
            separator: put between parts.
        """
        value = self.body.get(name)
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise self.wrong(name, "give a text, or a list of text parts")
        parts = list[str]()
        for part in self.objects(name):
            if part.body.get("type") not in kinds:
                raise part.wrong("type", f"only text is supported: {' or '.join(kinds)}")
            parts.append(part.required("text", str))
        return separator.join(parts)

    def function_tool(self, *, schema: str = "parameters") -> Mapping[str, Any]:
        """Description of a tool in OpenAI's function format, from an object with name, description and a schema.

        Args:
            schema: field of the JSON schema of the arguments.
        """
        described: dict[str, Any] = {"name": self.required("name", str)}
        if (description := self.optional("description", str)) is not None:
            described["description"] = description
        described["parameters"] = self.optional(schema, OBJECT) or {"type": "object", "properties": {}}
        return {"type": "function", "function": described}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of a client, without its path."""

    body: Body
    """JSON object."""
    id: str
    """Unique name; ids in the answer are made from it."""
    created: int
    """Unix time of its arrival, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat(Generic[Request]):
    """A wire format as plain functions between JSON and `agent_loop.programs.conversation`. None keeps a state."""

    read: Callable[[Call], Request]
    """Body -> request. Raises RequestError."""
    write: Callable[[ChatAnswer, Call], dict[str, Any]]
    """Answer -> JSON object of the response."""
    events: Callable[[ChatAnswer, Call], Iterator[dict[str, Any]]]
    """Answer -> JSON objects of all server-sent events of the response."""
    error: Callable[[EndpointError], dict[str, Any]]
    """Error -> JSON object of the response."""
    late_error: Callable[[EndpointError], dict[str, Any]] | None = None
    """Error -> JSON object of an event, for a response that has started; None is as `error`."""
    end: str = ""
    """Text after the events."""
    keep_alive: str = ": keep-alive\n\n"
    """Server-sent event or comment while an answer is awaited."""

    def stream(self, answer: ChatAnswer, call: Call) -> str:
        """All server-sent events of a response."""
        return "".join(map(sse, self.events(answer, call))) + self.end

    def error_event(self, error: EndpointError) -> str:
        """Server-sent event of an error, for a response that has started."""
        return sse((self.late_error or self.error)(error))


def sse(data: Mapping[str, Any]) -> str:
    """A server-sent event, named by the `type` of its object."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"
