"""Runs trainer cases on several ranks, each a separate process; a process runs all cases one after the other."""

import contextlib
import functools
import math
import time
import warnings
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from async_rl.trainer.state.optimizer import OptimizerConfig
from tests.parallel.processes import result_of, run_ranks, told
from tests.parallel.support import (
    assert_equal_gradients,
    assert_equal_metrics,
    assert_equal_weights,
    assert_near,
    exported,
    gradients,
    make_batch,
    make_supervised_batch,
    start_trainer,
)

RELEASE_S = 20.0
SMALL_BUCKET = 64 << 10  # bytes; a few tensors of the small models
# A large eps keeps an update smooth in its gradient: entries near zero would else differ by their sign.
ADAM = OptimizerConfig(lr=1e-3, eps=1e-3, weight_decay=0.01)

# One micro-batch: the balance loss is of a micro-batch, and must not depend on the ranks that share it.
BALANCE = {"supervised_aux_loss_coefficient": 0.5, "micro_batch_tokens": 4096}


def run_case(trainer, batch, *, folder: Path | None = None):
    """Results that a layout must not change: logprobs, metrics, gradients, and the weights after two updates."""
    logprobs = trainer.logprobs(batch)
    metrics = [trainer.train(batch)]
    if folder is not None:
        trainer.save(folder).result()
        trainer.train(batch)
        trainer.restore(folder)
    metrics.append(trainer.train(batch))
    grads = {} if trainer.model.wrapped[0].ddp_config.use_distributed_optimizer else gradients(trainer)
    weights = exported(trainer)
    check_source(trainer.model, weights)
    return {
        "logprobs": logprobs,
        "metrics": metrics,
        "gradients": grads,
        "weights": weights,
        "overlaps": overlaps(trainer),
    }


def overlaps(trainer):
    """Whether the gradients of updates after the first one were summed while a backward pass ran."""
    groups = [group for chunk in trainer.model.wrapped for group in chunk.bucket_groups]
    return all(group.ddp_config.overlap_grad_reduce and not group.is_first_batch for group in groups)


def check_source(model, weights):
    """Every tensor is sent by exactly one rank, in the bucket that the plan says; rank 0 receives all their bits."""
    from async_rl.trainer.model.source import WeightSource

    source = WeightSource(model.chunks, shape=model.shape, bucket_bytes=SMALL_BUCKET)
    sent = [(bucket.number, [(n, t.clone()) for n, t in tensors]) for bucket, tensors in source.buckets() if tensors]
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (source.plan, sent))
    assert all(plan == source.plan for plan, _ in ranks)
    of_rank = {number: (rank, tensors) for rank, (_, sent) in enumerate(ranks) for number, tensors in sent}
    assert sum(len(sent) for _, sent in ranks) == len(of_rank) == len(source.plan) > 1
    for bucket in source.plan:
        rank, tensors = of_rank[bucket.number]
        assert rank == bucket.owner
        assert sum(spec.num_bytes for spec in bucket.tensors) == sum(t.nbytes for _, t in tensors)
        assert [(n, str(t.dtype), tuple(t.shape)) for n, t in tensors] == [
            (spec.name, f"torch.{spec.dtype}", spec.shape) for spec in bucket.tensors
        ]
        assert all(torch.equal(t, weights[n]) for n, t in tensors)
    names = [spec.name for bucket in source.plan for spec in bucket.tensors]
    assert sorted(names) == sorted(weights)
    received = [(name, tensor.clone()) for name, tensor in source.on_first_rank()]
    assert [name for name, _ in received] == (names if dist.get_rank() == 0 else [])
    assert all(torch.equal(tensor, weights[name]) for name, tensor in received)


def assert_equal_cases(ours, theirs, expected):
    """Two results of `run_case` by float32 trainers; `expected` is the reference of the first update."""
    assert_near(ours["logprobs"], theirs["logprobs"], bound=2 * expected.logprob_bound)
    for mine, single in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert_equal_metrics(mine, single, expected)
    if ours["gradients"]:  # clipped
        assert_equal_gradients(ours["gradients"], expected, theirs["gradients"])
    assert_equal_weights(ours["weights"], theirs["weights"], expected, optimizer=ADAM, updates=2)


def run_balance_case(trainer, batch):
    """Loss and gradients of a supervised update with a strong load-balance loss."""
    metrics = trainer.train_supervised(batch)
    return {"metrics": metrics, "gradients": gradients(trainer)}


@contextlib.contextmanager
def counted_reads():
    """Sizes of the reads of checkpoints inside the block, in elements."""
    from async_rl.trainer.model.convert import _Reader

    sizes, read = [], _Reader.read

    def counted(*args, **kwargs):
        part = read(*args, **kwargs)
        sizes.append(part.numel())
        return part

    _Reader.read = counted
    try:
        yield sizes
    finally:
        _Reader.read = read


def look_at_export(trainer):
    """Sizes in elements while rank 0 receives all weights.

    held, whole: weights of this rank, and of all. limit: a bucket that the caller still has and the next one, and the
    parts of a unit on their way into it. most_at_once: the most that a rank has at one time on top of its own weights.
    """
    from async_rl.trainer.model.convert import named_weights
    from async_rl.trainer.model.source import WeightSource

    model = trainer.model
    weights = [weight for _, weight in named_weights(model.chunks)]
    held = sum(weight.numel() for weight in weights)
    source = WeightSource(model.chunks, shape=model.shape, bucket_bytes=SMALL_BUCKET)
    units = [[sum(math.prod(t.shape) for t in unit) for unit in bucket.units] for bucket in source.plan]
    limit = 2 * (max(map(sum, units)) + max(map(max, units)))
    with LiveTensors(known=weights, limit=limit) as live:
        for _ in source.on_first_rank():
            pass
    most = torch.tensor(live.most)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return {"limit": limit, "held": held, "whole": sum(map(sum, units)), "most_at_once": most.item()}


def held_bytes(trainer):
    """Bytes of the weights, gradients and optimizer state of this rank."""
    tensors = [weight for chunk in trainer.model.wrapped for weight in chunk.parameters()]
    for chunk in trainer.model.wrapped:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            tensors += [held for held in (buffer.param_data, buffer.grad_data) if held is not None]
    inner = trainer._optimizer._inner
    for part in getattr(inner, "chained_optimizers", [inner]):
        tensors += [weight for group in part.optimizer.param_groups for weight in group["params"]]
        tensors += [
            value for state in part.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class LiveTensors(TorchDispatchMode):
    """Elements of the tensors made inside the block that live at one time; `most` is the highest number.

    known: tensors made before; the block may make views from them.
    limit: elements that are expected at most. Above it, the threads of gloo get time to release the tensors of
    collectives that have ended; they do so a moment later.
    """

    def __init__(self, known, limit):
        super().__init__()
        self.now = self.most = 0
        self._limit, self._until = limit, time.monotonic() + RELEASE_S
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor)
        return result

    def _meet(self, tensor):
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes() // tensor.element_size()
        self.now += size
        while self.now > self._limit and time.monotonic() < self._until:
            time.sleep(0.001)
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._leave, size)

    def _leave(self, size):
        self.now -= size


def run_on_ranks(cases: dict[str, dict], folder: Path, *, ranks: int):
    """Function of the name of a case: the result of rank 0.

    A case is settings of the trainer, its `checkpoint`, and `batch`, the arguments of make_batch.
    """
    run_ranks(_rank, ranks, cases, folder, meetings=cases, ranks=ranks)
    return functools.partial(result_of, folder)


def _rank(rank, addresses, ranks, cases, folder):
    warnings.simplefilter("ignore")
    for name, changes in cases.items():
        with told(folder, name, rank=rank):
            changes = {"ranks": ranks, "rank": rank, "rendezvous": addresses[name], **changes}
            source, rows = changes.pop("checkpoint"), changes.pop("batch")
            with counted_reads() as sizes:
                trainer = start_trainer(source, optimizer=ADAM, **changes)
            if changes.items() >= BALANCE.items():
                result = run_balance_case(trainer, make_supervised_batch())
            else:
                result = run_case(trainer, make_batch(**rows), folder=folder / f"{name}-state")
                result |= {"read": sum(sizes), "bytes": held_bytes(trainer), **look_at_export(trainer)}
            trainer.close()
            if rank == 0:
                torch.save(result, folder / f"{name}.pt")
