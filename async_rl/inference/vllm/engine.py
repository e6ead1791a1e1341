"""A vLLM replica: decodes with logprobs and routed experts, aborts to partial segments, and loads weights live.

The engine core runs in a separate process; the replica object belongs to one event loop and calls it. The same class
serves CPU and GPU. The differences are in `vllm_config.py` (arguments, environment) and `vllm_cpu.py` (fixes for vLLM's
CPU backend).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from agent_loop.engine import EngineError, GenerateRequest, ReplicaLostError
from async_rl.inference.checkpoint_weights import hash_checkpoint, tensor_names, weight_files
from async_rl.inference.checks import weight_label
from async_rl.inference.replica import KVPolicy, ReplicaStats, RequestGate, not_loaded
from async_rl.inference.vllm.config import (
    ServedModel,
    VllmConfig,
    check_engine,
    engine_args,
    engine_environment,
    wrong_environment,
)
from async_rl.inference.vllm.decode import Decoder, LoadedWeights
from async_rl.inference.vllm.process import describe, engine_processes, is_engine_death, start_engine, stop_engine
from async_rl.inference.vllm.segment import recorded_rows
from async_rl.weights.live import LiveWeights
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import StopReason, TokenOutput, WeightVersion

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["VllmConfig", "VllmReplica", "check_engine", "engine_environment"]


class VllmReplica:
    """One vLLM engine; see `async_rl.inference.replica.Replica` for the contract of each call.

    `start` creates it.

    Args:
        engine: running vLLM engine.
        name: name of the replica.
        model: the served checkpoint.
        weights: version that `engine` has loaded.
        live: checksums of the parameters of its model.
        names: names of the tensors that every update must contain.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        *,
        config: VllmConfig,
        name: str,
        model: ServedModel,
        weights: WeightVersion,
        live: LiveWeights,
        names: frozenset[str],
    ) -> None:
        self.name = name
        self._engine = engine
        self._config = config
        self._model = model
        self._weights = LoadedWeights(weights)
        self._live = live
        self._names = names
        self._gate = RequestGate(name)
        self._decoder = Decoder(engine, gate=self._gate, name=name, model=model, weights=self._weights)
        self._halted = False  # whether the engine is paused by `freeze`
        self._closed = False
        self._processes = engine_processes(engine)
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
        capture_support: bool = False,
    ) -> VllmReplica:
        """Start an engine on a Hugging Face checkpoint folder.

        Args:
            name: name of the replica.
            checkpoint: Hugging Face checkpoint folder.
            weights: version of the checkpoint; None for version 0 with the digest of its tensors.
            capture_routing: whether the replica returns routing rows.
            capture_support: whether requests may sample from a part of the vocabulary; on the CPU they always may.

        Raises:
            ValueError: the configuration does not suit the checkpoint.
            EngineError: the environment is wrong, or the engine did not start within `engine.start_timeout_s`.
        """
        model = check_engine(config, checkpoint=checkpoint, capture_routing=capture_routing)
        files = weight_files(checkpoint)
        if problem := wrong_environment(config):
            raise EngineError(f"{name}: {problem}")
        args = engine_args(config, model, capture_routing=capture_routing, capture_support=capture_support)
        try:
            async with asyncio.timeout(config.start_timeout_s):
                engine = await start_engine(args)
                digest = await asyncio.to_thread(hash_checkpoint, checkpoint)
                if weights is None:
                    weights = WeightVersion(0, digest.hexdigest())
                live = LiveWeights(
                    dtype=config.dtype,
                    published=digest.modules(),
                    ranks=await engine.collective_rpc("live_checksums"),
                )
                await engine.update_weight_version(weight_label(weights))
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
            weights=weights,
            live=live,
            names=tensor_names(files),
        )

    @property
    def weights(self) -> WeightVersion:
        """The loaded weight version."""
        return self._weights.current

    # ---- generating

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        """Decode; see `agent_loop.engine.Engine.generate`."""
        async with self._gate.admit(request.request_id) as flight:
            try:
                async with asyncio.timeout(self._config.generate_timeout_s):
                    segments = await self._decoder.decode(request, flight)
            except TimeoutError as error:
                raise EngineError(
                    f"{self.name}: request {request.request_id} took longer than "
                    f"engine.generate_timeout_s={self._config.generate_timeout_s}"
                ) from error
            return self._gate.landed(flight, segments)

    # ---- control

    async def pause(self) -> None:
        """Hold new `generate` calls."""
        self._gate.pause()

    async def abort(self) -> int:
        """End all requests in flight; return the number of partial segments."""
        flights = self._gate.request_abort()
        if flights:
            await self._bounded("abort", self._engine.abort([flight.request_id for flight in flights]))
            await self._bounded("abort", self._gate.wait_landed(flights))
        return sum(flight.stop_reason is StopReason.ABORT for flight in flights)

    async def drain(self) -> None:
        """Wait until all requests that are in flight now have ended."""
        self._gate.require_moving("drain")
        await self._gate.unless_failed(self._gate.wait_landed(self._gate.in_flight()))

    async def freeze(self) -> int:
        """Freeze all requests in flight inside the engine; return their number."""
        self._gate.require_paused("freeze")
        if self._gate.in_flight():
            self._halted = True
            await self._bounded("freeze", self._engine.pause_generation(mode="keep", clear_cache=False))
        return self._gate.freeze()

    async def load(self, update: WeightUpdate, *, kv: KVPolicy = "recompute") -> WeightVersion:
        """Load a published version, and check its digest and the model's parameters.

        With kv="recompute", frozen requests leave the engine. After `resume` they are sent again with all tokens so
        far and with the recorded experts forced. With kv="keep", they stay in the engine. If the engine runs out of
        K/V memory and preempts a kept request, it computes the K/V again with the weights of that time. The routing is
        then the recorded one if routers can be forced (see `check_engine`), else the live one.
        """
        number = update.weights.version
        self._gate.require_quiet(f"load of version {number}")
        if absent := sorted(self._names - _names_of(update)):
            raise EngineError(
                f"{self.name}: version {number} in {update.path} lacks {len(absent)} tensors of the "
                f"checkpoint ({', '.join(absent[:3])}, ...); export every tensor"
            )
        if kv == "recompute":
            await self._recall()
        self._gate.suspect(f"version {number} was not loaded whole")
        loaded = await self._bounded("load", self._engine.collective_rpc("load_update", args=(str(update.path),)))
        if wrong := next((digest for digest, _ in loaded if digest != update.weights.digest), None):
            self._gate.suspect(f"its weights have digest {wrong} instead of {update.weights.digest}")
            raise EngineError(
                f"{self.name}: version {number} was published with digest {update.weights.digest}, "
                f"but the engine loaded {wrong} from {update.path}"
            )
        if unchanged := self._live.replace(update.modules, [checksums for _, checksums in loaded]):
            raise not_loaded(unchanged, replica=self.name, version=number)
        if kv == "recompute" and not await self._bounded("load", self._engine.reset_prefix_cache()):
            raise EngineError(f"{self.name}: the K/V of version {self.weights.version} is still in use after a drain")
        await self._bounded("load", self._engine.update_weight_version(weight_label(update.weights)))
        if kv == "keep":
            await self._pin_routing()
        self._gate.suspect(None)
        self._weights.replace(update.weights, in_flight=bool(self._gate.in_flight()))
        return update.weights

    async def checksum(self) -> str:
        """Checksum of the model's parameters, taken at the last load."""
        return self._live.checksum

    async def _pin_routing(self) -> None:
        """Make the engine use the recorded experts of frozen requests if it preempts and recomputes them."""
        if self._model.routing is None or self._model.unforcible is not None:
            return
        if rows := recorded_rows(self._engine, self._model.routing):
            await self._bounded("load", self._engine.collective_rpc("pin_routing", args=(rows,)))

    async def _recall(self) -> None:
        """Take frozen requests out of the engine; `resume` sends them again."""
        if self._gate.in_flight() and self._model.routing is not None and self._model.unforcible is not None:
            raise EngineError(
                f"{self.name}: K/V in flight cannot be computed again under the experts that were recorded, because "
                f"{self._model.unforcible}; use rollout.kv=keep, or abort first"
            )
        flights = self._gate.recall()
        if flights:
            await self._bounded("load", self._engine.abort([flight.request_id for flight in flights]))
            await self._bounded("load", self._gate.wait_outside(flights))

    async def resume(self) -> None:
        """Open the gate: held `generate` calls and frozen requests continue."""
        self._gate.require_resumable()
        if self._halted:
            await self._bounded("resume", self._engine.resume_generation())
            self._halted = False
        self._gate.resume()

    async def stats(self) -> ReplicaStats:
        """Counters since the start."""
        return self._gate.stats()

    async def close(self) -> None:
        """Stop the engine process; kill it if it does not stop in time."""
        if self._closed:
            return
        self._closed = True
        self._gate.fail("the replica is closed")
        self._unwatch()
        await stop_engine(self._engine)
        for process in self._processes:
            if process.is_alive():
                process.kill()

    # ---- inside

    async def _bounded(self, action: str, work: Any) -> Any:
        """The result of a control call, bounded by `engine.load_timeout_s` and by the engine's death."""
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
            kind = ReplicaLostError if is_engine_death(error) else EngineError
            raise kind(f"{self.name}: {action} failed: {describe(error)}") from error

    def _on_death(self, process: Any) -> None:
        self._unwatch()
        process.join(0.1)  # its pipe closes a moment before it has an exit code
        # If vLLM's own monitor has waited for the process first, the exit code is unknown.
        code = "unknown" if process.exitcode is None else process.exitcode
        self._gate.fail(f"engine process {process.pid} died, exit code {code}")

    def _unwatch(self) -> None:
        for process in self._processes:
            self._loop.remove_reader(process.sentinel)


def _names_of(update: WeightUpdate) -> frozenset[str]:
    try:
        return tensor_names([update.path])
    except (OSError, SafetensorError) as error:
        raise EngineError(f"cannot read version {update.weights.version} from {update.path}: {error}") from error
