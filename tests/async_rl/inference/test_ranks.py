"""A call that fails on one rank of an engine is an error that names the rank, and later calls get their own answers."""

import importlib

import pytest
import torch

from async_rl.inference.sglang.config import PLUGIN_PATH
from async_rl.inference.vllm.process import RankError, call_ranks
from async_rl.inference.vllm.worker import LoadsUpdates


class Worker(LoadsUpdates):
    """Rank 1 refuses the weight 7."""

    def __init__(self, rank):
        self.rank = rank

    def add(self, weight):
        if weight == 7 and self.rank == 1:
            raise ValueError("no 7")
        return self.rank + weight


class Engine:
    """Two groups of data parallelism with two ranks each."""

    def __init__(self):
        self.engine_core, self.groups = self, [[Worker(0), Worker(1)], [Worker(2), Worker(3)]]

    async def call_utility_all_async(self, utility, method, timeout, args, kwargs):
        assert (utility, timeout, kwargs) == ("collective_rpc", None, None)
        return [[getattr(worker, method)(*args) for worker in group] for group in self.groups]


async def test_vllm_call_on_all_ranks_names_the_rank_that_failed():
    engine = Engine()
    assert await call_ranks(engine, "add", 5) == [5, 6, 7, 8]
    with pytest.raises(RankError, match=r"^rank 1: ValueError: no 7$"):
        await call_ranks(engine, "add", 7)


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_sglang_work_on_all_ranks_fails_on_all_and_names_the_rank(monkeypatch, failing):
    monkeypatch.syspath_prepend(str(PLUGIN_PATH))
    loading = importlib.import_module("async_rl_sglang.loading")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)

    def gather(outcomes, here, *, group):
        outcomes[:] = [here, ("b", "") if failing != 1 else (None, "OSError: no file")]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)

    def work():
        if failing == 0:
            raise ValueError("a shape")
        return "a"

    if failing is None:
        assert loading._on_all_ranks(work, group=None) == ["a", "b"]
    else:
        with pytest.raises(RuntimeError, match=f"^rank {failing}: (ValueError: a shape|OSError: no file)$"):
            loading._on_all_ranks(work, group=None)
