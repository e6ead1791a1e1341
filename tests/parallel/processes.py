"""Processes of ranks; on a CPU they are forked from one with all imports. These take seconds each."""

import contextlib
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.multiprocessing

from async_rl.trainer.distributed import open_store

LIMIT_S = 500.0  # of all meetings of a rank
IMPORTED = ["async_rl.trainer.rank", "tests.parallel.support"]


def rank_processes():
    """Context for processes that have trained nothing yet, with one thread each.

    These imports initialize CUDA. A forked process cannot use it: with a GPU, each process repeats the imports.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the first process, before it forks any
    if torch.cuda.is_available():
        return torch.multiprocessing.get_context("spawn")
    multiprocessing.set_forkserver_preload(IMPORTED)
    return torch.multiprocessing.get_context("forkserver")


def run_ranks(target, *arguments, meetings, ranks):
    """Run `target(rank, addresses, *arguments)` on every rank; addresses: meeting -> the rendezvous of its trainers."""
    context = rank_processes()
    stores = {meeting: open_store("127.0.0.1") for meeting in meetings}
    addresses = {meeting: f"{store.host}:{store.port}" for meeting, store in stores.items()}
    processes = [context.Process(target=target, args=(rank, addresses, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()


@contextlib.contextmanager
def told(folder: Path, name: str, *, rank: int):
    """`result_of` tells of a failure in this block, which ends the process."""
    try:
        yield
    except BaseException:  # noqa: BLE001 - the test shows it
        (folder / f"{name}.{rank}.error").write_text(traceback.format_exc())
        sys.exit(1)  # the other ranks wait in a collective and fail when this one is gone


def result_of(folder: Path, name: str):
    """Content of `name`.pt as rank 0 wrote it; fails with the traceback of the first rank that failed."""
    for failure in sorted(folder.glob(f"{name}.*.error")):
        raise AssertionError(f"{failure.name}:\n{failure.read_text()}")
    return torch.load(folder / f"{name}.pt", weights_only=False)
