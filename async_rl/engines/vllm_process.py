"""Start and end of vLLM's engine process, and what its errors say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from agent_loop.engine import EngineError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

STOP_TIMEOUT_S = 10.0  # an engine process that takes longer to stop is killed


async def start_engine(args: dict[str, Any]) -> AsyncLLM:
    """Start the engine process without holding up the event loop."""

    def start() -> AsyncLLM:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))

    engine = await asyncio.to_thread(start)
    # The engine has its own copy: here it is for a check alone, which refuses greedy requests of such an engine.
    engine.input_processor.model_config.return_sampling_mask = False
    await engine.get_supported_tasks()  # cached by vLLM; the first request need not ask
    return engine


async def stop_engine(engine: Any) -> None:
    """Shut down without holding up the event loop; requests in flight end with an error."""
    handler = engine.output_handler
    if handler is not None and not handler.done():
        handler.cancel()  # or vLLM logs the end of the engine as a failure
        engine.output_processor.propagate_error(EngineError("the replica is closed"))
    await asyncio.to_thread(engine.shutdown, timeout=STOP_TIMEOUT_S)
    engine.shutdown = lambda timeout=None: None  # vLLM calls it again at interpreter exit, when it can only fail


def engine_processes(engine: Any) -> list[Any]:
    """The processes that vLLM's client started."""
    manager = engine.engine_core.resources.engine_manager
    return list(manager.processes) if manager is not None else []


def is_engine_death(error: BaseException) -> bool:
    """Whether vLLM says that its engine is gone, rather than that one call failed."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def describe(error: BaseException) -> str:
    """Type and text of an error, with its cause; vLLM's own wrappers have no text."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} ({describe(error.__cause__)})" if error.__cause__ is not None else text
