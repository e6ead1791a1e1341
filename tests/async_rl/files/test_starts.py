"""Records of the starts of a run, and the page that a run writes in a separate process."""

import asyncio
import json
import subprocess

import pytest

from async_rl.files.starts import STARTS, record_start
from async_rl.metrics.pages import write_rollouts_page
from tests.async_rl.metrics.test_viewer import row, write


def git(folder, *arguments):
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_start_names_the_commit_of_the_working_directory_and_whether_it_was_changed(tmp_path, monkeypatch):
    code, run = tmp_path / "code", tmp_path / "run"
    code.mkdir(), run.mkdir()
    monkeypatch.chdir(code)
    record_start(run, command="python -m async_rl.run", train_step=0)
    git(code, "init", "-q")
    (code / "task.py").write_text("1")
    git(code, "add", "."), git(code, "commit", "-qm", "first"), git(code, "tag", "v1")
    record_start(run, command="python -m async_rl.run", train_step=0)
    (code / "task.py").write_text("2")
    record_start(run, command="python -m async_rl.run lr=2", train_step=20)
    starts = [json.loads(line) for line in (run / STARTS).read_text().splitlines()]
    commit = git(code, "rev-parse", "--short=12", "HEAD")
    assert [start["commit"] for start in starts] == [None, commit, f"{commit}-dirty"]
    assert starts[2]["command"].endswith("lr=2") and starts[2]["train_step"] == 20


async def test_the_page_of_a_run_is_written_by_another_process(tmp_path):
    write(tmp_path, 2, [row(2, 0, 0)])
    await write_rollouts_page(tmp_path, warn=pytest.fail)
    assert "Rollouts" in (tmp_path / "rollouts.html").read_text()


async def test_a_page_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    notes = []
    await write_rollouts_page(tmp_path, warn=notes.append)
    monkeypatch.setenv("PATH", str(tmp_path))
    await write_rollouts_page(tmp_path, warn=notes.append)
    assert len(notes) == 2 and "rollout.record.steps" in notes[0] and "nice" in notes[1]


async def test_a_run_that_ends_does_not_leave_the_process_behind(tmp_path, monkeypatch):
    made, created = [], asyncio.Event()
    create = asyncio.create_subprocess_exec

    async def sleeping(*_command, **options):
        made.append(await create("sleep", "1000", **options))
        created.set()
        return made[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", sleeping)
    task = asyncio.create_task(write_rollouts_page(tmp_path, warn=pytest.fail))
    await created.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made[0].returncode is not None
