"""Short calls of a journal for tests."""

from __future__ import annotations

import numpy as np

from message_queue.contract import Admission
from message_queue.journal import Journal, JournalConfig, JournalStart
from message_queue.tokens import StopReason
from tests.unit.groups import segment

RUN = "run-1"


async def open_journal(directory, *, run=RUN, start=None, disk=None, **config):
    return await Journal.open(
        directory, run=run, config=JournalConfig(**config), start=start or JournalStart(), disk=disk
    )


def admission(group, *, version=0, prompt=None):
    return Admission(
        group=group, prompt=group if prompt is None else prompt, admitted_version=version, admitted_update=version
    )


async def prompt(journal, group, *, trajectories=1, tokens=2):
    await journal.admitted(admission(group), trajectories=trajectories)
    for i in range(trajectories):
        await journal.observed(group, np.arange(tokens, dtype=np.int32), trajectory=i, at=0)


async def finish(journal, group):
    """A ready group of one trajectory of 5 tokens."""
    await prompt(journal, group)
    await journal.sampled(group, segment(3), trajectory=0, at=2)
    await journal.closed(group, trajectory=0, at=5, stop_reason=StopReason.STOP, reward=float(group))
    await journal.ready(group)
