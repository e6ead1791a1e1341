"""Base of the processes of a run, and of their clients: each answer is bounded, each error names who failed at what."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from async_rl.files.logs import log_end, open_log

R = TypeVar("R")
E = TypeVar("E", bound=Exception)
Ref = Awaitable[R]
"""Ray's reference to a result of type R that another process has, or will have."""


class Host:
    """Base of what runs in an actor with an event loop.

    Args:
        log: file for the output of the process and of its children; None leaves it to Ray.
    """

    def __init__(self, *, log: Path | None = None) -> None:
        self._log = log
        open_log(log)

    async def pid(self) -> int:
        """Process id of this process."""
        return os.getpid()


class ActorClient:
    """An actor for its callers: answers are bounded, and errors name who failed at what.

    Args:
        actor: handle of the actor.
        name: name of the process in error texts.
        lost: error of a process that is dead or silent.
        failed: error of a call that raised; None for `lost`.
        refusals: errors of calls that are raised unchanged.
        log: file with the output of the process; its end becomes a note of an error.
    """

    def __init__(
        self,
        actor: Any,
        *,
        name: str,
        lost: type[Exception],
        failed: type[Exception] | None = None,
        refusals: tuple[type[Exception], ...] = (),
        log: Path | None = None,
    ) -> None:
        self.actor = actor
        self.name = name
        self.is_lost = False
        self._lost = lost
        self._failed = failed or lost
        self._refusals = refusals
        self._log = log
        self._log_end = ""

    async def answer(
        self, what: str, ref: Ref[R], *, timeout_s: float | None = None, failed: type[Exception] | None = None
    ) -> R:
        """Answer to a call. No other function translates Ray's errors.

        An actor that counts as dead may only be out of reach (`ActorUnavailableError`). Whoever starts another in its
        place kills it before, so that it does not come back.

        Args:
            what: name of the call.
            ref: the answer to come.
            timeout_s: bound on the wait; None for none.
            failed: error of a call that raised, instead of that of all calls.
        """
        who = self.name
        try:
            async with asyncio.timeout(timeout_s):
                return await ref
        except RayTaskError as error:
            cause = error.cause  # Ray's own text repeats the traceback
            if isinstance(cause, self._refusals):
                raise cause from None
            if isinstance(cause, ObjectLostError):
                raise self._lose(f"{who}: {what} failed: an object that it needs was on a node that died") from cause
            kind = self._lost if isinstance(cause, self._lost) else failed or self._failed
            raise self.explained(kind(f"{who}: {what} failed: {cause}")) from cause
        except ObjectLostError as cause:  # the log of the process explains it no better
            raise self._lose(f"{who}: its answer to {what} was on a node that died") from cause
        except RayActorError as cause:
            raise self.explained(self._lose(f"{who}: process died during {what}")) from cause
        except RayError as cause:
            raise self.explained(self._lose(f"{who}: {what} failed ({first_line(cause)})")) from cause
        except TimeoutError as cause:
            raise self.explained(self._lose(f"{who}: {what} took longer than {timeout_s} s")) from cause

    async def ask(self, method: str, /, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the actor; see `answer`."""
        return await self.answer(method, getattr(self.actor, method).remote(*args, **kwargs), timeout_s=timeout_s)

    async def pid(self, *, timeout_s: float) -> int:
        """Process id, once the process runs."""
        return await self.ask("pid", timeout_s=timeout_s)

    def kill(self) -> None:
        """End the process."""
        ray.kill(self.actor)

    def explained(self, error: E) -> E:
        """The error with the end of the log as a note; the log is read once."""
        if self._log is not None:
            self._log_end = self._log_end or log_end(self._log)
            error.add_note(self._log_end)
        return error

    def _lose(self, text: str) -> Exception:
        self.is_lost = True
        return self._lost(text)


def first_line(error: Exception) -> str:
    """Name and first line of an error; Ray's errors have many lines."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
