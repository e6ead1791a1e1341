"""The ranks of a vLLM engine on a node but the first; see `async_rl.inference.nodes`."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from pathlib import Path
from typing import Any

from async_rl.inference.nodes import NodePlace, NodeProcess
from async_rl.inference.vllm.config import VllmConfig, check_engine, engine_args


def start_node(
    config: VllmConfig, place: NodePlace, *, checkpoint: Path, capture_routing: bool, capture_support: bool
) -> NodeProcess:
    """Start the process of the ranks of this node; it meets the engine of node 0. See `start_vllm` for the arguments.

    Raises:
        ValueError: the configuration does not suit the checkpoint.
    """
    model = check_engine(config, checkpoint=checkpoint, capture_routing=capture_routing)
    args = engine_args(config, model, capture_routing=capture_routing, capture_support=capture_support, place=place)
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(args,), name="vllm-node")
    process.start()
    assert process.pid is not None

    def wait() -> int | None:
        process.join()
        return process.exitcode

    return NodeProcess(process.pid, wait=wait)


def _run(args: dict[str, Any]) -> None:
    """Run the ranks of this node, as `vllm serve --headless` does, in a process group that ends with any rank.

    It ends with the parent, too.

    Args:
        args: fields of vLLM's AsyncEngineArgs.
    """
    os.setsid()
    _end_group_with_parent()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = AsyncEngineArgs(**args).create_engine_config(headless=True)
    parallel = config.parallel_config
    if parallel.node_rank_within_dp > 0:  # ranks of a group that starts on another node
        executor = MultiprocExecutor(config, monitor_workers=False)
        multiprocessing.connection.wait([worker.proc.sentinel for worker in executor.workers])
    else:
        groups = CoreEngineProcManager(
            parallel.data_parallel_size_local,
            start_index=parallel.data_parallel_rank,
            local_start_index=0,
            vllm_config=config,
            local_client=False,
            handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
            executor_class=Executor.get_class(config),
            log_stats=False,
        )
        multiprocessing.connection.wait(groups.sentinels())
    os.killpg(0, signal.SIGKILL)  # vLLM would first wait for the others to end


def _end_group_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()
