"""Processes of ranks; on a CPU they are forked from one with all imports. These take seconds each."""

import multiprocessing
import os
from pathlib import Path

import torch
import torch.multiprocessing

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


def run_ranks(target, arguments, *, ranks, limit_s):
    """Run `target(rank, *arguments)` on every rank; each may take `limit_s`."""
    context = rank_processes()
    processes = [context.Process(target=target, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limit_s)
        if process.is_alive():
            process.kill()


def result_of(folder: Path, name: str):
    """Content of `name`.pt as rank 0 wrote it, or the traceback of the first rank that failed."""
    failures = sorted(folder.glob(f"{name}.*.error"))
    if failures:
        return failures[0].read_text()
    path = folder / f"{name}.pt"
    return torch.load(path, weights_only=False) if path.exists() else "the ranks ended before"
