"""Starts and stops vLLM's processes, calls its ranks, and describes its errors."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.inference.nodes import NodePlace, NodeProcess
from async_rl.inference.vllm.config import VllmConfig, check_engine, engine_args
from async_rl.inference.vllm.plugin import end_with_parent, run_coordinator, run_engine
from message_queue.errors import EngineError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

STOP_TIMEOUT_S = 10.0  # an engine process that takes longer to stop is killed


async def start_engine(args: dict[str, Any]) -> AsyncLLM:
    """Start the engine process without blocking the event loop.

    Args:
        args: fields of vLLM's AsyncEngineArgs.
    """

    def start() -> AsyncLLM:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.coordinator import DPCoordinatorProc
        from vllm.v1.engine.core import EngineCoreProc

        DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)  # started by its name in another process
        EngineCoreProc.run_engine_core = staticmethod(run_engine)  # the same
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))

    engine = await asyncio.to_thread(start)
    # The engine process has its own copy. In this process the flag only enables a check that refuses greedy requests.
    engine.input_processor.model_config.return_sampling_mask = False
    engine.input_processor.speculative_config = None  # only to refuse min-p, which is applied to drafts, too
    await engine.get_supported_tasks()  # vLLM caches the result: this saves the first request a call
    return engine


class RankError(Exception):
    """A call failed on some ranks; names each with its error."""


async def call_ranks(engine: AsyncLLM, method: str, *args: Any) -> list[Any]:
    """Call a method of the worker of every rank and return all answers.

    vLLM's own `collective_rpc` returns only the answers of the first group of data parallelism.

    Raises:
        RankError: it failed on a rank.
    """
    client: Any = engine.engine_core
    groups = await client.call_utility_all_async("collective_rpc", "outcome", None, (method, *args), None)
    outcomes = [outcome for group in groups for outcome in group]
    if failed := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(outcomes) if error]:
        raise RankError("; ".join(failed))
    return [answer for answer, _ in outcomes]


async def stop_engine(engine: Any) -> None:
    """Stop the engine without blocking the event loop; requests in flight end with EngineError."""
    handler = engine.output_handler
    if handler is not None and not handler.done():
        handler.cancel()  # otherwise vLLM logs the stop as a failure
        engine.output_processor.propagate_error(EngineError("the replica is closed"))
    await asyncio.to_thread(engine.shutdown, timeout=STOP_TIMEOUT_S)
    engine.shutdown = lambda timeout=None: None  # vLLM repeats the call at interpreter exit, where it fails


def describe(error: BaseException) -> str:
    """Type and text of an error and its causes; vLLM's wrapper exceptions have no text."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} ({describe(error.__cause__)})" if error.__cause__ is not None else text


def start_node(
    config: VllmConfig, place: NodePlace, *, checkpoint: Path, capture_routing: bool, capture_support: bool
) -> NodeProcess:
    """Start the process of the ranks of this node; it meets the engine of node 0. See `start_vllm` for the arguments.

    Raises:
        ValueError: the configuration does not suit the checkpoint.
    """
    model = check_engine(config, checkpoint=checkpoint, capture_routing=capture_routing)
    args = engine_args(config, model, capture_routing=capture_routing, capture_support=capture_support, place=place)
    process = multiprocessing.get_context("spawn").Process(target=_run_node, args=(args,), name="vllm-node")
    process.start()
    assert process.pid is not None

    def wait() -> int | None:
        process.join()
        return process.exitcode

    return NodeProcess(process.pid, wait=wait)


def _run_node(args: dict[str, Any]) -> None:
    """Run the ranks of this node, as `vllm serve --headless` does, in a process group that ends with any rank.

    It ends with the parent, too.

    Args:
        args: fields of vLLM's AsyncEngineArgs.
    """
    os.setsid()
    end_with_parent(lambda: os.killpg(0, signal.SIGKILL))
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
