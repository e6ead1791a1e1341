"""The driver's side of the trainer: plan and content for each rank, and failures of ranks."""

import asyncio
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from agent_loop.timeline import Timeline, TimeSpan
from async_rl.cluster import rpc, trainer
from async_rl.config import load_config
from async_rl.trainer.batch.training_batch import RecordedGroups
from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.model import LoraConfig
from async_rl.trainer.planning import Planner
from async_rl.trainer.state.checkpoint import FORMAT
from tests.helpers import tiny_models
from tests.parallel.support import TRAINER, make_batch, make_supervised_batch, training_batch_of


class FakeRank:
    """Stands for an actor: keeps its calls, and fails those in `fails`, by name."""

    def __init__(self, number, fails=None):
        self.number, self.fails, self.got = number, fails or {}, []

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args, **_options: self.answer(name, args))

    def answer(self, name, args):
        if name == "call":
            name, *args = args
        self.got.append((name, *args))
        answer = asyncio.get_running_loop().create_future()
        if name in self.fails:
            answer.set_exception(self.fails[name])
        else:
            spans = [TimeSpan("optimizer", "rank 0", 1.0, 2.0, {})]
            answer.set_result(({"rank": self.number}, spans))
        return answer


class Stored:
    """Stands for a reference to the object store."""

    def __init__(self, value):
        self.value, self.put_by = value, threading.current_thread()


@pytest.fixture
def puts(monkeypatch):
    """References to everything that is put into the object store."""
    seen = []
    monkeypatch.setattr(trainer.ray, "put", lambda value: seen.append(Stored(value)) or seen[-1])
    monkeypatch.setattr(trainer.ray, "ObjectRef", Stored)
    return seen


def handle_of(count, *, fails=None, logs=None, trace=None):
    """A handle of fake ranks, and the ranks; the last one fails."""
    ranks = [FakeRank(i, fails if i == count - 1 else None) for i in range(count)]
    planner = Planner(config=replace(TRAINER, ranks=count), loss=DecoupledPPO())
    return trainer.TrainerClient(ranks, planner=planner, timeout_s=5, logs=logs, trace=trace), ranks


@pytest.mark.parametrize("in_store", [False, True])
async def test_trainer_client_gives_all_ranks_one_plan_and_references_to_content(puts, in_store):
    seen = {}
    trace = SimpleNamespace(add=lambda process, spans: seen.update({process: spans}))
    handle, ranks = handle_of(2, trace=trace)
    batch = training_batch_of(make_batch())
    given = [Stored(content) for content in batch.contents] if in_store else batch.contents
    assert await handle.train(replace(batch, contents=given)) == {"rank": 0}
    assert {process: span.kind for process, (span,) in seen.items()} == dict.fromkeys(
        ("trainer-0", "trainer-1"), "optimizer"
    )
    ((method, plan, contents),), other = ranks[0].got, ranks[1].got
    assert method == "train" and other == [("train", plan, contents)]
    assert [reference.value for reference in contents] == batch.contents
    assert not in_store or contents == given
    assert len(puts) == 1 + (0 if in_store else len(batch.contents))
    assert plan.value.batch.contents == ()
    assert plan.value.batch.lengths.tolist() == batch.lengths.tolist()
    assert all(put.put_by is not threading.main_thread() for put in puts)


async def test_trainer_client_gives_all_ranks_the_plan_of_a_supervised_batch(puts):
    handle, ranks = handle_of(2)
    batch = make_supervised_batch()
    await handle.train_supervised(batch)
    ((method, plan, contents),) = ranks[1].got
    assert method == "train_supervised" and len(contents) == 1
    (update,) = plan.value.updates
    assert sorted(n for of_rank in update.micro_batches for mb in of_rank for n in mb) == list(range(len(batch)))
    assert all(any(mb for mb in of_rank) for of_rank in update.micro_batches)


@pytest.mark.parametrize("records", [False, True])
def test_trainer_rank_fetches_content_only_if_it_trains_or_records_it(monkeypatch, records):
    batch = training_batch_of(make_batch((40, 40, 3)).set("group", torch.arange(3)))
    batch = replace(batch, recorded=RecordedGroups(train_step=1, heads={1: None}))
    plan = Planner(config=replace(TRAINER, ranks=2), loss=DecoupledPPO()).policy(replace(batch, contents=()))
    references = [Stored(content) for content in batch.contents]
    for data_rank in range(2):
        fetched = []
        monkeypatch.setattr(trainer.ray, "get", lambda refs, seen=fetched: seen.extend(refs) or [r.value for r in refs])
        host = object.__new__(trainer.TrainerHost)
        host._rank = SimpleNamespace(
            data_rank=data_rank,
            records=records,
            train=lambda given: {"contents": given.batch.contents},
            throughput=lambda given, seconds: {"lengths": given.batch.lengths, "seconds": seconds},
            timeline=Timeline("rank"),
        )
        groups = sorted({*plan.groups_of(data_rank), *([1] if records else [])})
        answer, (span,) = host.call("train", plan, references)
        assert answer["contents"] == [batch.contents[group] if group in groups else () for group in range(3)]
        assert answer["lengths"] is plan.batch.lengths and answer["seconds"] > 0
        assert (span.kind, span.args) == ("fetch", {"groups": len(groups)})
        assert fetched == [references[group] for group in groups]
    assert {len(plan.groups_of(data_rank)) for data_rank in range(2)} != {3}


async def test_trainer_rank_that_raises_shows_the_end_of_its_log(tmp_path):
    (tmp_path / "trainer-1.log").write_text("FloatingPointError: the gradient is not finite\n")
    error = RayTaskError("call", "its traceback", FloatingPointError("not finite"))
    handle, _ = handle_of(2, fails={"save": error}, logs=tmp_path)
    with pytest.raises(trainer.TrainerError, match=r"trainer rank 1: save .*not finite") as raised:
        await handle.save(tmp_path)
    (note,) = raised.value.__notes__
    assert note.splitlines()[1:] == ["    FloatingPointError: the gradient is not finite"]


LOST_OBJECT = ObjectLostError("00", None, "")


@pytest.mark.parametrize("lost", [LOST_OBJECT, RayTaskError("call", "traceback", LOST_OBJECT).as_instanceof_cause()])
async def test_object_on_a_dead_node_fails_the_trainer_without_the_text_of_ray(lost, tmp_path):
    handle, _ = handle_of(1, fails={"save": lost}, logs=tmp_path)
    with pytest.raises(trainer.TrainerLostError, match=r"trainer rank 0.*node") as raised:
        await handle.save(tmp_path)
    assert not hasattr(raised.value, "__notes__") and str(lost) not in str(raised.value)


RESET = RayTaskError("call", "its traceback", RuntimeError("connection reset by rank 0"))


@pytest.mark.parametrize(("call", "error"), [("open_rendezvous", RESET), ("start", RESET), ("start", RayActorError())])
async def test_trainer_ranks_are_killed_if_one_does_not_start(call, error, monkeypatch, tmp_path):
    ranks, killed, failing = [], [], 0 if call == "open_rendezvous" else 1

    def remote(**_options):
        ranks.append(FakeRank(len(ranks), {call: error} if len(ranks) == failing else None))
        return ranks[-1]

    tiny_models.qwen3_moe_config().save_pretrained(tmp_path)
    monkeypatch.setattr(trainer, "TrainerActor", SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote)))
    monkeypatch.setattr(rpc.ray, "kill", killed.append)
    config, place = replace(load_config([]), trainer=replace(TRAINER, ranks=2)), SimpleNamespace(rank=lambda _: {})
    with pytest.raises(trainer.TrainerLostError, match=f"trainer rank .*{call}"):
        await trainer.TrainerClient.start(config, checkpoint=tmp_path, placement=place)
    assert killed == ranks and len(ranks) == 2


def test_a_warm_start_trains_all_weights_whatever_the_run_trains():
    config = load_config(["trainer.lora.rank=4", "trainer.lora.alpha=8"])
    assert trainer.trainer_of(config, warm_start=False).lora.rank == 4
    assert trainer.trainer_of(config, warm_start=True) == replace(config.trainer, lora=LoraConfig())


async def test_trainer_ranks_remove_versions_before_they_close(monkeypatch, tmp_path):
    handle, ranks = handle_of(2)
    monkeypatch.setattr(rpc.ray, "kill", lambda actor: None)
    await handle.close(timeout_s=5, remove_updates=tmp_path)
    assert [rank.got for rank in ranks] == [[("remove_updates", tmp_path), ("close",)]] * 2


@pytest.mark.parametrize("first_rank_is_here", [True, False])
async def test_trainer_checkpoint_that_ranks_wrote_elsewhere_is_refused(tmp_path, first_rank_is_here):
    if first_rank_is_here:
        document = {"format": FORMAT, "files": {"__0_0.distcp": "", "__1_0.distcp": ""}}
        manifest = {"model": {}, "layout": {}, "updates": 0, "steps": 0, "reference": False}
        (tmp_path / "trainer.json").write_text(json.dumps(document | {"manifest": manifest}))
        (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(trainer.TrainerError) as caught:
        handle, _ = handle_of(2)
        await handle.save(tmp_path)
        await handle.saved()
    assert "output_dir" in str(caught.value)
    assert ("__1_0.distcp" if first_rank_is_here else "trainer.json") in str(caught.value)
