"""What the process of the queue is made of. Imports little, so that it starts fast."""

from __future__ import annotations

from typing import Any

from message_queue.client import REFUSALS
from message_queue.service import QueueService
from message_queue.together import TogetherHost


class QueueHost(TogetherHost):
    """A QueueService that is called through `Together`. Takes its arguments."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(QueueService(**kwargs), refusals=REFUSALS)
