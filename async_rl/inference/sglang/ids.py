"""Keeps request ids prefix-free: SGLang aborts every request whose id starts with the given id."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from message_queue.errors import EngineError


class PrefixFreeIds:
    """The request ids in flight.

    Args:
        name: name of the replica, for error messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ids: set[str] = set()

    @contextmanager
    def reserve(self, request_id: str) -> Generator[None]:
        """Count `request_id` as in flight until the block ends.

        Raises:
            EngineError: `request_id` is a prefix of an id in flight, or the reverse.
        """
        for other in self._ids:
            if request_id.startswith(other) or other.startswith(request_id):
                raise EngineError(
                    f"{self._name}: request ids {request_id!r} and {other!r} are both in flight, and one is a prefix "
                    "of the other; SGLang aborts by prefix, so end ids with a character that they do not contain"
                )
        self._ids.add(request_id)
        try:
            yield
        finally:
            self._ids.remove(request_id)
