"""Logs of processes: their place, their content after a kill, and the text of their end."""

import os
import subprocess
import sys

import pytest

from async_rl.files.logs import TAIL_LINES, log_end, notes_of, with_notes

SCRIPT = """
import os, signal, subprocess, sys
from pathlib import Path
from async_rl.files.logs import log_failure, open_log
print("before")
open_log(Path(sys.argv[1]))
print("printed")
print("wrong", file=sys.stderr)
subprocess.run([sys.executable, "-c", "import os; print('of a child'); os._exit(0)"])
"""


def run(script, log):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", script, str(log)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["ends", "killed"])
def test_open_log_appends_all_output_of_a_process_and_its_children(tmp_path, end):
    log = tmp_path / "one.log"
    log.write_text("of a run before\n")
    done = run(f"{SCRIPT}\n{end}", log)
    assert (done.returncode, done.stdout, done.stderr) == (-9 if end else 0, "before\n", "")
    first, header, *rest = log.read_text().splitlines()
    assert first == "of a run before" and header.startswith("--- process ")
    assert rest == ["printed", "wrong", "of a child"]


def test_open_log_that_fails_reports_the_path_and_changes_nothing(tmp_path):
    log = tmp_path / "missing" / "one.log"
    done = run(SCRIPT, log)
    assert done.stdout.splitlines() == ["before", "printed"]
    assert str(log) in done.stderr.splitlines()[0] and done.stderr.splitlines()[1:] == ["wrong"]


def test_log_failure_writes_the_traceback_and_raises(tmp_path):
    run(f"{SCRIPT}\nwith log_failure():\n    raise ValueError('no such expert')", tmp_path / "one.log")
    assert "ValueError: no such expert" in (tmp_path / "one.log").read_text()


def test_log_end_has_the_path_and_the_last_lines(tmp_path):
    log = tmp_path / "one.log"
    log.write_bytes(b"\xff" * 100_000 + b"\n" + b"".join(b"line %d\n" % i for i in range(100)))
    path, *lines = log_end(log).splitlines()
    assert path == f"the end of {log}:"
    assert lines == [f"    line {i}" for i in range(100 - TAIL_LINES, 100)]


@pytest.mark.parametrize("name", ["missing.log", "."])
def test_log_end_of_a_file_that_cannot_be_read_names_it(tmp_path, name):
    assert str(tmp_path / name) in log_end(tmp_path / name)


def test_with_notes_puts_notes_below_the_text():
    error = ValueError("it died")
    assert (with_notes(error), notes_of(error)) == ("it died", ())
    error.add_note("the end of x:\n    y")
    assert with_notes(error) == "it died\nthe end of x:\n    y"
