"""Which record may follow on what is recorded. A record that was written is never questioned again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from message_queue.journal.errors import JournalError
from message_queue.journal.format import MAX_TRAJECTORIES, Entry
from message_queue.journal.groups import GroupState, LiveGroup, Progress
from message_queue.journal.records import (
    Admitted,
    Called,
    Checkpointed,
    Closed,
    Content,
    Dropped,
    Marked,
    Observed,
    Published,
    Ready,
    Sampled,
    Summary,
    Taken,
    Trained,
)
from message_queue.journal.state import JournalState


def checked(state: JournalState, entry: Entry) -> Entry:
    """The entry as it is to be written, with the counts that only the journal has.

    Raises:
        JournalError: it does not follow; says what is expected.
    """
    body = entry.body
    match body:
        case Admitted():
            _require(entry.group >= state.next_group, f"group {entry.group} was admitted before; ids are never reused")
            _require(
                0 < body.trajectories <= MAX_TRAJECTORIES,
                f"group {entry.group} has {body.trajectories} trajectories; a group has 1 to {MAX_TRAJECTORIES}",
            )
        case Observed() | Sampled() | Called() | Closed():
            _check_content(state, entry.group, entry.trajectory, body)
        case Ready():
            group = _in_state(state, entry.group, GroupState.OPEN, to="become ready")
            left = [i for i, p in enumerate(group.progress) if not p.closed]
            _require(not left, f"group {entry.group} cannot become ready: trajectories {left} are open")
        case Marked():
            _in_state(state, entry.group, GroupState.OPEN, to="become ready")
        case Taken():
            _check_batch(state, body.groups, GroupState.READY, to="be taken")
        case Trained():
            groups = _check_batch(state, body.groups, GroupState.TAKEN, to="be trained")
            _require(
                body.train_step >= state.train_step and body.train_step > state.settled_step,
                f"train_step is {body.train_step}; steps go up, the last was {state.train_step}, "
                f"and those up to {state.settled_step} are settled",
            )
            return _with_body(entry, msgspec.structs.replace(body, tokens=tuple(g.num_tokens for g in groups)))
        case Dropped():
            group = _live(state, entry.group)
            _require(group.state is not GroupState.TRAINED, f"group {entry.group} was trained; it cannot be dropped")
            _require(bool(body.reason), f"group {entry.group} was dropped without a reason; say why")
            tokens = group.num_tokens or body.tokens
            return _with_body(entry, msgspec.structs.replace(body, tokens=tokens))
        case Published():
            _require(
                body.version > state.version and body.update >= state.update,
                f"published version {body.version} with {body.update} updates after version {state.version} with "
                f"{state.update}; versions go up, updates do not go back",
            )
        case Checkpointed():
            _require(
                state.settled_step <= body.train_step <= state.train_step,
                f"checkpoint of train step {body.train_step}; steps up to {state.settled_step} are settled, and the "
                f"last one that trained a group is {state.train_step}",
            )
        case Summary():
            raise JournalError("a Summary is written by the journal itself")
    return entry


def _with_body(entry: Entry, body: Trained | Dropped) -> Entry:
    return Entry(body, group=entry.group)


def _check_content(state: JournalState, group: int, trajectory: int, body: Content) -> None:
    live = _in_state(state, group, GroupState.OPEN, to="be appended to")
    if not 0 <= trajectory < 2 * len(live.progress):
        last = 2 * len(live.progress) - 1
        raise JournalError(f"group {group} has trajectories 0..{last} at most; {trajectory} is none of them")
    progress = live.progress[trajectory] if trajectory < len(live.progress) else Progress()
    if progress.closed:
        problem = "is closed; nothing can be appended"
    elif body.at != progress.length:
        problem = (
            f"has {progress.length} tokens in the journal, and a record starts at position {body.at}; "
            "record everything in order, each once"
        )
    elif not progress.length and not (isinstance(body, Observed) and body.tokens):
        problem = "is empty; record its prompt first"
    elif isinstance(body, Closed) and not math.isfinite(body.reward):
        problem = f"has reward {body.reward}; rewards are finite"
    else:
        return
    raise JournalError(f"trajectory {trajectory} of group {group} {problem}")


def _check_batch(state: JournalState, groups: Sequence[int], expected: GroupState, *, to: str) -> list[LiveGroup]:
    _require(len(set(groups)) == len(groups), f"groups {list(groups)} name one twice")
    return [_in_state(state, group, expected, to=to) for group in groups]


def _in_state(state: JournalState, group: int, expected: GroupState, *, to: str) -> LiveGroup:
    live = _live(state, group)
    if live.state is not expected:
        found, needed = live.state.name.lower(), expected.name.lower()
        raise JournalError(f"group {group} is {found}; only one that is {needed} can {to}")
    return live


def _live(state: JournalState, group: int) -> LiveGroup:
    live = state.live.get(group)
    if live is None:
        raise JournalError(f"group {group} is not live: it was never admitted, or has ended")
    return live


def _require(met: bool, message: str) -> None:
    if not met:
        raise JournalError(message)
