"""An SGLang replica: decodes with logprobs and routed experts, aborts to partial segments, and loads weights live.

SGLang runs as an HTTP server in its own process group and virtualenv (`sglang_server.py`), with a plugin in its
processes (`plugin/`). The replica object belongs to one event loop and calls the server. The same class serves CPU
and GPU.

    resume     gate shut, /abort_request              -> /flush_cache, /update_weights_from_disk -> gate open
    keep       gate shut, /pause_generation in_place  -> /update_weights_from_disk               -> /continue_generation
    recompute  gate shut, in_place, then retract      -> /flush_cache, /update_weights_from_disk -> /continue_generation

The gate holds new requests instead of SGLang's own pause, because SGLang's pause(abort) polls only once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp

from agent_loop.engine import AnswerError, EngineError, GenerateRequest
from async_rl.inference.checkpoint_weights import hash_checkpoint, weight_files
from async_rl.inference.checks import weight_label
from async_rl.inference.replica import Flight, KVPolicy, ReplicaStats, RequestGate, not_loaded
from async_rl.inference.sglang.config import (
    FORCED_FAMILIES,
    ServedModel,
    SglangConfig,
    check_engine,
)
from async_rl.inference.sglang.ids import PrefixFreeIds
from async_rl.inference.sglang.segment import check_generate, generate_body, to_segments
from async_rl.inference.sglang.server import CallError, SglangServer
from async_rl.inference.sglang.update import (
    Load,
    Shapes,
    check_update,
    first_load,
    reported_load,
    shapes_of,
    update_folder,
)
from async_rl.weights.live import LiveWeights
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import ContractError, StopReason, TokenOutput, WeightVersion

__all__ = ["SglangConfig", "SglangReplica", "check_engine"]

FIRST_LABEL = "first"  # version label of the weights that the server started with
ABORT_AGAIN_S = 0.05  # an abort misses requests that have not reached the server
SUPPORT_REFUSED = "sampling support"  # in the server's error if too many tokens are kept
DEATH_NOTICE_S = 2.0  # from a broken connection to the death of the server


class SglangReplica:
    """One SGLang server; see `async_rl.inference.replica.Replica` for the contract of each call.

    `start` creates it.

    Args:
        server: running server.
        name: name of the replica.
        model: the served checkpoint.
        capture_routing: whether the replica returns routing rows.
        weights: version that the server has loaded.
        live: checksums of the parameters of its model.
        shapes: names and shapes of the tensors that every update must contain.
    """

    def __init__(
        self,
        server: SglangServer,
        *,
        config: SglangConfig,
        name: str,
        model: ServedModel,
        capture_routing: bool,
        weights: WeightVersion,
        live: LiveWeights,
        shapes: Shapes,
    ) -> None:
        self.name = name
        self._server = server
        self._config = config
        self._model = model
        self._routing = model.info.routing if capture_routing else None
        self._weights = weights
        self._live = live
        self._loaded = {FIRST_LABEL: weights}
        self._shapes = shapes
        self._gate = RequestGate(name)
        self._frozen = False  # whether SGLang's scheduler is paused
        self._closed = False
        self._ids = PrefixFreeIds(name)
        self._farewells: set[asyncio.Task[None]] = set()
        server.watch(self._gate.fail)

    @classmethod
    async def start(
        cls,
        config: SglangConfig,
        *,
        name: str,
        checkpoint: Path,
        weights: WeightVersion | None = None,
        capture_routing: bool = True,
    ) -> SglangReplica:
        """Start a server on a Hugging Face checkpoint folder.

        Args:
            name: name of the replica.
            checkpoint: Hugging Face checkpoint folder.
            weights: version of the checkpoint; None for version 0 with the digest of the tensors that were loaded.
            capture_routing: whether the replica returns routing rows.

        Raises:
            ValueError: the configuration does not suit the checkpoint.
            EngineError: SGLang is not installed or has the wrong version, or the server did not start within
                `engine.start_timeout_s`.
        """
        model = check_engine(config, checkpoint=checkpoint, capture_routing=capture_routing)
        shapes = shapes_of(weight_files(checkpoint))
        published = (await asyncio.to_thread(hash_checkpoint, checkpoint)).modules()
        try:
            async with asyncio.timeout(config.start_timeout_s):
                server = await SglangServer.start(
                    config, model, name=name, label=FIRST_LABEL, capture_routing=capture_routing
                )
        except TimeoutError as error:
            raise EngineError(
                f"{name}: the server did not start within engine.start_timeout_s={config.start_timeout_s}"
            ) from error
        except EngineError as error:
            raise EngineError(f"{name}: {error}") from error
        try:
            first = first_load(server.report)
        except ContractError as error:
            await server.stop()
            raise EngineError(f"{name}: {error}") from error
        return cls(
            server,
            config=config,
            name=name,
            model=model,
            capture_routing=capture_routing,
            weights=WeightVersion(0, first.digest) if weights is None else weights,
            live=LiveWeights(dtype=config.dtype, published=published, ranks=first.checksums),
            shapes=shapes,
        )

    @property
    def weights(self) -> WeightVersion:
        """The loaded weight version."""
        return self._weights

    # ---- generating

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        """Decode; see `agent_loop.engine.Engine.generate`."""
        what = f"{self.name}: request {request.request_id}"
        self._check(request, what)
        async with self._gate.admit(request.request_id) as flight:
            with self._ids.held(request.request_id):
                try:
                    async with asyncio.timeout(self._config.generate_timeout_s):
                        answer = await self._decode(request, flight)
                except TimeoutError as error:
                    raise EngineError(
                        f"{what} took longer than engine.generate_timeout_s={self._config.generate_timeout_s}"
                    ) from error
            try:
                segments = to_segments(
                    answer,
                    request=request,
                    info=self._model.info,
                    routing=self._routing,
                    weights=self._weights,
                    loaded=self._loaded,
                    replica=self.name,
                )
            except ContractError as error:
                raise AnswerError(f"{what}: {error}") from error
            return self._gate.landed(flight, segments)

    def _check(self, request: GenerateRequest, what: str) -> None:
        try:
            check_generate(
                request,
                info=self._model.info,
                routing=self._routing,
                max_model_len=self._model.max_model_len,
            )
        except ContractError as error:
            raise EngineError(f"{what}: {error}") from error
        family = self._model.info.family
        if request.forced_experts is not None and family not in FORCED_FAMILIES:
            raise EngineError(
                f"{what}: forced_experts is set, but forcing on SGLang is proven for {', '.join(FORCED_FAMILIES)} "
                f"only, not for {family}; use rollout.resume_routing=append"
            )

    async def _decode(self, request: GenerateRequest, flight: Flight) -> Any:
        """SGLang's answer to /generate."""
        body = generate_body(request, info=self._model.info, routing=self._routing)
        try:
            return await self._gate.unless_failed(self._server.post("/generate", body))
        except asyncio.CancelledError:
            self._abandon(flight.request_id)
            raise
        except CallError as error:
            kind = AnswerError if SUPPORT_REFUSED in str(error).lower() else EngineError
            raise kind(f"{self.name}: request {flight.request_id} was refused: {error}") from error
        except aiohttp.ClientError as error:
            await self._notice_death()
            raise EngineError(f"{self.name}: request {flight.request_id} lost its connection: {error!r}") from error

    def _abandon(self, request_id: str) -> None:
        """Abort a request in the server; the cancelled caller does not wait for it."""

        async def abort() -> None:
            with contextlib.suppress(aiohttp.ClientError, CallError, TimeoutError):
                async with asyncio.timeout(self._config.load_timeout_s):
                    await self._server.post("/abort_request", {"rid": request_id})

        if self._closed:
            return
        task = asyncio.create_task(abort())
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _notice_death(self) -> None:
        """Raise ReplicaLostError if the server dies within DEATH_NOTICE_S; its connections break before it ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_NOTICE_S):
                await self._server.until_dead()
        self._gate.check_alive()

    # ---- control

    async def pause(self) -> None:
        """Hold new `generate` calls."""
        self._gate.pause()

    async def abort(self) -> int:
        """End all requests in flight; return the number of partial segments."""
        flights = self._gate.request_abort()
        if flights:
            await self._bounded("abort", self._abort(flights))
        return sum(flight.stop_reason is StopReason.ABORT for flight in flights)

    async def _abort(self, flights: list[Flight]) -> None:
        if self._frozen:  # retracted requests end at once; frozen ones would first decode once more
            await self._pause_engine("retract")
        while left := [flight for flight in flights if not flight.landed.is_set()]:
            await self._server.post("/abort_request", {"abort_all": True})
            if self._frozen:
                await self._continue_engine()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self._gate.wait_landed(left)

    async def drain(self) -> None:
        """Wait until all requests that are in flight now have ended."""
        self._gate.require_moving("drain")
        await self._gate.unless_failed(self._gate.wait_landed(self._gate.in_flight()))

    async def freeze(self) -> int:
        """Freeze all requests in flight inside the server; return their number."""
        count = self._gate.freeze()
        if not self._frozen:
            self._frozen = True
            await self._bounded("freeze", self._pause_engine("in_place"))
        return count

    async def load(self, update: WeightUpdate, *, kv: KVPolicy = "recompute") -> WeightVersion:
        """Load a published version, and check its digest and the model's parameters."""
        what = f"version {update.weights.version}"
        self._gate.require_quiet(f"load of {what}")
        try:
            check_update(update, self._shapes)
        except ContractError as error:
            raise EngineError(f"{self.name}: {error}") from error
        self._gate.suspect(f"{what} was not loaded whole")
        try:
            loaded: Load = await self._bounded("load", self._load(update, kv))
            if loaded.digest != update.weights.digest:
                self._gate.suspect(f"its weights have digest {loaded.digest} instead of {update.weights.digest}")
                raise EngineError(
                    f"{self.name}: {what} was published with digest {update.weights.digest}, "
                    f"but the engine loaded {loaded.digest} from {update.path}"
                )
            if unchanged := self._live.replace(update.modules, loaded.checksums):
                raise not_loaded(unchanged, replica=self.name, version=update.weights.version)
        except EngineError:
            await self._disown()
            raise
        self._gate.suspect(None)
        self._weights = self._loaded[weight_label(update.weights)] = update.weights
        return self._weights

    async def checksum(self) -> str:
        """Checksum of the model's parameters, taken at the last load."""
        return self._live.checksum

    async def _load(self, update: WeightUpdate, kv: KVPolicy) -> Load:
        if self._frozen and kv == "recompute":
            await self._pause_engine("retract")
        if kv == "recompute":  # before the load: a failed flush must leave the weights
            patience = 0 if self._frozen else self._config.load_timeout_s  # SGLang answers before it is idle
            await self._server.post(f"/flush_cache?timeout={patience}", {})
        with update_folder(update, self._server.folder) as folder:
            body = {
                "model_path": str(folder),
                "weight_version": weight_label(update.weights),
                "flush_cache": False,
            }
            answer = await self._server.post("/update_weights_from_disk", body)
        return reported_load(answer)

    async def _disown(self) -> None:
        """After a failed load, change the server's version label, so that tokens of unknown weights are refused."""
        with contextlib.suppress(EngineError):
            label = {"new_version": "unknown", "abort_all_requests": False}
            await self._bounded("load", self._server.post("/update_weight_version", label))

    async def resume(self) -> None:
        """Open the gate: held `generate` calls and frozen requests continue."""
        self._gate.resume()
        if self._frozen:
            await self._bounded("resume", self._continue_engine())

    async def stats(self) -> ReplicaStats:
        """Counters since the start."""
        return self._gate.stats()

    async def close(self) -> None:
        """Stop the server and all its processes."""
        if self._closed:
            return
        self._closed = True
        self._gate.fail("the replica is closed")
        for task in self._farewells:
            task.cancel()
        await self._server.stop()

    # ---- inside

    async def _pause_engine(self, mode: str) -> None:
        await self._server.post("/pause_generation", {"mode": mode})

    async def _continue_engine(self) -> None:
        await self._server.post("/continue_generation", {})
        self._frozen = False

    async def _bounded(self, action: str, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a control call, bounded by `engine.load_timeout_s` and by the server's death."""
        try:
            async with asyncio.timeout(self._config.load_timeout_s):
                return await self._gate.unless_failed(work)
        except TimeoutError as error:
            raise EngineError(
                f"{self.name}: {action} took longer than engine.load_timeout_s={self._config.load_timeout_s}"
            ) from error
        except aiohttp.ClientError as error:
            await self._notice_death()
            raise EngineError(f"{self.name}: {action} lost its connection: {error!r}") from error
        except (CallError, ContractError, OSError) as error:
            raise EngineError(f"{self.name}: {action} failed: {error}") from error
