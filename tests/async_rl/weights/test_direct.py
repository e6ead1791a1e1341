"""Versions sent from the memory of trainer ranks to the ranks of an engine, by real groups of gloo."""

import contextlib
import json
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from async_rl.inference.loads import RankLoad, difference
from async_rl.weights.broadcast import described
from async_rl.weights.digest import load_share
from async_rl.weights.group import UNDELIVERED, _Blocks, received
from async_rl.weights.transport import Direct, Source, UpdateError, readable_by_ranks
from tests.helpers.trainer_memory import HOST, TrainerMemory

CPU = torch.device("cpu")
BUCKETS = [[(f"model.layers.{i}.{n}", torch.randn(20 + i, 3).to(torch.bfloat16)) for n in "ab"] for i in range(5)]
TENSORS = {name: tensor for bucket in BUCKETS for name, tensor in bucket}


@pytest.fixture
def one():
    """A trainer of one rank."""
    with closing(TrainerMemory([range(5)])) as made:
        yield made


@pytest.fixture
def trainer():
    """A trainer of two ranks."""
    with closing(TrainerMemory([(0, 2, 4), (1, 3)])) as made:
        yield made


LARGE = [[(name, tensor.repeat(60_000, 1)) for name, tensor in bucket] for bucket in BUCKETS]


def take(update_or_place, *, rank=0, ranks=1, load=dict, timeout_s=30.0):
    """What the loader of a rank took, and its report."""
    place = update_or_place if isinstance(update_or_place, str) else readable_by_ranks(update_or_place, timeout_s=60.0)
    took = []
    with closing(received(json.loads(place) | {"timeout_s": timeout_s}, rank=rank, ranks=ranks, device=CPU)) as buckets:
        report = load_share(
            buckets, lambda tensors: took.append(load(tensors)), sums=lambda _: [[0]], rank=rank, ranks=ranks
        )
    return took[0], RankLoad.of(report | {"parameters": {}})


def on_all_ranks(update, ranks, *, loads=None, timeout_s=30.0):
    """Outcome or error of each rank."""
    place = readable_by_ranks(update, timeout_s=timeout_s)
    with ThreadPoolExecutor(ranks) as pool:
        work = [
            pool.submit(take, place, rank=i, ranks=ranks, load=(loads or {}).get(i, dict), timeout_s=timeout_s)
            for i in range(ranks)
        ]
        return [each.exception() or each.result() for each in work]


@pytest.mark.parametrize(("parts", "ranks"), [([range(5)], 1), ([(0, 2, 4), (1, 3)], 2), ([(4,), (0,), (1, 2, 3)], 3)])
def test_all_ranks_take_a_version_from_all_owners_bit_by_bit(parts, ranks):
    with closing(TrainerMemory(parts)) as trainer:
        update = trainer.publish(3, BUCKETS)
        shapes = described("weights-3", update.direct, timeout_s=30.0)
        assert shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
        outcomes = on_all_ranks(update, ranks)
    for took, _ in outcomes:
        assert took.keys() == TENSORS.keys()
        assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in took.items())
    assert difference(update, [report for _, report in outcomes]) is None


def test_memory_takes_a_later_bucket_when_no_tensor_uses_it():
    blocks = _Blocks()
    first, second = blocks.take(100), blocks.take(100)
    memory, views = [first.data_ptr(), second.data_ptr()], [first[10:20].view(5, 2)]
    del first, second
    third = blocks.take(80)
    assert third.data_ptr() == memory[1] != memory[0], "a view uses the first"
    assert blocks.take(50).data_ptr() not in memory
    del views
    assert blocks.take(100).data_ptr() == memory[0]
    assert len(blocks.take(0)) == 0


def test_a_late_engine_takes_the_version_before_while_the_next_one_is_published(one):
    first = one.publish(3, BUCKETS)
    second = one.publish(4, [[(name, -tensor) for name, tensor in bucket] for bucket in BUCKETS])
    for update, sign in ((first, 1), (second, -1)):
        took, report = take(update)
        assert all(torch.equal(tensor, sign * TENSORS[name]) for name, tensor in took.items())
        assert difference(update, [report]) is None


def test_a_damaged_bucket_is_named_with_its_rank(trainer):
    update = trainer.publish(3, BUCKETS)
    trainer.ranks[1].bucket("weights-3", 1).data[5] ^= 1
    found = difference(update, [report for _, report in on_all_ranks(update, 2)])
    assert "rank 1 " in found and "bucket 1 " in found


def test_a_discarded_version_and_a_server_that_is_gone_are_named(one):
    update = one.publish(3, BUCKETS)
    one.ranks[0].discard(keep_version=4)
    with pytest.raises(RuntimeError, match=f"bucket 0 of weights-3 {UNDELIVERED} .*no bucket 0 of weights-3"):
        take(update)
    gone = replace(update, direct=Direct((Source(f"{HOST}:1", (0,)),), "gloo"))
    with pytest.raises(RuntimeError, match=f"bucket 0 of weights-3 {UNDELIVERED} {HOST}:1"):
        take(gone, timeout_s=0.2)
    with pytest.raises(UpdateError, match=f"bucket 0 of weights-3 {UNDELIVERED} {HOST}:1"):
        described("weights-3", gone.direct, timeout_s=0.2)


def test_a_rank_whose_load_fails_ends_it_for_the_others_and_they_do_not_blame_the_trainer(trainer):
    def refuse(tensors):
        next(tensors)
        raise ValueError("a shape")

    update = trainer.publish(3, LARGE)
    other, failed = on_all_ranks(update, 2, loads={1: refuse}, timeout_s=60.0)
    assert isinstance(failed, ValueError)
    assert isinstance(other, RuntimeError) and UNDELIVERED not in str(other) and "took longer" not in str(other)
    took, report = take(update)
    assert difference(update, [report]) is None and took.keys() == TENSORS.keys()


def be_a_rank(place, rank):
    """One of two ranks. The second is killed between two buckets."""

    def load(tensors):
        for name, _ in tensors:
            if "layers.1" in name and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    with contextlib.suppress(RuntimeError):
        take(place, rank=rank, ranks=2, load=load, timeout_s=600.0)


def test_an_engine_with_a_dead_rank_leaves_the_deliveries_to_others_alone(trainer):
    update = trainer.publish(3, LARGE)
    place = readable_by_ranks(update, timeout_s=600.0)
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=be_a_rank, args=(place, rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    ranks[1].join()
    assert ranks[1].exitcode == -signal.SIGKILL
    for is_killed in (False, True):
        if is_killed:  # as the engine does that has lost a rank
            ranks[0].kill()
            ranks[0].join()
        _, report = take(update)
        assert difference(update, [report]) is None


def be_an_owner(pipe):
    """A trainer rank that owns all buckets but one."""
    trainer = TrainerMemory([(1, 2, 3, 4)])
    pipe.send(trainer.publish(3, [[], *LARGE[1:]]).direct.sources)
    pipe.recv()


def test_an_owner_that_dies_is_named_by_each_rank(one):
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=be_an_owner, args=(theirs,))
    owner.start()
    (other,) = ours.recv()
    (here,) = one.publish(3, BUCKETS).direct.sources
    update = replace(one.publish(3, BUCKETS), direct=Direct((Source(here.address, (0,)), other), "gloo"))

    def kill(tensors):
        for name, _ in tensors:
            if "layers.1" in name:
                owner.kill()
                owner.join()

    for error in on_all_ranks(update, 2, loads={0: kill}, timeout_s=60.0):
        assert isinstance(error, RuntimeError)
        assert f"of weights-3 {UNDELIVERED} {other.address}" in str(error) and "took longer" not in str(error)
