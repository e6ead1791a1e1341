"""The driver's side of the trainer: what each rank is sent."""

import asyncio

import pytest
import torch
from tensordict import TensorDict

from async_rl import handles
from async_rl.batch.routed_experts import layers_of
from message_queue.tokens import RoutingSpec

ROUTING = RoutingSpec(layers=(1, 2, 3), num_experts=8, top_k=2)


class FakeRank:
    """Keeps what it is called with; stands for an actor and its method `call`."""

    def __init__(self, number):
        self.number, self.call, self.got = number, self, []

    def remote(self, method, *args):
        self.got.append((method, *args))
        answer = asyncio.get_running_loop().create_future()
        answer.set_result({"rank": self.number})
        return answer


def batch_of(layers):
    rows = torch.randint(0, 8, (2, 5, layers, 2), dtype=torch.int16)
    return TensorDict({"token_ids": torch.zeros(2, 5), "routed_experts": rows}, batch_size=[2])


@pytest.fixture
def puts(monkeypatch):
    """What goes to the object store, which here hands it on as it is."""
    seen = []
    monkeypatch.setattr(handles.ray, "put", lambda value: seen.append(value) or value)
    return seen


async def test_each_stage_is_sent_its_rows_and_each_set_of_rows_is_put_once(puts):
    ranks = [FakeRank(i) for i in range(4)]
    held = [(), (), (1, 3), (1, 3)]
    handle = handles.TrainerHandle(ranks, routing=ROUTING, routed_layers=held, timeout_s=5)
    batch = batch_of(3)
    assert await handle.train(batch) == {"rank": 0}
    assert len(puts) == 2
    for rank, layers in zip(ranks, held, strict=True):
        ((method, sent),) = rank.got
        assert method == "train"
        assert layers_of(sent, routing=ROUTING) == layers
        assert sent["routed_experts"].shape == (2, 5, len(layers), 2)
    assert torch.equal(ranks[2].got[0][1]["routed_experts"], batch["routed_experts"][:, :, [0, 2]])


async def test_ranks_of_a_dense_model_are_sent_the_batch(puts):
    ranks = [FakeRank(i) for i in range(2)]
    handle = handles.TrainerHandle(ranks, routing=None, routed_layers=[(), ()], timeout_s=5)
    batch = batch_of(3).exclude("routed_experts")
    await handle.train(batch)
    assert all(rank.got == [("train", batch)] for rank in ranks) and len(puts) == 1
