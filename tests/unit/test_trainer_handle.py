"""The driver's side of the trainer: what each rank is sent."""

import asyncio
import json
import pickle
from dataclasses import replace

import pytest
from ray.exceptions import RayTaskError

from async_rl import handles
from async_rl.batch.micro_batch import Coordinates
from async_rl.batch.routed_experts import RoutingError
from async_rl.train.checkpoint import FORMAT
from async_rl.train.losses import LossConfig
from async_rl.train.model import ParallelConfig
from async_rl.train.planning import Planner, RankPlace
from message_queue.tokens import RoutingSpec
from tests.parallel.support import EXPERTS, LAYERS, TOP_K, TRAINER, make_batch, make_supervised_batch

ROUTING = RoutingSpec(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)


class FakeRank:
    """Keeps what it is called with; stands for an actor and its method `call`."""

    def __init__(self, number):
        self.number, self.call, self.got = number, self, []

    def remote(self, method, *args):
        self.got.append((method, *args))
        answer = asyncio.get_running_loop().create_future()
        answer.set_result({"rank": self.number})
        return answer


@pytest.fixture
def puts(monkeypatch):
    """What goes to the object store, which here hands it on as it is."""
    seen = []
    monkeypatch.setattr(handles.ray, "put", lambda value: seen.append(value) or value)
    return seen


def handle_of(places, **changes):
    """A handle of fake ranks at `places`, and these."""
    ranks = [FakeRank(i) for i in range(len(places))]
    config = replace(TRAINER, ranks=len(places), **changes)
    planner = Planner(config=config, loss=LossConfig(), routing=ROUTING, places=places)
    return handles.TrainerHandle(ranks, planner=planner, timeout_s=5), ranks


def sent_to(rank):
    ((_, share),) = rank.got
    return share


def row_bytes(share):
    return sum(rows.numel() * rows.element_size() for update in share.updates for rows in update.rows or ())


async def test_each_data_parallel_rank_is_sent_its_own_sequences_and_rows(puts):
    handle, ranks = handle_of([RankPlace(data_rank=i, layers=LAYERS) for i in range(2)], micro_batch_tokens=4096)
    batch = make_batch((32,) * 64)
    assert await handle.train(batch) == {"rank": 0}
    assert [method for rank in ranks for method, _ in rank.got] == ["train", "train"]
    shares = [sent_to(rank) for rank in ranks]
    assert [len(update.per_sequence) for share in shares for update in share.updates] == [32, 32]
    every_row = int(batch["lengths"].sum()) * len(LAYERS) * TOP_K * 2
    assert [row_bytes(share) for share in shares] == [every_row // 2] * 2
    assert sum(len(pickle.dumps(share)) for share in shares) < 1.15 * len(pickle.dumps(batch))


async def test_stages_and_context_ranks_are_sent_the_rows_of_their_layers_and_tokens(puts):
    at = [Coordinates(context=2, context_rank=i) for i in range(2)]
    places = [RankPlace(at=a, layers=layers) for layers in ((1,), (2, 3)) for a in at]
    handle, ranks = handle_of(places, parallel=ParallelConfig(pipeline=2, context=2))
    batch = make_batch((24,) * 4)
    await handle.train(batch)
    layer = int(batch["lengths"].sum()) * TOP_K * 2
    assert [row_bytes(sent_to(rank)) for rank in ranks] == [layer // 2, layer // 2, layer, layer]
    assert len(puts) == 4


async def test_ranks_that_replay_nothing_of_the_batch_are_sent_no_rows_and_share_what_they_are_sent(puts):
    places = [RankPlace(data_rank=d, at=Coordinates(tensor=2, tensor_rank=t)) for d in range(2) for t in range(2)]
    handle, ranks = handle_of(places, parallel=ParallelConfig(tensor=2), router_replay="R2")
    await handle.train(make_batch())
    assert [row_bytes(sent_to(rank)) for rank in ranks] == [0] * 4
    assert len(puts) == 2 and sent_to(ranks[0]) is sent_to(ranks[1]) is not sent_to(ranks[2])


async def test_each_data_parallel_rank_is_sent_its_own_examples(puts):
    handle, ranks = handle_of([RankPlace(data_rank=i, layers=LAYERS) for i in range(2)])
    batch = make_supervised_batch()
    await handle.train_supervised(batch)
    shares = [sent_to(rank) for rank in ranks]
    assert sum(len(share.per_sequence) for share in shares) == len(batch)
    assert all(len(share.per_sequence) < len(batch) and share.rows is None for share in shares)


async def test_a_rank_that_raises_shows_the_end_of_its_log(puts, tmp_path):
    (tmp_path / "trainer-1.log").write_text("FloatingPointError: the gradient is not finite\n")

    class FailingRank(FakeRank):
        def remote(self, method, *args):
            raise_in_ray = asyncio.get_running_loop().create_future()
            raise_in_ray.set_exception(RayTaskError("call", "its traceback", FloatingPointError("not finite")))
            return raise_in_ray

    ranks = [FakeRank(0), FailingRank(1)]
    config = replace(TRAINER, ranks=2)
    planner = Planner(config=config, loss=LossConfig(), routing=ROUTING, places=[RankPlace(), RankPlace(data_rank=1)])
    handle = handles.TrainerHandle(ranks, planner=planner, timeout_s=5, logs=tmp_path)
    with pytest.raises(handles.TrainerError, match="trainer rank 1: save failed: not finite") as raised:
        await handle.save(tmp_path)
    (note,) = raised.value.__notes__
    assert note.splitlines() == [
        f"the end of {tmp_path / 'trainer-1.log'}:",
        "    FloatingPointError: the gradient is not finite",
    ]


async def test_rows_that_do_not_fit_are_refused_before_anything_is_sent(puts):
    handle, ranks = handle_of([RankPlace(data_rank=i, layers=LAYERS) for i in range(2)])
    batch = make_batch()
    batch["routed_experts"][1, 2, 0] = EXPERTS
    with pytest.raises(RoutingError, match=r"an expert id outside 0\.\.7: .* sequence 1, position 2, layer 1"):
        await handle.train(batch)
    assert not puts and not any(rank.got for rank in ranks)


async def test_ranks_remove_versions_before_they_are_closed(puts, monkeypatch, tmp_path):
    handle, ranks = handle_of([RankPlace(data_rank=i, layers=LAYERS) for i in range(2)])
    monkeypatch.setattr(handles.ray, "kill", lambda actor: None)
    await handle.close(timeout_s=5, remove_updates=tmp_path)
    assert [rank.got for rank in ranks] == [[("remove_updates", tmp_path), ("close",)]] * 2


def handle_elsewhere():
    ranks = [FakeRank(i) for i in range(2)]
    planner = Planner(config=replace(TRAINER, ranks=2), loss=LossConfig(), routing=ROUTING, places=())
    return handles.TrainerHandle(ranks, planner=planner, timeout_s=5)


@pytest.mark.parametrize("first_rank_is_here", [True, False])
async def test_a_checkpoint_that_ranks_wrote_elsewhere_is_refused(tmp_path, first_rank_is_here):
    if first_rank_is_here:
        document = {"format": FORMAT, "files": {"__0_0.distcp": "", "__1_0.distcp": ""}}
        manifest = {"model": {}, "layout": {}, "updates": 0, "steps": 0, "reference": False}
        (tmp_path / "trainer.json").write_text(json.dumps(document | {"manifest": manifest}))
        (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(handles.TrainerError) as caught:
        await handle_elsewhere().save(tmp_path)
    assert "output_dir" in str(caught.value)
    assert ("__1_0.distcp" if first_rank_is_here else "trainer.json") in str(caught.value)
