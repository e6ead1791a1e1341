"""What the driver does with the processes that it starts."""

import contextlib

import pytest

from async_rl import workers
from async_rl.config import load_config
from async_rl.workers import Workers


class FakeTrainer:
    """Keeps what it is closed with."""

    def __init__(self):
        self.closed = []

    async def pids(self):
        return [7]

    async def close(self, *, timeout_s, remove_updates=None):
        self.closed.append(remove_updates)
        raise OSError("its node is gone")


@pytest.fixture
def trainers(monkeypatch):
    """The trainers that were started."""
    started = []

    async def start(config, **options):
        started.append(FakeTrainer())
        return started[-1]

    monkeypatch.setattr(workers.TrainerHandle, "start", start)
    return started


async def test_a_trainer_removes_its_versions_at_the_end_of_a_run_and_not_before(trainers, tmp_path):
    config, versions = load_config([f"output_dir={tmp_path}"]), tmp_path / "versions"
    async with contextlib.AsyncExitStack() as stack:
        running = Workers(
            config,
            task=None,
            placement=None,
            stack=stack,
            weights_directory=versions,
            processes=tmp_path / "processes.json",
            logs=tmp_path,
        )
        first = await running._start_trainer(tmp_path, config.optimizer)
        second = await running.replace_trainer(first)
        assert first.closed == [None], "a replica that is restarted meanwhile needs them"
        assert second.closed == []
    assert trainers == [first, second]
    assert first.closed == [None, versions] and second.closed == [versions]
