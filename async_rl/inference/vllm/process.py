"""Starts and stops vLLM's engine process, and describes its errors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from async_rl.inference.vllm.plugin import run_coordinator, run_engine
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


def engine_processes(engine: Any) -> list[Any]:
    """The processes that vLLM's client started; none if the engine runs in this process."""
    manager = engine.engine_core.resources.engine_manager
    return list(manager.processes) if manager is not None else []


def is_engine_death(error: BaseException) -> bool:
    """Whether the error means that the engine is dead, not only that one call failed."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def describe(error: BaseException) -> str:
    """Type and text of an error and its causes; vLLM's wrapper exceptions have no text."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} ({describe(error.__cause__)})" if error.__cause__ is not None else text
