"""Processes of ranks: forked from one that has imported what they need, as each import takes seconds."""

import multiprocessing
import os

import torch.multiprocessing

IMPORTED = ["async_rl.train.worker", "tests.parallel.support"]


def rank_processes():
    """Context for processes that have trained nothing yet, with one thread each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the first process, before it forks any
    multiprocessing.set_forkserver_preload(IMPORTED)
    return torch.multiprocessing.get_context("forkserver")
