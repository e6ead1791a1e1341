"""Processes of ranks; on a CPU they are forked from one that has imported what they need, which takes seconds each."""

import multiprocessing
import os

import torch
import torch.multiprocessing

IMPORTED = ["async_rl.trainer.rank", "tests.parallel.support"]


def rank_processes():
    """Context for processes that have trained nothing yet, with one thread each.

    These imports initialize CUDA, which a forked process cannot use: where there is a GPU, each process imports anew.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the first process, before it forks any
    if torch.cuda.is_available():
        return torch.multiprocessing.get_context("spawn")
    multiprocessing.set_forkserver_preload(IMPORTED)
    return torch.multiprocessing.get_context("forkserver")
