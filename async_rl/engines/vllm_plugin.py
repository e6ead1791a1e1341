"""vLLM's entry point into this package (group `vllm.general_plugins`); vLLM calls `register` in each of its processes.

Imports nothing at module level: every vLLM process of the virtual environment loads it, wanted or not.
"""

from __future__ import annotations

import os

PLUGIN_VARIABLE = "ASYNC_RL_VLLM"  # set to 1 in the processes of a replica


def register() -> None:
    """Repair vLLM's CPU backend in this process; does nothing outside a replica or on a GPU."""
    if os.environ.get(PLUGIN_VARIABLE) != "1":
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from async_rl.engines.vllm_cpu import allow_routing_capture, prepack_experts_on_reload

    allow_routing_capture()
    prepack_experts_on_reload()
