"""Errors of a user's code as data: kind, line of the user, and text. Code reads the fields, people the text."""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agent_loop.text import safe_text
from message_queue.errors import RolloutError

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_OWN = tuple(str(Path(__file__).resolve().parent.parent / name) for name in ("agent_loop", "async_rl", "message_queue"))


def user_line(error: BaseException) -> str:
    """`file:line in function` of the innermost frame outside of libraries and of this project; "" if there is none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_LIBRARIES, *_OWN, "<"))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed call or rollout."""

    kind: str
    """Name of the error's class, of the user's error if a RolloutError has one as its cause."""
    line: str
    """`file:line in function` of the user; empty if no code of the user raised it."""
    text: str
    """One line for people: kind, text and line of the error."""


class DescribedError(Exception):
    """An error in another process, described there, as neither frames nor classes travel.

    Args:
        failure: description.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.text


class LeakedError(Exception):
    """User code let out a cancel that nobody had asked for, `sys.exit` or the like: its `__cause__`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.__cause__ = cause


def failure_of(error: BaseException) -> Failure:
    """An error that failed a rollout. The text of a RolloutError names the user's line if it matters."""
    inner = innermost(error)
    text = describe_error(error, with_line=not isinstance(error, RolloutError))
    if isinstance(inner, DescribedError):
        return Failure(kind=inner.failure.kind, line=inner.failure.line, text=text)
    return Failure(kind=type(inner).__name__, line=safe_text(user_line(inner)), text=text)


def innermost(error: BaseException) -> BaseException:
    """The error that RolloutErrors were raised from."""
    error = _opened(error)
    while isinstance(error, RolloutError) and error.__cause__ is not None:
        error = _opened(error.__cause__)
    return error


def _opened(error: BaseException) -> BaseException:
    """The first error of a group, and the cause of a LeakedError."""
    while isinstance(error, BaseExceptionGroup | LeakedError):
        inside = cast(Any, error)
        error = cast(BaseException, inside.__cause__ if isinstance(error, LeakedError) else inside.exceptions[0])
    return error


def describe_error(error: BaseException, *, with_line: bool = True) -> str:
    """`ValueError: text (file:line in function)`, on one line, as UTF-8 can hold it. For a group, its first error."""
    error = _opened(error)
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - a user wrote the method
        text = f"(its text cannot be shown: {type(broken).__name__})"
    if not isinstance(error, DescribedError):
        line = user_line(error) if with_line else ""
        text = " ".join(f"{type(error).__name__}: {text}".split()) + (f" ({line})" if line else "")
    return safe_text(text)
