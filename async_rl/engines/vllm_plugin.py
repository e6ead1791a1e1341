"""vLLM's entry point into this package (group `vllm.general_plugins`); vLLM calls `register` in each of its processes.

Imports little at module level: every vLLM process of the virtual environment loads it, wanted or not.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading

PLUGIN_VARIABLE = "ASYNC_RL_VLLM"  # set to 1 in the processes of a replica


def register() -> None:
    """Prepare one process of a replica; does nothing in vLLM processes that are not of a replica.

    On the CPU it also repairs vLLM's backend; on a GPU upstream is left as it is.
    """
    if os.environ.get(PLUGIN_VARIABLE) != "1":
        return
    _end_with_parent()
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from async_rl.engines.vllm_cpu import allow_routing_capture, note_packed_weights, prepack_experts_on_reload

    allow_routing_capture()
    prepack_experts_on_reload()
    note_packed_weights()


def _end_with_parent() -> None:
    """Kill this process when its parent is gone; vLLM's engine process would otherwise outlive a killed replica."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()
