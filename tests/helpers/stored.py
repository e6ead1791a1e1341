"""Trajectories through the content store: records that are appended, and trajectories that come back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

from async_rl.rollout.content.format import Forked, RolloutRecord, RolloutStep, TrajectoryClosed
from async_rl.rollout.content.reader import ContentPlace, read_groups
from async_rl.rollout.content.writer import ContentWriter
from message_queue.tokens import RoutingSpec
from message_queue.trajectory import Admission, PromptGroup, ResumeRouting, Trajectory

RUN = "run"


class StoredGroups(NamedTuple):
    """Result of `read_groups`."""

    groups: dict[int, PromptGroup]
    notes: list[str]


def admission(group: int) -> Admission:
    """Of a group whose fields all differ."""
    return Admission(group=group, prompt=10 * group + 1, admitted_version=group + 2, admitted_update=group + 3)


def records_of(trajectory: Trajectory, *, group: int = 0, number: int = 0, handout: int = 0) -> list[RolloutRecord]:
    """Records of all that was appended to a trajectory, path after path."""
    records: list[RolloutRecord] = []

    def add(path: Trajectory, at: int, what: RolloutStep) -> None:
        records.append(RolloutRecord(group=group, trajectory=number, handout=handout, at=at, what=what, path=path.path))

    for path in trajectory.paths:
        at = path.shared_tokens
        if path.parent is not None:
            add(path, at, Forked(parent=path.parent, turns=path.shared_turns))
        for turn in path.turns[path.shared_turns :]:
            add(path, at, turn.observation)
            at += len(turn.observation)
            for segment in turn.segments:
                add(path, at, segment)
                at += len(segment)
    if trajectory.stop_reason is not None and trajectory.reward is not None:
        forks = {path.path: len(path) for path in trajectory.paths[1:]}
        end = TrajectoryClosed(
            stop_reason=trajectory.stop_reason,
            reward=trajectory.reward,
            info=dict(trajectory.info),
            forks=forks,
            rewards=trajectory.rewards,
            agents={path.path: path.agent for path in trajectory.paths},
        )
        add(trajectory, len(trajectory), end)
    return records


def read(
    directory: Path,
    *groups: int,
    trajectories: int = 1,
    routing: RoutingSpec | None = None,
    resume_routing: ResumeRouting = "append",
    run: str = RUN,
) -> StoredGroups:
    """Groups of a run, from the files of all writers."""
    place = ContentPlace(
        directory=directory,
        run=run,
        fsync=False,
        trajectories=trajectories,
        routing=routing,
        resume_routing=resume_routing,
    )
    return StoredGroups(*read_groups(place, {group: admission(group) for group in groups}))


async def stored(trajectory: Trajectory) -> Trajectory:
    """The trajectory, written and read back."""
    with tempfile.TemporaryDirectory() as folder:
        writer = await ContentWriter.open(Path(folder), name="writer", run=RUN, fsync=False)
        await writer.append(records_of(trajectory))
        await writer.close()
        found = read(Path(folder), 0, routing=trajectory.routing, resume_routing=trajectory.resume_routing)
    assert not found.notes
    return found.groups[0].trajectories[0]
