"""The journal of a run: what is in flight, on disk. `journal.py` has the contract, `format.py` the layout."""

from __future__ import annotations

from message_queue.journal.errors import (
    JournalBroken,
    JournalBusy,
    JournalClosed,
    JournalError,
    JournalFormatError,
    JournalFull,
    JournalRunError,
    JournalStepError,
    JournalUnwritable,
)
from message_queue.journal.journal import Journal
from message_queue.journal.log import JournalConfig
from message_queue.journal.open import Recovered, RecoveredGroup, check_owner
from message_queue.journal.recovery import Damage, LostContent, RecoveryReport
from message_queue.journal.state import JournalStart
from message_queue.journal.writer import JournalStats

__all__ = [
    "Damage",
    "Journal",
    "JournalBroken",
    "JournalBusy",
    "JournalClosed",
    "JournalConfig",
    "JournalError",
    "JournalFormatError",
    "JournalFull",
    "JournalRunError",
    "JournalStart",
    "JournalStats",
    "JournalStepError",
    "JournalUnwritable",
    "LostContent",
    "Recovered",
    "RecoveredGroup",
    "RecoveryReport",
    "check_owner",
]
