"""When Python collects garbage in the processes of a run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def no_collections() -> Generator[None]:
    """Collect no garbage inside, and never visit the objects that were made inside.

    A process that imports vLLM or megatron makes 400,000 to 700,000 objects. Python would visit each of them six
    to eight times meanwhile: a quarter of the time of the imports. Later, each full collection would visit them and
    stop the process meanwhile.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def make_collections_rare() -> None:
    """Keep full garbage collections out of a process with an event loop: of a replica, a worker or the driver.

    A full collection stops the event loop, for 0.6 s if 10,000 trajectories are in flight. Python starts one each time
    that the number of objects has grown by a quarter, and trajectories leave no cycles. Cycles that a tool or reward
    leaves are collected while they are young; older ones wait for the next full collection, after about 20 million new
    objects.
    """
    gc.set_threshold(1_000, 10, 2_000)


def stay_frozen() -> None:
    """Make `gc.unfreeze` do nothing in this process, so that no collection visits frozen objects any more.

    vLLM's engine process calls it when it stops, and then collects garbage for 2 s.
    """
    gc.unfreeze = lambda: None
