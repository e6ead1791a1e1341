"""A run as a whole, without processes: the watch of nodes beside the pipeline."""

import asyncio
from types import SimpleNamespace

import pytest

from async_rl.config import load_config
from async_rl.controller import launcher, processes
from async_rl.controller.launcher import Launcher
from async_rl.run import causes


class FakePlacement:
    """A placement of a run on one node. error: raised by its watch; None watches until it is cancelled."""

    def __init__(self, error=None, lacks=None):
        self.error, self.lacks, self.watched = error, lacks, None

    def shortage(self):
        return self.lacks

    async def ready(self):
        pass

    def require_shared_memory(self):
        pass

    async def require_visible(self, directory, *, field):
        pass

    async def watch(self, note):
        self.watched = asyncio.current_task()
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


def program_of(tmp_path, monkeypatch, *, placement, run):
    """A program whose processes are replaced by `run`."""
    monkeypatch.setattr(processes, "start_ray", lambda _config: None)
    monkeypatch.setattr(processes.ray, "shutdown", lambda: None)
    monkeypatch.setattr(processes, "Placement", lambda *_args, **_options: placement)
    monkeypatch.setattr(launcher, "read_run", lambda directory: SimpleNamespace())
    monkeypatch.setattr(launcher, "write_report", lambda runs, path: None)
    config = load_config([f"output_dir={tmp_path}", f"warm_start.cache={tmp_path}"])
    made = Launcher(config, resume_command="again")
    monkeypatch.setattr(made, "_run_with", run)
    return made


async def test_an_error_of_the_watch_of_nodes_ends_the_run(monkeypatch, tmp_path):
    ended = []

    async def run(*_args, **_options):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    placement = FakePlacement(OSError("the cluster does not answer"))
    made = program_of(tmp_path, monkeypatch, placement=placement, run=run)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(30):
            await made.run()
    (cause,) = causes(caught.value)
    assert "nodes" in cause and "OSError: the cluster does not answer" in cause
    assert ended == [True]


@pytest.mark.parametrize("finished", [True, False])
async def test_the_watch_of_nodes_ends_with_the_run(finished, monkeypatch, tmp_path):
    async def run(*_args, **_options):
        await asyncio.sleep(0)
        return finished

    made = program_of(tmp_path, monkeypatch, placement=(placement := FakePlacement()), run=run)
    async with asyncio.timeout(30):
        assert await made.run() is finished
    assert placement.watched.cancelled()


async def test_a_shortage_of_the_cluster_is_shown_while_the_run_waits(monkeypatch, tmp_path):
    async def run(*_args, **_options):
        return True

    made = program_of(tmp_path, monkeypatch, placement=FakePlacement(lacks="the run needs 9 GPU"), run=run)
    await made.run()
    assert "the run needs 9 GPU" in (tmp_path / "logs" / "driver.log").read_text()
