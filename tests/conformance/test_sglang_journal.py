"""Rollouts of a real SGLang server that continue from the files of a process that ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from async_rl.rollout.group_contents import ContentPlace, next_writer, read_content, writer_name
from async_rl.rollout.recorded import RecordedTrajectory, StoredRolloutLog
from message_queue.content import ContentWriter
from message_queue.heads import head_of
from message_queue.policies import build_policy
from message_queue.progress import RolloutRecord, RolloutStep
from message_queue.recovery import JournalPlace, Restored, open_queue
from message_queue.staleness import StalenessConfig
from message_queue.tokens import RoutingSpec, StopReason
from message_queue.training_sequence import content_of
from message_queue.trajectory import ResumeRouting, Trajectory
from tests.conformance.checks import assert_merged, assert_true, rows_sent, sampled_of, versions_of
from tests.conformance.engines import EngineUnderTest, tokens
from tests.helpers.dense import behaviour_logprobs, row_versions

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.filterwarnings("ignore"),
]
LENGTH = 60  # tokens that every trajectory samples


class Queue:
    """A queue with its journal in `directory`, and the content of its groups."""

    def __init__(self, directory: Path, *, routing: RoutingSpec, resume_routing: ResumeRouting) -> None:
        self.journal_place = JournalPlace(directory=directory, run="run")
        self.place = ContentPlace(
            directory=directory / "content",
            run="run",
            fsync=False,
            trajectories=2,
            routing=routing,
            resume_routing=resume_routing,
        )

    async def open(self) -> Restored:
        self.queue, self.journal, restored = await open_queue(
            self.journal_place, policy=build_policy(StalenessConfig(), batch_groups=1)
        )
        stored = await read_content(self.place, restored)
        assert not stored.notes
        self.groups = stored.groups
        self.handout = next_writer(self.place.directory)
        self.writer = await ContentWriter.open(
            self.place.directory, name=writer_name(self.handout), run="run", fsync=False
        )
        self.log = StoredRolloutLog(self.writer)
        return restored

    async def close(self) -> None:
        await self.writer.close()
        await self.journal.close()

    def recorded(self, trajectory: Trajectory, number: int) -> RecordedTrajectory:
        """One of group 0, written down as it grows."""

        def record(at: int, what: RolloutStep) -> None:
            record = RolloutRecord(group=0, trajectory=number, handout=self.handout, at=at, what=what)
            self.log.append(record)

        return RecordedTrajectory(trajectory, record=record, flush=self.log.flush)


@pytest.mark.parametrize("server", ["sglang"], indirect=True)
@pytest.mark.parametrize("resume_routing", ["append", "force"])
async def test_rollouts_go_on_from_the_journal_under_new_weights(
    tested: EngineUnderTest, tmp_path: Path, resume_routing: ResumeRouting
):
    before = Queue(tmp_path, routing=tested.routing, resume_routing=resume_routing)
    assert (await before.open()).began
    admission = await before.queue.admit(0)
    rollouts = [tested.rollout(f"g0-t{i}", resume_routing=resume_routing) for i in range(2)]
    for number, rollout in enumerate(rollouts):
        rollout.trajectory = before.recorded(rollout.trajectory, number)
    tasks = [
        tested.start(rollout.turn(tokens(20 + 90 * i, seed=i), max_new_tokens=LENGTH))  # the longer in two chunks
        for i, rollout in enumerate(rollouts)
    ]
    await tested.until_sampled(20)
    await tested.replica.pause()
    assert await tested.replica.abort() == 2
    while len(tested.exchanges) < 2:  # noqa: ASYNC110 - nothing tells of an answer
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await before.log.flush()
    await before.close()

    after = Queue(tmp_path, routing=tested.routing, resume_routing=resume_routing)
    assert (await after.open()).open == (admission,)
    group = after.groups[admission.group]
    await tested.publish("resume")
    await after.queue.publish(1, update=0)
    await after.queue.loaded(1)
    for number, (rollout, restored) in enumerate(zip(rollouts, group.trajectories, strict=True)):
        held = rollout.trajectory
        assert restored.resume_routing == resume_routing
        assert held.num_sampled >= 1
        assert restored.token_ids().tolist() == held.token_ids().tolist()
        assert behaviour_logprobs(restored).tolist() == behaviour_logprobs(held).tolist()
        assert np.array_equal(restored.sequences()[-1].routed_experts, held.sequences()[-1].routed_experts)
        rollout.move(tested, trajectory=after.recorded(restored, number))
    left = [LENGTH - rollout.trajectory.num_sampled for rollout in rollouts]
    ends = [rollout.resume(max_new_tokens=count) for rollout, count in zip(rollouts, left, strict=True)]
    assert await asyncio.gather(*ends) == [StopReason.LENGTH] * 2

    for rollout in rollouts:
        first, rest = tested.of_session(rollout.name)
        assert (versions_of(first), versions_of(rest)) == ([0], [1])
        assert sampled_of(first) + sampled_of(rest) == LENGTH
        assert rows_sent([first, rest]) == list(range(len(rollout.trajectory) - 1)), "each row came once"
        assert (rest.request.forced_experts is not None) == (resume_routing == "force")
        assert_merged(rollout.trajectory, [first, rest])
        rollout.trajectory.close(stop_reason=StopReason.LENGTH, reward=0.0)
    assert_true(tested, tested.exchanges)
    await after.log.flush()
    group.trajectories[:] = [rollout.trajectory for rollout in rollouts]
    await after.queue.put(head_of(group))
    [head] = (await after.queue.take()).groups
    assert head == head_of(group)
    for (sequence,), rollout in zip(content_of(group), rollouts, strict=True):
        assert np.array_equal(sequence.routed_experts, rollout.trajectory.sequences()[-1].routed_experts)
        assert row_versions(sequence).tolist() == row_versions(rollout.trajectory.sequences()[-1]).tolist()
    await after.close()
