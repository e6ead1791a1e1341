"""A vLLM replica: decodes with logprobs and routed experts, aborts to partial segments, and loads weights live.

The engine core runs in a process of its own; this object lives on one event loop and talks to it. The same class
serves CPU and GPU; what differs is in `vllm_config.py` (arguments, environment) and `vllm_cpu.py` (repairs of vLLM's
CPU backend).
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from agent_loop.engine import EngineError, GenerateRequest
from async_rl.engines.checkpoint_weights import digest_checkpoint, tensor_names, weight_files
from async_rl.engines.replica import Flight, ReplicaStats, RequestGate
from async_rl.engines.vllm_config import (
    ServedModel,
    VllmConfig,
    check_engine,
    engine_args,
    engine_environment,
    wrong_environment,
)
from async_rl.engines.vllm_segment import sampling_params, to_segment
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import ContractError, StopReason, TokenOutput, WeightVersion

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["VllmConfig", "VllmReplica", "check_engine", "engine_environment"]

STOP_TIMEOUT_S = 10.0  # an engine process that takes longer to stop is killed


class VllmReplica:
    """One vLLM engine; see `async_rl.engines.replica.Replica` for the contract of each call.

    Made by `start`. weights: what `engine` has loaded. names: the tensors every update must bring.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        *,
        config: VllmConfig,
        name: str,
        model: ServedModel,
        capture_routing: bool,
        weights: WeightVersion,
        names: frozenset[str],
    ) -> None:
        self.name = name
        self._engine = engine
        self._config = config
        self._info = model.info
        self._routing = model.info.routing if capture_routing else None
        self._weights = weights
        self._names = names
        self._gate = RequestGate(name)
        self._closed = False
        self._processes = _engine_processes(engine)
        self._loop = asyncio.get_running_loop()
        for process in self._processes:
            self._loop.add_reader(process.sentinel, self._on_death, process)

    @classmethod
    async def start(
        cls,
        config: VllmConfig,
        *,
        name: str,
        checkpoint: Path,
        weights: WeightVersion | None = None,
        capture_routing: bool = True,
    ) -> VllmReplica:
        """Start an engine on a Hugging Face checkpoint folder.

        weights: what the checkpoint is; None for version 0 with the digest of its tensors.

        Raises:
            ValueError: the configuration does not suit the checkpoint.
            EngineError: wrong environment, the engine failed to start, or took longer than `engine.start_timeout_s`.
        """
        model = check_engine(config, checkpoint=checkpoint, capture_routing=capture_routing)
        files = weight_files(checkpoint)
        if problem := wrong_environment(config):
            raise EngineError(f"{name}: {problem}")
        try:
            async with asyncio.timeout(config.start_timeout_s):
                engine = await _start_engine(engine_args(config, model, capture_routing=capture_routing))
                if weights is None:
                    weights = WeightVersion(0, await asyncio.to_thread(digest_checkpoint, checkpoint))
        except TimeoutError as error:
            raise EngineError(
                f"{name}: the engine did not start within engine.start_timeout_s={config.start_timeout_s}"
            ) from error
        except Exception as error:
            raise EngineError(f"{name}: the engine did not start: {error}") from error
        return cls(
            engine,
            config=config,
            name=name,
            model=model,
            capture_routing=capture_routing,
            weights=weights,
            names=tensor_names(files),
        )

    @property
    def weights(self) -> WeightVersion:
        """What the engine has loaded."""
        return self._weights

    # ---- generating

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Decode one segment; see `agent_loop.engine.Engine.generate`."""
        async with self._gate.admit(request.request_id) as flight:
            weights = self._weights  # a load waits until this flight has landed
            try:
                async with asyncio.timeout(self._config.generate_timeout_s):
                    output = await self._decode(request, flight)
                segment = to_segment(
                    output, request=request, info=self._info, routing=self._routing, weights=weights, replica=self.name
                )
            except TimeoutError as error:
                raise EngineError(
                    f"{self.name}: request {request.request_id} took longer than "
                    f"engine.generate_timeout_s={self._config.generate_timeout_s}"
                ) from error
            except ContractError as error:
                raise EngineError(f"{self.name}: request {request.request_id}: {error}") from error
            return self._gate.landed(flight, segment)

    async def _decode(self, request: GenerateRequest, flight: Flight) -> RequestOutput:
        """vLLM's final output. An abort that came before vLLM knew the request is repeated once it does."""
        params = sampling_params(request, info=self._info, capture_routing=self._routing is not None)
        prompt: Any = {"type": "token", "prompt_token_ids": request.token_ids.tolist()}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        try:
            collector = await self._engine.add_request(request.request_id, prompt, params)
            if flight.abort_requested:
                await self._engine.abort(request.request_id)
            output: Any = collector.get_nowait() or await collector.get()
            while not output.finished:
                output = collector.get_nowait() or await collector.get()
            return output
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # a dead engine holds no request
                await self._engine.abort(request.request_id)
            raise
        except Exception as error:
            self._gate.check_alive()
            raise EngineError(f"{self.name}: request {request.request_id} failed: {_describe(error)}") from error

    # ---- control

    async def pause(self) -> None:
        """Hold new `generate` calls."""
        self._gate.pause()

    async def abort(self) -> int:
        """End what is in flight; return how many became partial segments."""
        flights = self._gate.request_abort()
        if flights:
            await self._bounded("abort", self._engine.abort([flight.request_id for flight in flights]))
            await self._bounded("abort", self._gate.wait_landed(flights))
        return sum(flight.stop_reason is StopReason.ABORT for flight in flights)

    async def drain(self) -> None:
        """Wait for what is in flight now."""
        self._gate.check_alive()
        await self._gate.unless_failed(self._gate.wait_landed(self._gate.in_flight()))

    async def load(self, update: WeightUpdate) -> WeightVersion:
        """Load a published version and prove it by its digest."""
        self._gate.require_quiet(f"load of version {update.weights.version}")
        if absent := sorted(self._names - _names_of(update)):
            raise EngineError(
                f"{self.name}: version {update.weights.version} in {update.path} lacks {len(absent)} tensors of the "
                f"checkpoint ({', '.join(absent[:3])}, ...); export every tensor"
            )
        self._gate.suspect(f"version {update.weights.version} was not loaded whole")
        digests = await self._bounded("load", self._engine.collective_rpc("load_update", args=(str(update.path),)))
        if wrong := next((digest for digest in digests if digest != update.weights.digest), None):
            self._gate.suspect(f"its weights have digest {wrong} instead of {update.weights.digest}")
            raise EngineError(
                f"{self.name}: version {update.weights.version} was published with digest {update.weights.digest}, "
                f"but the engine loaded {wrong} from {update.path}"
            )
        if not await self._bounded("load", self._engine.reset_prefix_cache()):
            raise EngineError(f"{self.name}: the K/V of version {self._weights.version} is still in use after a drain")
        self._gate.suspect(None)
        self._weights = update.weights
        return self._weights

    async def resume(self) -> None:
        """Let held `generate` calls pass."""
        self._gate.resume()

    async def stats(self) -> ReplicaStats:
        """Counters since the start."""
        return self._gate.stats()

    async def close(self) -> None:
        """Stop the engine process, by force when it does not stop by itself."""
        if self._closed:
            return
        self._closed = True
        self._gate.fail("the replica is closed")
        self._unwatch()
        await _stop_engine(self._engine)
        for process in self._processes:
            if process.is_alive():
                process.kill()

    # ---- inside

    async def _bounded(self, action: str, work: Any) -> Any:
        """Result of a control call, within `engine.load_timeout_s` and unless the engine dies."""
        try:
            async with asyncio.timeout(self._config.load_timeout_s):
                return await self._gate.unless_failed(work)
        except TimeoutError as error:
            raise EngineError(
                f"{self.name}: {action} took longer than engine.load_timeout_s={self._config.load_timeout_s}"
            ) from error
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{self.name}: {action} failed: {_describe(error)}") from error

    def _on_death(self, process: Any) -> None:
        self._unwatch()
        process.join(0.1)  # its pipe closes a moment before it has an exit code
        # vLLM's own monitor may have waited for the process first; the code is gone then.
        code = "unknown" if process.exitcode is None else process.exitcode
        self._gate.fail(f"engine process {process.pid} died, exit code {code}")

    def _unwatch(self) -> None:
        for process in self._processes:
            self._loop.remove_reader(process.sentinel)


async def _start_engine(args: dict[str, Any]) -> AsyncLLM:
    """Start the engine process without holding up the event loop."""

    def start() -> AsyncLLM:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))

    engine = await asyncio.to_thread(start)
    await engine.get_supported_tasks()  # cached by vLLM; the first request need not ask
    return engine


async def _stop_engine(engine: Any) -> None:
    """Shut down without holding up the event loop; requests in flight end with an error."""
    handler = engine.output_handler
    if handler is not None and not handler.done():
        handler.cancel()  # or vLLM logs the end of the engine as a failure
        engine.output_processor.propagate_error(EngineError("the replica is closed"))
    await asyncio.to_thread(engine.shutdown, timeout=STOP_TIMEOUT_S)
    engine.shutdown = lambda timeout=None: None  # vLLM calls it again at interpreter exit, when it can only fail


def _engine_processes(engine: Any) -> list[Any]:
    """The processes that vLLM's client started."""
    manager = engine.engine_core.resources.engine_manager
    return list(manager.processes) if manager is not None else []


def _names_of(update: WeightUpdate) -> frozenset[str]:
    try:
        return tensor_names([update.path])
    except (OSError, SafetensorError) as error:
        raise EngineError(f"cannot read version {update.weights.version} from {update.path}: {error}") from error


def _describe(error: BaseException) -> str:
    """Type and text of an error, with its cause; vLLM's own wrappers have no text."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} ({_describe(error.__cause__)})" if error.__cause__ is not None else text
