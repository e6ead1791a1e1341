"""Typed calls of a service that may run in another process.

A stub takes name, arguments and result of a call from the method: `stub.call(RolloutWorker.cancel, 3, reason="late")`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

S_co = TypeVar("S_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")


class Stub(Protocol[S_co]):
    """Calls the service of class `S_co`."""

    @property
    def name(self) -> str: ...

    async def call(
        self, method: Callable[Concatenate[S_co, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a method of the service's class, such as `RolloutWorker.flush`."""
        ...


class InProcess:
    """A service of this process is its own stub."""

    async def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """See `Stub.call`."""
        return await getattr(self, method.__name__)(*args, **kwargs)
