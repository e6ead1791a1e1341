"""A test and the answer that it tests, in two processes with nothing but data between them. Runs in sandboxes.

    run_test: assert double(2) == 4  ──("call", (double, 2), {})──>  serve_answer: double(2)
                                     <──("value", 4, ...)──────────

Numbers, texts, containers, dates and arrays travel by value, as Python literals. Any other object stays in its process,
and the other one has a `Remote` for it. The test's process decides whether a result equals a value of the test. An
object of the answer never sees such a value: it has no operators with it, and equals it only by its own plain value.
"""

# Values of any type travel here.
# pyright: basic

from __future__ import annotations

import ast
import asyncio
import builtins
import importlib
import inspect
import json
import operator
import os
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partialmethod
from typing import Any

OBJECT = "\0object"
PLAIN = (bool, int, str, bytes, complex, type(None))
VALUES = (frozenset, bytearray, range, Decimal, Fraction, date, datetime, time, timedelta, Counter, deque)
CHANGEABLE = (list, dict, set, bytearray, Counter, deque)
KINDS = {kind.__name__: kind for kind in (*VALUES, float)}
ALIASES = {"np": "numpy"}  # modules that the answer may import for the test: these and the standard library
BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lt le gt ge"
OTHERS = "call len iter next getitem setitem delitem bool str repr hash int float index neg abs round enter exit"


class Remote:
    """An object of the other process."""

    def __init__(self, peer: Peer, number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":  # numpy would read the memory that an object names
            raise AttributeError(name)
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __eq__(self, other: object) -> Any:
        if type(other) is Remote:
            return self._peer.ask("eq", self, other)
        plain = self._peer.ask("plain", self)
        return NotImplemented if plain is None else plain == other

    def __instancecheck__(self, other: object) -> bool:
        return type(other) is Remote and self._peer.ask("isinstance", other, self)

    def _ask(self, op: str, /, *args: Any, **named: Any) -> Any:
        if op in BINARY.split() and type(args[0]) is not Remote:
            return NotImplemented
        return self._peer.ask(op, self, *args, **named)

    async def _result(self) -> Any:
        return self._peer.ask("run", self)


for _op in f"{BINARY} {OTHERS}".split():
    setattr(Remote, f"__{_op}__", partialmethod(Remote._ask, _op))


class Peer:
    """One end of the connection.

    Args:
        names: names of the answer; None in the test's process, whose objects the answer may only call and iterate over.
    """

    def __init__(self, reading: int, writing: int, *, names: dict[str, Any] | None = None) -> None:
        self._reading, self._writing, self._names = os.fdopen(reading), os.fdopen(writing, "w"), names
        sys.set_int_max_str_digits(0)
        self._held, self._remotes, self._errors = {}, {}, {}  # own objects, and objects and errors of the other

    def ask(self, op: str, /, *args: Any, **named: Any) -> Any:
        """The result of an operation in the other process."""
        self._send("ask", op, self._encode(args), self._encode(named))
        while (message := ast.literal_eval(self._reading.readline() or "(0,)"))[0] == "ask":
            self.serve(*message[1:])
        match message:
            case ("value", result, tuple(changed)):
                for old, new in zip((*args, *named.values()), changed, strict=True):
                    if new is not None:
                        old.clear()
                        (old.extend if hasattr(old, "extend") else old.update)(self._decode(new))
                return self._decode(result)
            case ("raise", kind, tuple(args)):
                raise self._decode(kind)(*self._decode(args))
        os._exit(1)

    def serve(self, op: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Answer one operation of the other process; containers that it changed travel back."""
        try:
            given, given_named = self._decode(args), self._decode(named)
            result = self._encode(self._apply(op, *given, **given_named))
            changed: list[Any] = []
            for old, now in zip((*args, *named.values()), (*given, *given_named.values()), strict=True):
                new = self._encode(now) if type(now) in CHANGEABLE else old
                changed.append(None if new == old else new)
            self._send("value", result, tuple(changed))
        except BaseException as error:  # noqa: BLE001 - it is raised in the other process
            self._send("raise", self._encode(type(error)), self._encode(error.args))

    def serve_all(self) -> None:
        """Serve until the other process has ended."""
        for line in self._reading:
            self.serve(*ast.literal_eval(line)[1:])

    def _apply(self, op: str, target: Any, /, *args: Any, **named: Any) -> Any:
        usable = callable(target) if op == "call" else op in ("iter", "next") and hasattr(target, "__next__")
        if self._names is None and not usable:
            raise TypeError(f"the answer may not use a {type(target).__name__} of the test so")
        match op:
            case "names":
                names = self._names or {}
                return {name: names[name] for name in target if name in names}
            case "call":
                return target(*args, **named)
            case "plain":
                kinds: tuple[Any, ...] = (int, float, str, list, tuple, dict, set)
                return next((kind(target) for kind in kinds if isinstance(target, kind)), None)
            case "run":
                return asyncio.run(target)
            case "enter" | "exit":
                return getattr(target, f"__{op}__")(*args)
        return (getattr(builtins, op, None) or getattr(operator, f"__{op}__"))(target, *args)

    def _send(self, *message: Any) -> None:
        self._writing.write(f"{message!r}\n")
        self._writing.flush()

    def _encode(self, value: Any) -> Any:
        """A literal; a tuple that starts with OBJECT stands for a value that has none."""
        kind = type(value)
        if kind in PLAIN or (kind is float and value - value == 0):
            return value
        if kind in (list, tuple, set):
            return kind(map(self._encode, value))
        if kind in (dict, OrderedDict, defaultdict):
            return {self._encode(key): self._encode(each) for key, each in value.items()}
        if kind is float:
            return (OBJECT, "float", str(value))
        if kind in VALUES:
            args = (list(value),) if kind is deque else value.__reduce__()[1]
            return (OBJECT, kind.__name__, *map(self._encode, args))
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            plain = self._encode(value.tolist())
            return (OBJECT, "array", value.dtype.str, plain) if kind.__name__ == "ndarray" else plain
        if kind is Remote:
            return (OBJECT, "yours", value._number)
        if isinstance(value, type) and issubclass(value, BaseException):
            base = None if value.__module__ == "builtins" else self._encode(value.__base__)
            return (OBJECT, "error", value.__name__, base)
        self._held[id(value)] = value
        module, coroutine = inspect.ismodule(value), inspect.iscoroutine(value)
        return (OBJECT, "module" if module else "coroutine" if coroutine else "mine", id(value))

    def _decode(self, data: Any) -> Any:
        match data:
            case list() | set():
                return type(data)(map(self._decode, data))
            case dict():
                return {self._decode(key): self._decode(value) for key, value in data.items()}
            case (str(tag), str(kind), *args) if tag == OBJECT:
                return self._object(kind, *args)
            case tuple():
                return tuple(map(self._decode, data))
        return data

    def _object(self, kind: str, first: Any, *rest: Any) -> Any:
        match kind:
            case "yours":
                return self._held[first]
            case "module":
                return types.ModuleType
            case "mine" | "coroutine":
                remote = self._remotes.setdefault(first, Remote(self, first))
                return remote if kind == "mine" else remote._result()
            case "array" if re.fullmatch(r"[<>|=][biufcSU]\d+", first):
                return importlib.import_module("numpy").array(self._decode(rest[0]), first)
            case "error":
                base = self._decode(rest[0]) if rest[0] else getattr(builtins, first)
                if rest[0]:
                    base = self._errors.setdefault((first, base), type(first, (base,), {}))
                return base if issubclass(base, BaseException) else Exception
        return KINDS[kind](*map(self._decode, (first, *rest)))


def serve_answer() -> None:
    """Run the answer, then the operations that the test asks for."""
    reading, writing, answer = json.load(sys.stdin)
    module = sys.modules["answer"] = types.ModuleType("answer")
    exec(compile(answer, "answer", "exec"), module.__dict__)
    Peer(reading, writing, names=module.__dict__).serve_all()


def run_test() -> None:
    """Run the test, with those names of the answer that it mentions; print the mark at its end."""
    reading, writing, test, mark = json.load(sys.stdin)
    module = sys.modules["test"] = types.ModuleType("test")
    words = tuple(word for word in set(re.findall(r"\w+", test)) if not hasattr(builtins, word) and word[:2] != "__")
    found = Peer(reading, writing).ask("names", words)
    for name in words:
        whole = ALIASES.get(name, name)
        if found.get(name) is types.ModuleType and whole in {*sys.stdlib_module_names, *ALIASES.values()}:
            found[name] = importlib.import_module(whole)
        if name in found:
            setattr(module, name, found[name])
    exec(compile(test, "test", "exec"), module.__dict__)
    os.write(1, mark.encode())
