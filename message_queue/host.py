"""What the processes of the queue are made of. Imports little, so that it starts fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from message_queue.client import REFUSALS
from message_queue.service import QueueService
from message_queue.shards.bookkeeper import Bookkeeper
from message_queue.shards.holder import ContentHolder
from message_queue.together import TogetherHost


class QueueHost(TogetherHost):
    """A QueueService that is called through `Together`. Takes its arguments, and whether shards hold the content.

    Args:
        open_log: called first; sends the output of the process to its log.
    """

    def __init__(self, *, sharded: bool = False, open_log: Callable[[], None] | None = None, **kwargs: Any) -> None:
        if open_log is not None:
            open_log()
        service = Bookkeeper(**kwargs) if sharded else QueueService(**kwargs)
        super().__init__(service, refusals=REFUSALS)


class ShardHost(TogetherHost):
    """A ContentHolder that is called through `Together`. Takes its arguments.

    Args:
        open_log: called first; sends the output of the process to its log.
    """

    def __init__(self, *args: Any, open_log: Callable[[], None] | None = None, **kwargs: Any) -> None:
        if open_log is not None:
            open_log()
        super().__init__(ContentHolder(*args, **kwargs), refusals=REFUSALS)
