"""Checkpoints appear whole, are pruned, and round-trip the driver's state."""

import pytest

from async_rl.checkpoints import CheckpointConfig, Checkpoints, RunState, read_run_state
from message_queue.queue import Admission, QueueSnapshot

STATE = RunState(
    train_step=4,
    param_version=2,
    version_updates={0: 0, 1: 2, 2: 4},
    prompt_cursor=70,
    unfinished_prompts=(61, 66),
    queue=QueueSnapshot(
        next_group=71,
        next_update=4,
        version=2,
        update=4,
        unfinished=(Admission(group=70, prompt=66, admitted_version=2, admitted_update=4),),
    ),
)


class Saver:
    def __init__(self, error=None):
        self._error = error

    async def save(self, directory):
        directory.mkdir()
        (directory / "model").write_text("weights")
        if self._error:
            raise self._error


async def test_the_state_reads_back(tmp_path):
    path = await Checkpoints(tmp_path, config=CheckpointConfig()).save(STATE, trainer=Saver())
    state = read_run_state(path)
    assert state.version_updates == STATE.version_updates
    assert state.queue == STATE.queue
    assert (path / "trainer" / "model").exists()


async def test_a_save_that_fails_leaves_the_previous_checkpoint_the_latest(tmp_path):
    checkpoints = Checkpoints(tmp_path, config=CheckpointConfig())
    first = await checkpoints.save(STATE, trainer=Saver())
    with pytest.raises(OSError):
        await checkpoints.save(RunState(train_step=5), trainer=Saver(OSError("disk full")))
    assert checkpoints.latest() == first


async def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, config=CheckpointConfig(keep=2))
    for step in (2, 9, 10):
        await checkpoints.save(RunState(train_step=step), trainer=Saver())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000009", "step-000010"]


@pytest.mark.parametrize("content", [None, b"{", b'{"format": 99, "state": {}}'])
def test_what_is_no_checkpoint_is_refused_with_the_way_out(tmp_path, content):
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ValueError, match="resume"):
        read_run_state(tmp_path)


def test_due_follows_the_interval():
    checkpoints = Checkpoints(None, config=CheckpointConfig(every=5))
    assert [s for s in range(1, 12) if checkpoints.due(s)] == [5, 10]
    assert not Checkpoints(None, config=CheckpointConfig(every=0)).due(5)
