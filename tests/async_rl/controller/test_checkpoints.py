"""Checkpoints appear whole, are pruned, and round-trip the driver's state."""

import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.config import CheckpointConfig
from async_rl.controller.checkpoints import Checkpoints, RunState, read_run_state
from async_rl.rollout.validator import is_due
from message_queue.state import QueueSnapshot
from message_queue.trajectory import Admission
from tests.helpers.killed_saves import BEFORE, NoRecords, save_whole

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
    """fails: the call that raises OSError, after it has written a file."""

    def __init__(self, fails=None):
        self._fails = fails

    async def save(self, directory):
        self._directory = directory
        directory.mkdir()
        self._write("save")

    async def saved(self):
        self._write("saved")

    def _write(self, call):
        (self._directory / call).write_text("weights")
        if call == self._fails:
            raise OSError("disk full")


def checkpoints_in(directory, *, keep=3):
    return Checkpoints(directory, config=CheckpointConfig(keep=keep))


async def saved(directory, state=STATE, *, trainer=None, records=None):
    """Path of a checkpoint."""
    parts = {"trainer": trainer or Saver(), "records": records or NoRecords()}
    return await save_whole(checkpoints_in(directory), state, **parts)


async def test_a_checkpoint_appears_when_the_trainer_has_written_it_and_its_state_reads_back(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    await checkpoints.begin(4, trainer=(trainer := Saver()))
    assert checkpoints.latest() is None
    path = await checkpoints.finish(STATE, trainer=trainer, records=NoRecords())
    assert path == checkpoints.latest() and (path / "trainer" / "saved").exists()
    state = read_run_state(path)
    assert (state.version_updates, state.queue) == (STATE.version_updates, STATE.queue)


@pytest.mark.parametrize("call", ["save", "saved"])
async def test_a_save_that_fails_leaves_the_previous_checkpoint_the_latest(tmp_path, call):
    first = await saved(tmp_path)
    with pytest.raises(OSError):
        await saved(tmp_path, RunState(train_step=5), trainer=Saver(call))
    assert checkpoints_in(tmp_path).latest() == first
    assert [p.name for p in tmp_path.iterdir()] == [first.name]


@pytest.mark.parametrize("step", [6, BEFORE[-1]], ids=["a new step", "the same step again"])
def test_a_kill_at_any_touch_of_the_disk_leaves_whole_checkpoints(tmp_path, step):
    subprocess.run([sys.executable, "-m", "tests.helpers.killed_saves", str(tmp_path), str(step)], check=True)
    runs = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(runs) > 15
    seen = set()
    for run in runs:
        checkpoints = checkpoints_in(run)
        checkpoints.recover()
        names = {path.name for path in run.iterdir()}
        assert names <= {"step-000002", "step-000004", f"step-{step:06d}"}, run.name
        assert {"step-000004"} <= names, run.name
        for path in run.iterdir():
            word = {3: "old", 5: "newer"}[read_run_state(path).param_version]
            held = {file.name: file.read_text() for file in (path / "trainer").iterdir()}
            assert held == {"model": word, "optimizer": word}, run.name
        seen.add((checkpoints.latest().name, read_run_state(checkpoints.latest()).param_version))
    assert seen == {("step-000004", 3), (f"step-{step:06d}", 5)}


class LosesAFile(NoRecords):
    """Another process removes a file of the trainer before the checkpoint appears."""

    def __init__(self, directory):
        self._directory = directory

    def sync(self):
        (self._directory / "step-000004.partial" / "trainer" / "save").unlink()


async def test_a_checkpoint_that_lost_a_file_before_it_appears_is_not_published(tmp_path):
    with pytest.raises(FileNotFoundError, match="trainer/save"):
        await saved(tmp_path, records=LosesAFile(tmp_path))
    assert checkpoints_in(tmp_path).latest() is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("")], ids=["gone", "cut off"])
async def test_a_checkpoint_without_a_file_is_refused_by_its_name(tmp_path, damage):
    path = await saved(tmp_path)
    damage(path / "trainer" / "saved")
    with pytest.raises(ValueError, match=r"lacks trainer/saved"):
        read_run_state(path)


@pytest.mark.parametrize("content", [None, b"{", b'{"format": 99, "state": {}}'])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ValueError, match="resume"):
        read_run_state(tmp_path)


def test_a_checkpoint_is_due_at_the_batch_that_reaches_the_interval():
    assert [s for s in range(1, 12) if is_due(s, every=5, per_batch=1)] == [5, 10]
    assert [s for s in range(4, 41, 4) if is_due(s, every=10, per_batch=4)] == [12, 20, 32, 40]
    assert [s for s in range(7, 31, 4) if is_due(s, every=4, per_batch=4)] == list(range(7, 31, 4))
    assert not is_due(5, every=0, per_batch=1)
