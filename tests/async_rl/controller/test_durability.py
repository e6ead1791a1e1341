"""A loss of power at any moment leaves a whole checkpoint, and the records of all steps that it holds."""

import contextlib
import json
from types import SimpleNamespace

import pyarrow as pa
import pytest

from async_rl.config import CheckpointConfig, load_config
from async_rl.controller.checkpoints import Checkpoints, RunState, read_run_state
from async_rl.controller.resume import Resume
from async_rl.files.atomic_dir import partial_folder, publish_folder, sync_path
from async_rl.files.rollouts import FOLDER, recorded_steps, write_step
from async_rl.metrics.recorder import ENDED_UNRECORDED, RECORD_LOST, Recorder, missing_records
from async_rl.metrics.registry import StepRecord
from async_rl.rollout.group_contents import StoredContent
from message_queue.ledger import LedgerCounts
from message_queue.state import QueueSnapshot
from tests.helpers.killed_saves import save_whole
from tests.helpers.power_loss import Disk

STEPS = 4


class Saver:
    """A trainer that writes two files as `async_rl.trainer.state.checkpoint` does."""

    def __init__(self, word):
        self._word = word

    async def save(self, directory):
        self._directory = directory
        partial_folder(directory).mkdir()

    async def saved(self):
        for name in ("model", "optimizer"):
            (partial_folder(self._directory) / name).write_text(self._word)
        publish_folder(self._directory)


def quiet_console():
    """Keeps its notes."""
    notes = []
    silent = {name: lambda *_: None for name in ("step", "validation", "close")}
    return SimpleNamespace(notes=notes, note=lambda text, *, level=0: notes.append(text), **silent)


def recorder_in(directory, console=None):
    return Recorder(directory, console=console or quiet_console())


def state_of(step):
    ledger = LedgerCounts(admitted=step, trained=step)
    return RunState(train_step=step, queue=QueueSnapshot(next_group=step, ledger=ledger))


def record(recorder, step):
    """One step that trained the group of that number."""
    recorder.step(StepRecord(metrics={"train_step": step}, staleness_tokens={}, schedule=[]))
    recorder.ledger([{"group": step - 1, "outcome": "trained", "train_step": step}])


class Run:
    """Steps with a checkpoint of each, the last one saved twice; whole, or until a loss of power."""

    def __init__(self, root, target):
        self.directory, self.target = root / "outputs" / "run", target
        self.returned = 0  # newest step whose save returned
        self.seen = set()
        self.disks = 0

    async def go(self, disk):
        recorder = recorder_in(self.directory)
        checkpoints = Checkpoints(self.directory / "checkpoints", config=CheckpointConfig(keep=2))
        with contextlib.closing(recorder):
            for step in (*range(1, STEPS + 1), STEPS):
                if step > self.returned:
                    record(recorder, step)
                await save_whole(checkpoints, state_of(step), trainer=Saver(f"step {step}"), records=recorder)
                self.returned = step
                disk.step()

    def look(self, disk, _step):
        for left in disk.left_overs(self.target):
            self.disks += 1
            self.check(left / self.directory.relative_to(self.directory.parents[1]))

    def check(self, directory):
        checkpoints = Checkpoints(directory / "checkpoints", config=CheckpointConfig(keep=2))
        checkpoints.recover()
        latest = checkpoints.latest()
        step = 0 if latest is None else read_run_state(latest).train_step
        self.seen.add(step)
        assert step >= self.returned, f"{directory}: the checkpoint of step {self.returned} is missing"
        if latest is None:
            return
        held = {path.name: path.read_text() for path in (latest / "trainer").iterdir()}
        assert held == dict.fromkeys(("model", "optimizer"), f"step {step}"), directory
        assert missing_records(directory, train_step=step, trained=step) == [], directory


async def lose_power_everywhere(tmp_path):
    root, target = tmp_path / "disk", tmp_path / "left"
    root.mkdir(), target.mkdir()
    run = Run(root.resolve(), target)
    with Disk(root.resolve(), look=run.look) as disk:
        await run.go(disk)
    return run


async def test_a_loss_of_power_at_any_moment_leaves_a_checkpoint_and_its_records(tmp_path):
    run = await lose_power_everywhere(tmp_path)
    assert run.seen == set(range(STEPS + 1)) and run.disks > 200


PLANTS = {
    "records": ("async_rl.metrics.recorder.Recorder.sync", lambda recorder: None),
    "files": ("async_rl.files.atomic_dir._sync_tree", lambda folder: None),
    "names": (
        "async_rl.files.atomic_dir.sync_path",
        lambda path: None if path.name == "checkpoints" else sync_path(path),
    ),
    "folders": ("async_rl.metrics.recorder.make_folder", lambda folder: folder.mkdir(parents=True)),
}


@pytest.mark.parametrize(("target", "planted"), PLANTS.values(), ids=PLANTS)
async def test_a_loss_of_power_finds_a_sync_that_is_left_out(tmp_path, monkeypatch, target, planted):
    monkeypatch.setattr(target, planted)
    with pytest.raises((AssertionError, ValueError)):
        await lose_power_everywhere(tmp_path)


# ---- records that are shorter than their checkpoint


def recorded(directory):
    recorder = recorder_in(directory)
    for step in range(1, STEPS + 1):
        record(recorder, step)
    recorder.close()


def records(directory, name):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def resumed(directory, **of):
    """Notes and ledger of a run that resumes after the last step."""
    console = quiet_console()
    recorder = recorder_in(directory, console)
    recorder.resume_after(STEPS, **{"next_group": STEPS, "live": (), "trained": STEPS} | of)
    recorder.close()
    return console.notes, records(directory, "ledger.jsonl")


@pytest.mark.parametrize("name", ["metrics.jsonl", "schedule.jsonl", "ledger.jsonl"])
@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_record_file_without_its_end_is_reported(tmp_path, name, cut):
    recorded(tmp_path)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:-cut])
    missing = STEPS - whole[:-cut].count(b"\n") - (cut == 1)  # a record without its line's end is whole
    notes, ledger = resumed(tmp_path)
    assert [name in note for note in notes] == [True] * bool(missing)
    assert len(ledger) == STEPS
    for line in ledger[STEPS - missing :] if name == "ledger.jsonl" else ():
        assert (line["outcome"], line["reason"]) == ("dropped", str(RECORD_LOST))


@pytest.mark.parametrize(
    ("damaged", "left"),
    [(lambda lines: [lines[0], b"\0" * 9 + b"\xff\n", *lines[2:]], [1, 3, 4]), (lambda lines: [], [])],
    ids=["one line", "empty"],
)
def test_damage_of_a_record_file_is_reported_and_costs_no_other_line(tmp_path, damaged, left):
    recorded(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(damaged(lines)))
    notes, _ = resumed(tmp_path)
    assert ["metrics.jsonl" in note for note in notes] == [True]
    assert [line["train_step"] for line in records(tmp_path, "metrics.jsonl")] == left


def test_only_records_of_this_run_and_its_checkpoint_are_missing(tmp_path):
    assert resumed(tmp_path, next_group=0, trained=None) == ([], []), "the records are of another run"
    recorded(tmp_path)
    notes, ledger = resumed(tmp_path, next_group=STEPS + 1)
    assert ["ledger.jsonl" in note for note in notes] == [True] and ledger[-1]["reason"] == str(ENDED_UNRECORDED)


async def test_a_resumed_run_looks_for_the_records_of_its_own_checkpoint(tmp_path):
    directory = tmp_path / "run"
    recorded(directory)
    for step in (STEPS, STEPS + 1):
        write_step(directory / FOLDER, pa.table({"reward": [1.0]}), train_step=step, keep=10)
    recorder = recorder_in(directory)
    checkpoints = Checkpoints(directory / "checkpoints", config=CheckpointConfig())
    checkpoint = await save_whole(checkpoints, state_of(STEPS), trainer=Saver("weights"), records=recorder)
    recorder.close()
    restored = SimpleNamespace(
        began=False, live=frozenset(), given_up=frozenset(), next_group=STEPS, open=(), replay=0, notes=()
    )

    def notes_of(output_dir, *, resume):
        config = load_config([f"output_dir={output_dir}", f"resume={resume}", "trainer.router_replay=R3"])
        console = quiet_console()
        with contextlib.closing(recorder_in(output_dir, console)) as recorder:
            Resume(config).truncate_records(restored, StoredContent(), recorder)
        return [note for note in console.notes if "lacks" in note]

    assert notes_of(directory, resume="auto") == []
    assert list(recorded_steps(directory / FOLDER)) == [STEPS], "rollouts of later steps are removed"
    assert notes_of(tmp_path / "other", resume=checkpoint) == [], "the records are where the run was"
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert len(notes_of(directory, resume="auto")) == 1
