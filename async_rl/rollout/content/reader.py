"""Content of groups, read from the files of all writers that `content` made.

A group that moved has records of several hand-outs, each to one writer. Their order is that of the hand-outs, not
of the times of writing: a writer that takes over a group has read the records that it continues, so its records replace
those of earlier hand-outs from their position on. Worker a was taken for dead after 20 tokens of trajectory 0, and
still wrote when worker b had started:

    hand-out 1, worker a   at 0 (20 tokens)               at 20 (5)               at 25, closed
    hand-out 2, worker b                      at 20 (7)               at 27 (4)
    read                   at 0               at 20                   at 27

Records of a path replace those of the same path only. A fork whose shared tokens are replaced is gone with its records
and its own forks, and its number may be reused: a record that starts a path replaces all earlier ones of its
number. A record at 0 of path 0 starts the rollout over and replaces all paths. The end of a trajectory names its forks
and their lengths, and what an earlier hand-out wrote beyond them is gone too:

    hand-out 1, path 0     at 0 (20)                        at 20 (5)
                path 1     forked at 20         at 20 (5)
                path 2     forked at 25
    hand-out 2, path 0                                      at 20 (7)
    read        path 0     at 0 (20)                        at 20 (7)
                path 1     forked at 20         at 20 (5)
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from async_rl.rollout.content.format import (
    CallStarted,
    Forked,
    IndexRow,
    RolloutRecord,
    Scored,
    TrajectoryClosed,
    data_path,
    decode,
    index_run,
    row_checksum,
)
from message_queue.errors import ContractError, JournalBroken, JournalMismatch
from message_queue.sqlite_file import connect, disk_error, disk_errors
from message_queue.tokens import RoutingSpec, TokenOutput
from message_queue.trajectory import Admission, PromptGroup, ResumeRouting, Trajectory

_ALL = -1  # a position before every record
_Numbered = tuple[int, RolloutRecord]  # number among the records of its writer, record

_UNREADABLE = (sqlite3.Error, UnicodeDecodeError)  # errors of SQLite, the second for names that are no text


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPlace:
    """Location of the stored rollouts of a run, and the settings to read them."""

    directory: Path
    """Folder of the files of all writers."""
    run: str
    """Unique name of the run, the same at every restart."""
    fsync: bool
    """Whether written content survives a loss of power."""
    trajectories: int
    """Rollouts of each group."""
    routing: RoutingSpec | None
    """Layout of the routing rows; None if the run captures none."""
    resume_routing: ResumeRouting
    """How rows of resumed requests are merged."""


def read_groups(place: ContentPlace, groups: Mapping[int, Admission]) -> tuple[dict[int, PromptGroup], list[str]]:
    """Read groups from the files of all writers. A living writer is not disturbed.

    A record that is damaged, and the later ones of the same writer and trajectory, are left out with a note, on
    whichever path they are.

    Args:
        place: its number of trajectories is the least per group; more if more were written.
        groups: by id.

    Returns:
        Group id -> group, whose trajectories without a record are empty; and texts about damage, each with its file.

    Raises:
        JournalFormatError: a file of another format.
        JournalMismatch: a file of another run.
        JournalError: a file cannot be opened.
        ContractError: rows of another model than the place has.
    """
    directory, notes = place.directory, list[str]()
    stored: dict[int, dict[int, list[_Numbered]]] = {group: {} for group in groups}
    for path in _indexes(directory):
        try:
            with closing(connect(path)) as index:
                found = index_run(index, path)
                if found is None:
                    continue
                if found != place.run:
                    raise JournalMismatch(f"{path} is content of run {found!r}, not of {place.run!r}; move it away")
                for group in groups:
                    for number, record in _read_group(index, path, group, notes):
                        stored[group].setdefault(record.trajectory, []).append((number, record))
        except _UNREADABLE as error:
            notes.append(_damage(error, path, "its records are left out"))
    read: dict[int, PromptGroup] = {}
    for group, admission in groups.items():
        count = max([place.trajectories, *(number + 1 for number in stored[group])])
        read[group] = PromptGroup(
            group=group,
            prompt=admission.prompt,
            admitted_version=admission.admitted_version,
            admitted_update=admission.admitted_update,
            trajectories=[Trajectory(routing=place.routing, resume_routing=place.resume_routing) for _ in range(count)],
        )
        for number, records in sorted(stored[group].items()):
            made = read[group].trajectories[number]
            if dropped := _rebuild(made, records):
                notes.append(
                    f"trajectory {number} of group {group} has {dropped} records in {directory} that do not follow its "
                    f"first {len(made)} tokens; they are left out"
                )
    return read, notes


def remove_settled(directory: Path, live: Collection[int], *, keep: Collection[str]) -> None:
    """Remove data files without a record of a live group, and the index of a writer that has no file any more.

    Args:
        live: groups that may still be read.
        keep: names of the writers that are open; their files stay.

    Raises:
        JournalFormatError: a file of another format.
        JournalError: the disk refuses.
    """
    live = set(live)
    for path in _indexes(directory):
        if path.stem in keep:
            continue
        try:
            with closing(connect(path)) as index:
                written = index_run(index, path) is not None
                rows = index.execute("SELECT DISTINCT file, group_id FROM records").fetchall() if written else []
        except _UNREADABLE as error:
            _damage(error, path, "it stays")
            continue
        needed = {data_path(directory, path.stem, file) for file, group in rows if group in live}
        names = re.compile(rf"{re.escape(path.stem)}-\d{{6,}}\.data")
        files = [file for file in directory.iterdir() if names.fullmatch(file.name)]
        settled = [file for file in files if file not in needed]
        if not needed:
            settled += [path.with_name(f"{path.name}-journal"), path]  # the index last: it lists the files
        for file in settled:
            with disk_errors("remove", file):
                file.unlink(missing_ok=True)


def _indexes(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.sqlite"))


def _read_group(index: sqlite3.Connection, path: Path, group: int, notes: list[str]) -> Iterator[_Numbered]:
    """(number, record) of one writer for a group, ascending; each trajectory up to its first damaged record."""
    damaged: set[int] = set()
    try:
        rows = index.execute(
            "SELECT * FROM records WHERE group_id = ? ORDER BY trajectory, number", (group,)
        ).fetchall()
    except _UNREADABLE as error:
        notes.append(_damage(error, path, f"its records of group {group} are left out"))
        return
    for values in rows:
        if values[1] in damaged:
            continue
        file = path
        try:
            row = msgspec.convert(values, type=IndexRow)
            file = data_path(path.parent, path.stem, row.file)
            yield row.number, _read_record(row, file)
        except PermissionError as error:
            raise disk_error(error, what="read", path=file) from error
        except (OSError, ValueError) as error:
            damaged.add(values[1])
            notes.append(
                f"group {group}: trajectory {values[1]} is damaged after {values[5]} tokens of path {values[2]} in "
                f"{file} ({error}); its later records there are left out"
            )


def _read_record(row: IndexRow, file: Path) -> RolloutRecord:
    """A record whose checksum is right; OSError or ValueError if it cannot be read or is damaged."""
    with file.open("rb", buffering=0) as data:
        data.seek(row.start)
        arrays = memoryview(data.read(row.length)) if row.length else memoryview(b"")
    if row_checksum(row, [arrays]) != row.checksum:
        raise ValueError("wrong checksum")
    return RolloutRecord(
        group=row.group,
        trajectory=row.trajectory,
        path=row.path,
        handout=row.handout,
        at=row.at,
        what=decode(row, arrays),
    )


def _rebuild(trajectory: Trajectory, records: list[_Numbered]) -> int:
    """Append the numbered records; how many do not follow the ones before.

    Scores are of the end that their hand-out knew; those of a hand-out before that of the end are left out.
    """
    ordered = [record for _, record in sorted(records, key=_order)]
    current, gone = _current([record for record in ordered if not isinstance(record.what, Scored)])
    left = 0
    for record in current:
        if isinstance(record.what, Forked) and record.what.parent in gone:
            gone.add(record.path)
        if record.path not in gone and not _append(trajectory, record):
            left += 1
    for record in ordered if trajectory.awaits_scores else ():
        if isinstance(record.what, Scored) and record.handout >= current[-1].handout:
            trajectory.add_scores(record.what.scores)
    return left


def _current(records: Sequence[RolloutRecord]) -> tuple[list[RolloutRecord], set[int]]:
    """Of ordered records those that no later one replaces; and forks whose shared tokens are replaced."""
    current: list[RolloutRecord] = []
    gone: set[int] = set()
    replaced_from: dict[int, float] = {}  # path -> position
    others: float = float("inf")  # of paths that are not in `replaced_from`
    for record in reversed(records):
        path, what = record.path, record.what
        limit = replaced_from.get(path, others)
        if isinstance(what, TrajectoryClosed):
            if current:
                continue  # a later hand-out did not know this end
            replaced_from, others = {0: limit, **what.forks}, _ALL
        if _end(record) <= limit:
            if isinstance(what, Forked) and replaced_from.get(what.parent, others) < record.at:
                gone.add(path)
            else:
                current.append(record)
        replaced_from[path] = _ALL if isinstance(what, Forked) else min(limit, record.at)
        if path == 0 and record.at == 0:
            break
    return current[::-1], gone


def _append(trajectory: Trajectory, record: RolloutRecord) -> bool:
    """Append a record; False and no change if it does not follow the ones before."""
    paths = {path.path: path for path in trajectory.paths}
    what = record.what
    if trajectory.closed or (isinstance(what, Forked) == (record.path in paths)):
        return False
    if isinstance(what, Forked):
        try:
            paths[what.parent].fork_as(record.path, turns=what.turns, tokens=record.at)
        except (KeyError, ContractError):
            return False
        return True
    path = paths[record.path]
    if record.at != len(path):
        return False
    match what:
        case TokenOutput():
            path.extend(what)
        case CallStarted():
            path.unsure_call = what.call
        case TrajectoryClosed():
            if {path.path: len(path) for path in trajectory.paths[1:]} != what.forks:
                return False
            for number, agent in what.agents.items():
                paths[number].agent = agent
            trajectory.close(
                stop_reason=what.stop_reason, reward=what.reward, info=dict(what.info), rewards=what.rewards
            )
            trajectory.awaits_scores = what.awaits_scores
        case Scored():
            return False
        case _:
            path.observe(what)
    return True


def _order(one: _Numbered) -> tuple[int, int]:
    """Ascends by hand-out, and within a hand-out by the order of the appends."""
    return one[1].handout, one[0]


def _end(record: RolloutRecord) -> int:
    """Least position of a later record of the path that leaves this one in place.

    A call or an end appends no token; a later record at its position replaces it too.
    """
    match record.what:
        case TokenOutput() | np.ndarray():
            return record.at + len(record.what)
        case Forked():
            return record.at
        case _:
            return record.at + 1


def _damage(error: Exception, path: Path, consequence: str) -> str:
    """The note of an index that is damaged; raises JournalError if it cannot be opened, and may be whole."""
    failure = disk_error(error, what="read", path=path)
    if not isinstance(failure, JournalBroken):
        raise failure from error
    return f"{path} is damaged ({error}); {consequence}"
