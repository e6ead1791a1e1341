"""An SGLang replica: decodes with logprobs and routed experts, aborts to partial segments, and loads weights live.

SGLang runs as an HTTP server in its own process group and virtualenv (`server.py`), with a plugin in its
processes (`plugin/`). The backend belongs to one event loop and calls the server. The same class serves CPU
and GPU.

    resume     gate shut, /abort_request              -> /flush_cache, /update_weights_from_disk -> gate open
    keep       gate shut, /pause_generation in_place  -> /update_weights_from_disk               -> /continue_generation
    recompute  gate shut, in_place, then retract      -> /flush_cache, /update_weights_from_disk -> /continue_generation

The gate holds new requests instead of SGLang's own pause, because SGLang's pause(abort) polls only once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp

from agent_loop.engine import GenerateRequest
from async_rl.inference.backend import EngineBackend, LoadedWeights
from async_rl.inference.checkpoint_weights import Shapes, served_shapes
from async_rl.inference.checks import weight_label
from async_rl.inference.gate import InflightRequest, KVPolicy, until_finished
from async_rl.inference.loads import RankLoad
from async_rl.inference.nodes import NodePlace
from async_rl.inference.replica import UNKNOWN_LABEL, EngineReplica
from async_rl.inference.scores import ScoreRequest, check_score
from async_rl.inference.sglang.config import FORCED_FAMILIES, SglangConfig, check_engine
from async_rl.inference.sglang.segment import check_generate, generate_body, score_body, to_scores, to_segments
from async_rl.inference.sglang.server import CallError, SglangServer
from async_rl.inference.sglang.update import first_load, reported_load, staged_load
from async_rl.weights.model_info import ModelInfo
from async_rl.weights.transport import WeightUpdate
from message_queue.errors import AnswerError, ContractError, EngineError
from message_queue.tokens import TokenOutput, WeightVersion
from message_queue.training_sequence import TeacherScores

__all__ = ["SglangBackend", "SglangConfig", "SglangReplica", "check_engine", "start_sglang"]

ABORT_AGAIN_S = 0.05  # an abort misses requests that have not reached the server
SUPPORT_REFUSED = "sampling support"  # in the server's error if too many tokens are kept
DEATH_NOTICE_S = 2.0  # from a broken connection to the death of the server


class SglangBackend(EngineBackend):
    """Calls to one SGLang server; see `EngineBackend` for the other arguments.

    Args:
        server: running server.
        info: facts of the served checkpoint.
        capture_routing: whether the server returns routing rows.
    """

    def __init__(
        self,
        server: SglangServer,
        *,
        config: SglangConfig,
        name: str,
        info: ModelInfo,
        capture_routing: bool,
        shapes: Shapes,
    ) -> None:
        super().__init__(name=name, shapes=shapes, timeout_s=config.load_timeout_s)
        self.server = server
        self._config = config
        self._info = info
        self._routing = info.routing if capture_routing else None
        self._closed = False
        self._abandoned: set[asyncio.Task[None]] = set()

    # ---- generating

    def check_request(self, request: GenerateRequest) -> None:
        check_generate(request, info=self._info, routing=self._routing, max_model_len=self._config.max_model_len)
        if request.forced_experts is not None and self._info.family not in FORCED_FAMILIES:
            raise ContractError(
                f"forced_experts is set, but forcing on SGLang is proven for {', '.join(FORCED_FAMILIES)} "
                f"only, not for {self._info.family}; use rollout.resume_routing=append"
            )

    async def decode(
        self, request: GenerateRequest, inflight: InflightRequest, *, loaded: LoadedWeights
    ) -> list[TokenOutput]:
        """Decode a request; it stays inside SGLang from start to end."""
        body = generate_body(request, info=self._info, routing=self._routing)
        return to_segments(
            await self._generated(inflight.request_id, body),
            request=request,
            info=self._info,
            routing=self._routing,
            weights=loaded.current,
            loaded=loaded.by_label,
            replica=self._name,
        )

    async def _generated(self, request_id: str, body: dict[str, Any]) -> Any:
        """Answer of /generate. SGLang aborts all requests whose id starts with a given text, so ids have one length."""
        what, rid = f"{self._name}: request {request_id}", uuid.uuid4().hex
        try:
            return await self.server.post("/generate", {"rid": rid, **body})
        except asyncio.CancelledError:
            self._abandon(rid)
            raise
        except CallError as error:
            kind = AnswerError if SUPPORT_REFUSED in str(error).lower() else EngineError
            raise kind(f"{what} was refused: {error}") from error
        except aiohttp.ClientError as error:
            raise await self.engine_error(error, what) from error

    async def score(self, request: ScoreRequest) -> TeacherScores:
        """See `EngineBackend.score`."""
        check_score(request, info=self._info, max_model_len=self._config.max_model_len)
        answer = await self._generated(request.request_id, score_body(request))
        return to_scores(answer, request=request, info=self._info)

    def _abandon(self, rid: str) -> None:
        """Abort a request in the server; the cancelled caller does not wait for it."""

        async def abort() -> None:
            with contextlib.suppress(aiohttp.ClientError, CallError, TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await self.server.post("/abort_request", {"rid": rid})

        if self._closed:
            return
        task = asyncio.create_task(abort())
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    # ---- control

    async def abort(self, requests: Sequence[InflightRequest]) -> None:
        """End all requests in the server, and repeat this until each of `requests` has finished."""
        if self._frozen:  # retracted requests end at once; frozen ones would first decode once more
            await self.pause_engine("retract")
        while left := [request for request in requests if not request.finished.is_set()]:
            await self.server.post("/abort_request", {"abort_all": True})
            await self.resume()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await until_finished(left)

    async def freeze(self) -> None:
        if not self._frozen:
            self._frozen = True
            await self.pause_engine("in_place")

    async def resume(self) -> None:
        if self._frozen:
            await self.server.post("/continue_generation", {})
            self._frozen = False

    async def pause_engine(self, mode: str) -> None:
        """Pause SGLang's scheduler. mode: "in_place" keeps the K/V of running requests, "retract" frees it."""
        await self.server.post("/pause_generation", {"mode": mode})

    async def load(
        self, update: WeightUpdate, *, kv: KVPolicy, requests: Sequence[InflightRequest]
    ) -> Sequence[RankLoad]:
        if kv == "recompute":  # before the load: a failed flush must leave the weights
            if self._frozen:
                await self.pause_engine("retract")
            patience = 0 if self._frozen else self._timeout_s  # SGLang answers before it is idle
            await self.server.post(f"/flush_cache?timeout={patience}", {})
        return await super().load(update, kv=kv, requests=requests)

    async def load_version(self, version: str) -> list[RankLoad]:
        body = {"model_path": version, "flush_cache": False}
        return reported_load(await self.server.post("/update_weights_from_disk", body))

    async def start_staging(self, version: str) -> None:
        await self._plugin(f"stage {version}")

    async def staged(self) -> list[RankLoad] | None:
        return staged_load(await self._plugin("staged"))

    async def commit_staged(self) -> None:
        await self._plugin("commit")

    async def _plugin(self, action: str) -> Any:
        """Answer of the plugin to an action; see `plugin/async_rl_sglang/loading.py`."""
        return await self.server.post("/weights_checker", {"action": action})

    async def label(self, label: str) -> None:
        await self.server.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    # ---- process

    def watch(self, on_death: Callable[[str], None]) -> None:
        self.server.watch(on_death)

    async def close(self) -> None:
        self._closed = True
        for task in self._abandoned:
            task.cancel()
        await self.server.stop()

    async def engine_error(self, error: Exception, what: str) -> EngineError:
        """See `EngineBackend`; returns when a server with a broken connection has died, or after DEATH_NOTICE_S."""
        if not isinstance(error, aiohttp.ClientError):
            return EngineError(f"{what} failed: {error}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_NOTICE_S):
                await self.server.until_dead()
        return EngineError(f"{what} lost its connection: {error!r}")


SglangReplica: TypeAlias = EngineReplica[SglangBackend]


async def start_sglang(
    config: SglangConfig,
    *,
    name: str,
    checkpoint: Path,
    capture_routing: bool = True,
    place: NodePlace | None = None,
) -> SglangReplica:
    """Start a server on a Hugging Face checkpoint folder; it serves version 0 with the digest of the loaded tensors.

    For the arguments see `async_rl.inference.select.start_replica`.

    Raises:
        ValueError: the configuration does not suit the checkpoint.
        EngineError: SGLang is not installed or has the wrong version, or the server did not start within
            `engine.start_timeout_s`.
    """
    info = check_engine(config, checkpoint=checkpoint, capture_routing=capture_routing)
    shapes = served_shapes(checkpoint, info)
    try:
        async with asyncio.timeout(config.start_timeout_s), contextlib.AsyncExitStack() as stack:
            server = await SglangServer.start(
                config, checkpoint, name=name, label=UNKNOWN_LABEL, capture_routing=capture_routing, place=place
            )
            stack.push_async_callback(server.stop)
            backend = SglangBackend(
                server, config=config, name=name, info=info, capture_routing=capture_routing, shapes=shapes
            )
            digest, live = first_load(server.report)
            weights = WeightVersion(0, digest)
            await backend.label(weight_label(weights))
            stack.pop_all()
    except TimeoutError as error:
        raise EngineError(
            f"{name}: the server did not start within engine.start_timeout_s={config.start_timeout_s}"
        ) from error
    except (EngineError, ContractError, CallError, aiohttp.ClientError) as error:
        raise EngineError(f"{name}: {error}") from error
    return EngineReplica(backend, config=config, name=name, weights=weights, live=live)
