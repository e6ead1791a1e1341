"""Request ids in flight, none a prefix of another: SGLang aborts every request whose id begins with a given one."""

from __future__ import annotations

import bisect
from collections.abc import Generator
from contextlib import contextmanager

from agent_loop.engine import EngineError


class PrefixFreeIds:
    """Ids in flight.

    Args:
        name: of the replica, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._sorted: list[str] = []

    @contextmanager
    def held(self, request_id: str) -> Generator[None]:
        """Count `request_id` as in flight until the block ends.

        Raises:
            EngineError: it is a prefix of one in flight, or has one as its prefix.
        """
        at = bisect.bisect_left(self._sorted, request_id)
        for other in self._sorted[max(at - 1, 0) : at + 1]:  # none held is a prefix of another, so neighbours suffice
            if request_id.startswith(other) or other.startswith(request_id):
                raise EngineError(
                    f"{self._name}: of the request ids {request_id!r} and {other!r}, both in flight, one is a prefix "
                    "of the other, and SGLang aborts by prefix; end ids with a character that they do not contain"
                )
        self._sorted.insert(at, request_id)
        try:
            yield
        finally:
            del self._sorted[bisect.bisect_left(self._sorted, request_id)]
