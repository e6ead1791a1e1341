"""Errors of a user's code, with the line of the user."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import Any, cast

from agent_loop.text import safe_text

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


class DescribedError(Exception):
    """An error in another process. Its text is that of `describe_error` there, as the frames do not travel."""


class LeakedError(Exception):
    """User code let out a cancel that nobody had asked for, `sys.exit` or the like: its `__cause__`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.__cause__ = cause


def describe_error(error: BaseException, *, with_line: bool = True) -> str:
    """`ValueError: text (file:line in function)`, on one line, as UTF-8 can hold it. For a group, its first error."""
    while isinstance(error, BaseExceptionGroup | LeakedError):
        inside = cast(Any, error)
        error = cast(BaseException, inside.__cause__ if isinstance(error, LeakedError) else inside.exceptions[0])
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - a user wrote the method
        text = f"(its text cannot be shown: {type(broken).__name__})"
    if not isinstance(error, DescribedError):
        line = user_line(error) if with_line else ""
        text = " ".join(f"{type(error).__name__}: {text}".split()) + (f" ({line})" if line else "")
    return safe_text(text)
