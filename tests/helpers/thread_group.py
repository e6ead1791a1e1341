"""A process group whose ranks are threads."""

import threading

import torch
import torch.distributed as dist


class ThreadGroup:
    """Ranks of a group as threads of one process."""

    def __init__(self, size):
        self.parts, self.size_, self.barrier = [None] * size, size, threading.Barrier(size)
        self.local = threading.local()

    def size(self):
        return self.size_

    def rank(self):
        return self.local.rank

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None):
        self.parts[self.rank()] = tensor.clone()
        self.barrier.wait()
        stacked = torch.stack(self.parts)
        self.barrier.wait()
        tensor.copy_(stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0))
