"""Plugin for vLLM (group `vllm.general_plugins`); vLLM calls `register` in each of its processes.

The module imports little, because every vLLM process of the virtual environment loads it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from async_rl.compat.garbage import no_collections, stay_frozen

PLUGIN_VARIABLE = "ASYNC_RL_VLLM"  # set to 1 in the processes of a replica


def register() -> None:
    """Prepare a vLLM process of a replica; do nothing in other vLLM processes.

    The process ends with its parent. On the CPU, vLLM's backend is patched; on a GPU it is unchanged.
    """
    if os.environ.get(PLUGIN_VARIABLE) != "1":
        return
    end_with_parent()
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from async_rl.compat.vllm import repair_cpu_backend

    repair_cpu_backend()


def run_engine(*args: Any, **options: Any) -> None:
    """Main function of the process of an engine; imports vLLM without garbage collections."""
    with no_collections():
        from vllm.v1.engine.core import EngineCoreProc
    stay_frozen()
    EngineCoreProc.run_engine_core(*args, **options)


def run_coordinator(*args: Any, **options: Any) -> None:
    """Main function of the process that coordinates data parallelism; loads no plugin, and ends with its parent."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    end_with_parent()
    DPCoordinatorProc.run_coordinator(*args, **options)


def end_with_parent(end: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL)) -> None:
    """Call `end` when the parent of this process ends; vLLM's processes would outlive a killed replica."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        end()

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()
