"""What the processes of the queue are made of. Imports little, so that it starts fast."""

from __future__ import annotations

from typing import Any

from message_queue.client import REFUSALS
from message_queue.service import QueueService
from message_queue.shards.bookkeeper import Bookkeeper
from message_queue.shards.holder import ContentHolder
from message_queue.together import TogetherHost


class QueueHost(TogetherHost):
    """A QueueService that is called through `Together`. Takes its arguments, and whether shards hold the content."""

    def __init__(self, *, sharded: bool = False, **kwargs: Any) -> None:
        service = Bookkeeper(**kwargs) if sharded else QueueService(**kwargs)
        super().__init__(service, refusals=REFUSALS)


class ShardHost(TogetherHost):
    """A ContentHolder that is called through `Together`. Takes its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(ContentHolder(*args, **kwargs), refusals=REFUSALS)
