"""A second start, and each command that looks at a run, while the run saves a checkpoint after every step."""

import signal

import pytest

from async_rl.config import CheckpointConfig
from async_rl.controller.checkpoints import Checkpoints, read_run_state
from async_rl.run import EXIT_REFUSED
from tests.e2e.runs import SMALL, check_records, finish, python, start, wait_for_step
from tests.helpers.lanes import WHOLE_RUN

pytestmark = [WHOLE_RUN, pytest.mark.timeout(1000)]


def test_a_run_is_unharmed_by_a_second_start_and_by_commands(tmp_path):
    directory, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(directory)
    process = start(
        directory, tmp_path / "warm", "checkpoint.every=1", "total_train_steps=1000", "endpoint.run_key=k3y-0"
    )
    wait_for_step(directory, 1, process)
    refused = python("-m", "async_rl.run", f"output_dir={link}", *SMALL, code=EXIT_REFUSED).stderr
    assert f"process {process.pid}" in refused and not (directory / "logs" / "ray").exists()
    checked = python("-m", "async_rl.run", "--check", f"output_dir={directory}", *SMALL).stdout
    assert f"process {process.pid}" in checked
    for module in ("report", "view", "explain"):
        python("-m", f"async_rl.{module}", directory)
    python("-m", "async_rl.export", directory, "--out", tmp_path / "exported")
    process.send_signal(signal.SIGINT)
    finish(process)
    steps = Checkpoints(directory / "checkpoints", config=CheckpointConfig()).steps()
    assert len(steps) == 2 and [read_run_state(steps[step]).train_step for step in steps] == list(steps)
    check_records(directory, steps=max(steps), staleness=1)
    stored = [path for kind in ("*.yaml", "*.json*", "logs/*", "report.html") for path in directory.glob(kind)]
    assert not [path for path in stored if path.is_file() and "k3y-0" in path.read_text(errors="replace")]
