"""A run as a whole, without processes: the watch of nodes next to the pipeline."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from async_rl.config import ConfigError, load_config
from async_rl.controller import launcher, processes
from async_rl.controller.launcher import Launcher
from async_rl.run import causes


class FakePlacement:
    """A placement of a run on one node. error: raised by its watch; None watches until it is cancelled."""

    def __init__(self, error=None, lacks=None, split=0):
        self.error, self.watched, self.required = error, None, {}
        self.shortage, self.split_groups = lambda: lacks, lambda size: split

    async def ready(self): ...

    def require_shared_memory(self): ...

    async def require_visible(self, directory, *, field):
        assert directory.is_dir()
        self.required[field] = directory

    async def require_store(self, url, *, field):
        self.required[field] = url

    async def watch(self, note):
        self.watched = asyncio.current_task()
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


async def finishes(*_args, **_options):
    """A run that ends at once."""
    return True


def program_of(tmp_path, monkeypatch, *, placement=None, run=finishes, overrides=()):
    """A program whose processes are replaced by `run`."""
    monkeypatch.setattr(processes, "start_ray", lambda _config: None)
    monkeypatch.setattr(processes.ray, "shutdown", lambda: None)
    monkeypatch.setattr(processes, "Placement", lambda *_args, **_options: placement or FakePlacement())
    monkeypatch.setattr(launcher, "read_run", lambda directory: SimpleNamespace())
    monkeypatch.setattr(launcher, "write_report", lambda runs, path: None)
    config = load_config([f"output_dir={tmp_path}", f"warm_start.cache={tmp_path}", *overrides])
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


GROUPS = "2 of 2 tensor, context or expert groups (2 trainer ranks each)"


@pytest.mark.parametrize(
    ("placement", "text", "is_told"),
    [
        (FakePlacement(lacks="the run needs 9 GPU"), "the run needs 9 GPU", True),
        (FakePlacement(split=2), GROUPS, True),
        (FakePlacement(), GROUPS, False),
    ],
)
async def test_a_shortage_and_groups_of_ranks_over_several_nodes_are_shown(
    placement, text, is_told, monkeypatch, tmp_path
):
    layout = ("trainer.ranks=4", "trainer.parallel.tensor=2")
    await program_of(tmp_path, monkeypatch, placement=placement, overrides=layout).run()
    assert (text in (tmp_path / "logs" / "driver.log").read_text()) is is_told


@pytest.mark.parametrize("scheme", ["", "file://"])
async def test_versions_are_in_a_checked_folder_or_url_and_are_removed(scheme, monkeypatch, tmp_path):
    parent = tmp_path / "weights"
    folders = []

    async def run(processes, **_options):
        name = processes._store.name.removesuffix("-local")
        assert processes._weights_directory == (f"{scheme}{parent}/{name}" if scheme else parent / name)
        folders.append(parent / name / "weights-1")
        folders[0].mkdir(parents=True)
        return True

    given = ("sync.route=folder", f"sync.directory={scheme}{parent}")
    made = program_of(tmp_path, monkeypatch, placement=(placement := FakePlacement()), run=run, overrides=given)
    assert await made.run()
    assert placement.required["sync.directory"] == (f"{scheme}{parent}" if scheme else parent)
    assert folders and not folders[0].parent.exists() and parent.is_dir()


async def test_a_store_that_does_not_remove_versions_is_reported(monkeypatch, tmp_path):
    def refuse(directory):
        raise OSError(f"{directory} cannot be removed")

    monkeypatch.setattr(launcher, "remove_directory", refuse)
    given = ("sync.route=folder", f"sync.directory=file://{tmp_path}/weights")
    assert await program_of(tmp_path, monkeypatch, overrides=given).run()
    assert "published versions stay (sync.directory)" in (tmp_path / "logs" / "driver.log").read_text()


def test_a_url_without_a_driver_is_refused_before_the_start(tmp_path):
    given = [f"output_dir={tmp_path}", "sync.route=folder", "sync.directory=nothing://bucket"]
    with pytest.raises(ConfigError, match=r"sync\.directory is nothing://bucket"):
        Launcher(load_config(given), resume_command="again")


@pytest.mark.parametrize(("finished", "records"), [(True, True), (False, True), (True, False)])
async def test_rollouts_are_a_page_after_each_checkpoint_and_at_the_end_and_starts_are_recorded(
    finished, records, monkeypatch, tmp_path
):
    written, once = [], asyncio.Event()

    async def write(directory, *, warn):
        written.append(directory)
        once.set()

    async def run(_processes, *, recorder, **_options):
        if records:
            (tmp_path / "rollouts").mkdir()
            (tmp_path / "rollouts" / "step-000001.parquet").touch()
            recorder.checkpointed.set()
            await once.wait()
        return finished

    monkeypatch.setattr(launcher, "write_rollouts_page", write)
    async with asyncio.timeout(30):
        assert await program_of(tmp_path, monkeypatch, run=run).run() is finished
    assert written == [tmp_path] * 2 * records
    (start,) = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert start["command"] == "again" and start["train_step"] == 0 and start["async_rl"].startswith("0.1.0")
