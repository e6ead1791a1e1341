"""The command line: exit codes, and how a failure reads."""

import asyncio
import subprocess
import sys

import pytest

from async_rl.run import EXIT_REFUSED, causes, main
from message_queue.journal import Journal, JournalConfig, JournalStart


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["wish=1"],
        ["total_train_steps=few"],
        ["task.prompt_file=/nowhere/prompts.jsonl"],
        ["task.options.min_operand=-5"],
        ["+task.options.wish=1"],
        ["task.factory=nowhere:Task"],
        ["model=hugging_face", "model.checkpoint=/nowhere"],
    ],
    ids=" ".join,
)
def test_bad_input_exits_with_2_and_one_error_before_any_process(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([f"output_dir={tmp_path / 'run'}", *arguments]) == EXIT_REFUSED
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and len(error.splitlines()) <= 2
    assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_written_is_refused_with_the_way_out(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main([f"output_dir={tmp_path / 'file' / 'run'}"]) == EXIT_REFUSED
    error = capsys.readouterr().err
    assert "which cannot be written (Not a directory); make it writable, make room, or give another one" in error


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"name": "other"}, "is of run 'other seed 0', this run is 'calculator seed 0'"),
        ({"format": 99}, "has format 99, this program reads 1"),
    ],
)
def test_a_journal_that_is_not_of_this_run_is_refused_before_any_process(
    capsys, tmp_path, monkeypatch, damage, message
):
    monkeypatch.setattr("message_queue.journal.format.FORMAT", damage.get("format", 1))

    async def begin():
        run = f"{damage.get('name', 'calculator')} seed 0"
        directory = tmp_path / "journal"
        journal, _ = await Journal.open(directory, run=run, config=JournalConfig(), start=JournalStart())
        await journal.close()

    asyncio.run(begin())
    monkeypatch.undo()
    assert main([f"output_dir={tmp_path}"]) == EXIT_REFUSED
    assert message in capsys.readouterr().err


def test_help_works_as_a_module():
    done = subprocess.run([sys.executable, "-m", "async_rl.run", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "overrides" in done.stdout


def test_a_cause_is_one_line_from_stage_to_root():
    root = ExceptionGroup("rollouts", [OSError("disk full")])
    error = ExceptionGroup("stages", [_chained(RuntimeError("stage rollout failed"), root)])
    assert list(causes(error)) == ["stage rollout failed: disk full"]


def test_every_leaf_has_its_line():
    error = ExceptionGroup("all", [ValueError("a"), ExceptionGroup("inner", [KeyError("b"), ValueError("c")])])
    assert list(causes(error)) == ["a", "'b'", "c"]


def _chained(error, cause):
    error.__cause__ = cause
    return error
