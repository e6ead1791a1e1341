"""What a second start, and each command that looks at a run, does to the directory of a living run."""

import json
import os
import sqlite3
import subprocess
import sys

import pytest

from async_rl import evaluate, export, report, view
from async_rl.config import CheckpointConfig, load_config, plain_values
from async_rl.controller.checkpoints import Checkpoints, RunState, hold, read_run_state
from async_rl.controller.launcher import Launcher
from async_rl.controller.resume import Resume
from async_rl.explain.__main__ import main as explain_main
from async_rl.files.owner import owned
from async_rl.plan.__main__ import main as plan_main
from async_rl.run import EXIT_REFUSED, main
from message_queue.journal import EventJournal, JournalConfig
from message_queue.state import StoredState
from tests.helpers.killed_saves import NoRecords, Saver, save_whole

SAVES = 200


def tree(directory):
    """Name -> content and time of each file and folder."""
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [directory, *directory.rglob("*")]
    }


def test_second_starts_and_checks_harm_no_save_of_a_living_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("async_rl.controller.resume.check_owner", None)  # a read lock could keep a commit waiting
    command = [sys.executable, "-m", "tests.helpers.owners", "save", str(tmp_path), str(SAVES)]
    living = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert living.stdout.readline() == "owned\n"
    for _ in range(3):
        assert main([f"output_dir={tmp_path}"]) == EXIT_REFUSED
        error = capsys.readouterr().err
        assert f"process {living.pid}" in error and "output_dir" in error and error.count("\n") == 1
        assert main(["--check", f"output_dir={tmp_path}"]) == 0
        assert f"process {living.pid}" in capsys.readouterr().out
        Resume(load_config([f"output_dir={tmp_path}"]))
    found = living.communicate(timeout=300)[0].split()
    assert found[-2] == "saved" and int(found[-1]) >= SAVES and "harmed" not in found, found
    assert [path.name for path in tmp_path.iterdir()].count("logs") == 0


REFUSAL = """
import sys, time
from async_rl.run import main
from pathlib import Path
print(main(sys.argv[1:]), sorted({"torch", "megatron", "vllm", "ray", "transformers"} & sys.modules.keys()))
"""


def test_a_second_start_is_refused_before_anything_heavy_is_imported(tmp_path):
    with owned(tmp_path):
        before = tree(tmp_path)
        command = [sys.executable, "-c", REFUSAL, f"output_dir={tmp_path}", "sync.route=memory"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == f"{EXIT_REFUSED} []\n"
        assert f"process {os.getpid()}" in done.stderr
        assert tree(tmp_path) == before


@pytest.fixture
def living(tmp_path):
    """Directory of a run that saves at this moment, and has its journal open."""
    directory = tmp_path / "run"
    with owned(directory):
        (directory / "config.yaml").write_text(json.dumps(plain_values(load_config([f"output_dir={directory}"]))))
        (directory / "metrics.jsonl").write_text('{"train_step": 2, "reward/mean": 0.5}\n')
        for name in ("checkpoints/step-000003.partial/trainer", "checkpoints/step-000002.replaced", "model.partial"):
            (directory / name).mkdir(parents=True)
        (directory / "checkpoints/step-000003.partial/trainer/shard").write_text("half")
        journal = EventJournal(directory / "journal", run="calculator seed 0", settings={}, config=JournalConfig())
        journal._write([StoredState()])
        yield directory
        journal.release()


COMMANDS = {
    "--check": lambda d: subprocess.call([sys.executable, "-m", "async_rl.run", "--check", f"output_dir={d}"]),
    "--show": lambda d: main(["--show", f"output_dir={d}"]),
    "explain": lambda d: explain_main([str(d)]),
    "plan": lambda d: plan_main([str(d)]),
    "report": lambda d: report.main([str(d), "--out", str(d.parent / "out")]),
    "view": lambda d: view.main([str(d), "--out", str(d.parent / "page.html")]),
    "export": lambda d: export.main([str(d)]),
    "evaluate": lambda d: evaluate.main([str(d)]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_changes_nothing_in_the_directory_of_a_living_run(living, command):
    before = tree(living)
    code = COMMANDS[command](living)
    assert tree(living) == before
    assert code == 0 or not command.startswith("--")


def test_a_check_does_not_roll_back_the_journal_of_a_killed_run(tmp_path):
    journal = EventJournal(tmp_path / "journal", run="calculator seed 0", settings={}, config=JournalConfig())
    journal._write([StoredState()])
    journal.release()
    if os.fork() == 0:
        connection = sqlite3.connect(journal.path, isolation_level=None)
        connection.executescript("PRAGMA cache_size=1; BEGIN IMMEDIATE; CREATE TABLE other (data BLOB)")
        connection.executemany("INSERT INTO other VALUES (?)", [(b"x" * 5000,)] * 200)
        os.kill(os.getpid(), 9)
    os.wait()
    assert (tmp_path / "journal" / "events.sqlite-journal").stat().st_size
    before = tree(tmp_path)
    Resume(load_config([f"output_dir={tmp_path}"]))
    assert tree(tmp_path) == before


def test_a_start_puts_the_checkpoints_of_a_killed_run_in_order(tmp_path):
    (tmp_path / "checkpoints" / "step-000003.partial").mkdir(parents=True)
    with owned(tmp_path):
        Launcher(load_config([f"output_dir={tmp_path}"]), resume_command="again")
    assert not list((tmp_path / "checkpoints").iterdir())


async def test_a_checkpoint_that_another_process_reads_is_removed_later(tmp_path):
    checkpoints = Checkpoints(tmp_path, config=CheckpointConfig(keep=1))

    async def save(step):
        await save_whole(checkpoints, RunState(train_step=step), trainer=Saver("x"), records=NoRecords())
        return [int(path.name[-1]) for path in sorted(tmp_path.iterdir())]

    assert await save(1) == [1]
    with hold(tmp_path / "step-000001"):
        assert await save(2) == [1, 2]
        assert read_run_state(tmp_path / "step-000001").train_step == 1
    assert await save(3) == [3]
    with pytest.raises(FileNotFoundError):
        hold(tmp_path / "step-000001")


def test_a_run_that_resumes_from_a_checkpoint_of_another_run_names_it_as_its_source(tmp_path):
    other = tmp_path / "other" / "checkpoints" / "step-000002"
    other.mkdir(parents=True)
    (other / "run.json").write_text('{"format": 2, "state": {"train_step": 2}}')
    (tmp_path / "link").symlink_to(tmp_path / "other")
    config = load_config([f"output_dir={tmp_path / 'run'}", f"resume={other}"])
    assert Resume(config).source == other
    for spelled in ("other", "link"):
        assert Resume(load_config([f"output_dir={tmp_path / spelled}", f"resume={other}"])).source is None


def test_two_runs_of_equal_paths_on_two_hosts_have_weights_of_their_own(tmp_path):
    """The second host has another disk below the same path, and the same sync.directory."""
    given = [f"output_dir={tmp_path / 'run'}", "sync.route=folder", "sync.directory=file:///shared"]
    names = []
    for host in ("a", "b"):
        with owned(tmp_path / "run"):
            (tmp_path / "run" / "config.yaml").touch()
            names += [Launcher(load_config(given), resume_command="again")._weights_directory for _ in range(2)]
        (tmp_path / "run").rename(tmp_path / host)
    assert names[0] == names[1] != names[2] == names[3]
