"""A vLLM replica: decodes with logprobs and routed experts, aborts to partial segments, and loads weights live.

The engine core runs in a process of its own; this object lives on one event loop and talks to it. The same class
serves CPU and GPU; what differs is in `vllm_config.py` (arguments, environment) and `vllm_cpu.py` (repairs of vLLM's
CPU backend).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from agent_loop.engine import EngineError, GenerateRequest, ReplicaLostError
from async_rl.engines.checkpoint_weights import hash_checkpoint, tensor_names, weight_files
from async_rl.engines.checks import weight_label
from async_rl.engines.replica import KeptKV, ReplicaStats, RequestGate, not_loaded
from async_rl.engines.vllm_config import (
    ServedModel,
    VllmConfig,
    check_engine,
    engine_args,
    engine_environment,
    wrong_environment,
)
from async_rl.engines.vllm_decode import Decoder, LoadedWeights
from async_rl.engines.vllm_process import describe, engine_processes, is_engine_death, start_engine, stop_engine
from async_rl.engines.vllm_segment import recorded_rows
from async_rl.weights.live import LiveWeights
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import StopReason, TokenOutput, WeightVersion

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["VllmConfig", "VllmReplica", "check_engine", "engine_environment"]


class VllmReplica:
    """One vLLM engine; see `async_rl.engines.replica.Replica` for the contract of each call.

    Made by `start`. weights: what `engine` has loaded. live: what its model holds. names: the tensors every update must
    bring.
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
        self._halted = False  # whether the engine was told to hold still
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

        weights: what the checkpoint is; None for version 0 with the digest of its tensors.
        capture_support: whether requests may sample from a part of the vocabulary; on the CPU they always may.

        Raises:
            ValueError: the configuration does not suit the checkpoint.
            EngineError: wrong environment, the engine failed to start, or took longer than `engine.start_timeout_s`.
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
        """What the engine has loaded."""
        return self._weights.current

    # ---- generating

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        """Decode; see `agent_loop.engine.Engine.generate`. A request that no engine can serve is an EngineError."""
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
        """End what is in flight; return how many became partial segments."""
        flights = self._gate.request_abort()
        if flights:
            await self._bounded("abort", self._engine.abort([flight.request_id for flight in flights]))
            await self._bounded("abort", self._gate.wait_landed(flights))
        return sum(flight.stop_reason is StopReason.ABORT for flight in flights)

    async def drain(self) -> None:
        """Wait for what is in flight now."""
        self._gate.require_moving("drain")
        await self._gate.unless_failed(self._gate.wait_landed(self._gate.in_flight()))

    async def freeze(self) -> int:
        """Hold what is in flight inside the engine."""
        self._gate.require_paused("freeze")
        if self._gate.in_flight():
            self._halted = True
            await self._bounded("freeze", self._engine.pause_generation(mode="keep", clear_cache=False))
        return self._gate.freeze()

    async def load(self, update: WeightUpdate, *, kv: KeptKV = "recompute") -> WeightVersion:
        """Load a published version, and prove it by its digest and by what the model holds after it.

        To recompute, frozen requests leave the engine and are sent again by `resume`, as long as they are by then and
        with the recorded experts forced. To keep, they stay where they are. Should the engine run out of K/V memory
        and preempt one of those, it computes its K/V again by the weights of that time; the routing is the recorded
        one where routers can be forced (see `check_engine`), else the live one.
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
        """Of what the model holds since the last load."""
        return self._live.checksum

    async def _pin_routing(self) -> None:
        """Have what is frozen routed as recorded, should its K/V be lost and computed again."""
        if self._model.routing is None or self._model.unforcible is not None:
            return
        if rows := recorded_rows(self._engine, self._model.routing):
            await self._bounded("load", self._engine.collective_rpc("pin_routing", args=(rows,)))

    async def _recall(self) -> None:
        """Take what is frozen out of the engine, to be sent again."""
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
        """Let held `generate` calls pass and what is frozen go on."""
        self._gate.require_resumable()
        if self._halted:
            await self._bounded("resume", self._engine.resume_generation())
            self._halted = False
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
        await stop_engine(self._engine)
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
            kind = ReplicaLostError if is_engine_death(error) else EngineError
            raise kind(f"{self.name}: {action} failed: {describe(error)}") from error

    def _on_death(self, process: Any) -> None:
        self._unwatch()
        process.join(0.1)  # its pipe closes a moment before it has an exit code
        # vLLM's own monitor may have waited for the process first; the code is gone then.
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
