"""An engine replica: its contract and its life cycle.

    serving --pause--> paused --(abort | drain)--> quiet  --load--> quiet  --resume--> serving
                              --freeze-----------> frozen --load--> frozen --resume-->

While a replica is paused, new `generate` calls wait at a gate. Weights are loaded only when no request runs: every
request has ended or is frozen inside the engine. A frozen request continues under the new weights in a new segment, so
that no segment mixes two versions. A dead engine fails every call. After a failed load the gate stays closed until a
load succeeds.

`EngineReplica` has the life cycle, the same for all engines. `async_rl.inference.backend` has the calls to one engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from agent_loop.engine import GenerateRequest
from async_rl.inference.backend import EngineBackend, LoadedWeights
from async_rl.inference.checks import weight_label
from async_rl.inference.gate import KVPolicy, ReplicaStats, RequestGate, until_finished
from async_rl.inference.loads import RankLoad, difference, published_by
from async_rl.inference.nodes import Follower, bring
from async_rl.inference.scores import ScoreRequest
from async_rl.inference.serving import ServingConfig
from async_rl.inference.stub import InProcess
from async_rl.weights.live import LiveWeights
from async_rl.weights.store import LocalStore
from async_rl.weights.transport import Seat, Source, UpdateError, WeightUpdate
from message_queue.errors import AnswerError, ContractError, EngineError, ReplicaLostError
from message_queue.tokens import TokenOutput, WeightVersion
from message_queue.training_sequence import TeacherScores

T = TypeVar("T")
BackendT = TypeVar("BackendT", bound=EngineBackend)
UNKNOWN_LABEL = "unknown"  # label of weights that are not verified; an answer with it is refused


class DeliveryError(EngineError):
    """A version did not come from its servers, because of this node or another one; names the bucket and the server."""


class EngineReplica(InProcess, Generic[BackendT]):
    """One engine instance: `agent_loop.engine.Engine` plus the control calls of the publisher.

    Args:
        backend: calls to a running engine that labels its tokens with `weight_label(weights)`.
        config: bounds on the time of calls.
        name: name of the replica.
        weights: version that the engine has loaded.
        live: checksums of the parameters of its model.

    Attributes:
        node: id of its node, known to its clients; another one for each replica in this process.
        store: where this node keeps published versions; None if engines read them where the trainer writes them.
        followers: the other nodes of the engine, each with a separate store.
    """

    def __init__(
        self, backend: BackendT, *, config: ServingConfig, name: str, weights: WeightVersion, live: LiveWeights
    ) -> None:
        self.name = name
        self.node = name
        self.backend = backend
        self.store: LocalStore | None = None
        self.followers: Sequence[Follower] = ()
        self._config = config
        self._loaded = LoadedWeights(weights)
        self._live = live
        self._gate = RequestGate(name)
        self._closed = False
        backend.watch(self._engine_died)

    @property
    def weights(self) -> WeightVersion:
        """The loaded weight version."""
        return self._loaded.current

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        """See `agent_loop.engine.Engine.generate`. If the caller is cancelled, the engine aborts the request."""
        what = f"{self.name}: request {request.request_id}"
        async with self._gate.admit(request.request_id) as inflight:
            try:
                self.backend.check_request(request)
            except ContractError as error:
                raise EngineError(f"{what}: {error}") from error
            work = self.backend.decode(request, inflight, loaded=self._loaded)
            try:
                inflight.result = await self._gate.unless_failed(work)
            except ContractError as error:
                raise AnswerError(f"{what}: {error}") from error
            except EngineError as error:
                await self._check_alive(error)
                raise
            return inflight.result

    async def score(self, request: ScoreRequest) -> TeacherScores:
        """Logprobs of given tokens under the loaded weights. If the caller is cancelled, the engine aborts the request.

        Raises:
            AnswerError: the engine cannot serve the request, or its answer was refused.
            ReplicaLostError: the engine is dead.
            EngineError: the engine cannot serve for another reason.
        """
        async with self._gate.admit(request.request_id):
            try:
                return await self._gate.unless_failed(self.backend.score(request))
            except ContractError as error:
                raise AnswerError(f"{self.name}: request {request.request_id}: {error}") from error
            except EngineError as error:
                await self._check_alive(error)
                raise

    async def pause(self) -> None:
        """Hold new `generate` calls until `resume`; requests in flight continue."""
        self._gate.pause()

    async def abort(self) -> int:
        """End every request in flight with a partial segment; return the number of partial segments.

        Every caller's result is complete when this returns. A request that ends by itself meanwhile is not counted.
        """
        requests = self._gate.request_abort()
        if requests:
            await self._control("abort", self.backend.abort(requests))
            await self._control("abort", until_finished(requests))
        return sum(request.aborted for request in requests)

    async def drain(self) -> None:
        """Return when all requests that are in flight now have ended by themselves.

        Raises:
            EngineError: requests in flight are frozen, or the engine is dead.
        """
        await self._gate.drain()

    async def freeze(self) -> int:
        """Stop every request in flight inside the engine until `resume`; return their number.

        Raises:
            EngineError: the replica is not paused, or the engine is dead.
        """
        self._gate.require_paused("freeze")
        if self._gate.in_flight:
            await self._control("freeze", self.backend.freeze())
        return self._gate.freeze()

    def fail(self, reason: str) -> None:
        """Record that the engine failed on another node; see `RequestGate.fail`."""
        self._gate.fail(reason)

    async def fetch(self, update: WeightUpdate, seat: Seat | None = None) -> None:
        """Bring a version to the nodes of this replica, while requests run; do nothing without a `store`.

        Call it before other loads. After a delivery by broadcast, repeat it without a seat: this brings the version
        from this node to the others of the engine.

        Args:
            seat: place of this node in a delivery by broadcast; None if the version is in a folder that all nodes see,
                in an object store, or already on this node.

        Raises:
            DeliveryError: a bucket of the delivery did not come, because of this node or another one.
            ReplicaLostError: a bucket is missing or damaged, or did not come within `engine.load_timeout_s`.
        """
        if (store := self.store) is None:
            return
        what = f"{self.name}: version {update.weights.version}"
        try:
            if seat is None and update.sources:
                await self._send_to_followers(store, update)
                return
            here = bring(store, update, seat, timeout_s=self._config.load_timeout_s)
            others = [follower.fetch(update, None) for follower in self.followers] if seat is None else []
            await asyncio.gather(here, *others)
        except TimeoutError as error:
            raise ReplicaLostError(f"{what}: {error}") from error
        except (UpdateError, OSError) as error:
            failure = ReplicaLostError if seat is None else DeliveryError
            raise failure(f"{what} did not come: {error}") from error

    async def _send_to_followers(self, store: LocalStore, update: WeightUpdate) -> None:
        """Send a version of this node to the others of the engine.

        Each has a separate delivery: in one for all, two replicas on the same nodes could each lock the store of one
        node and wait for the other.
        """
        if not self.followers:
            return
        source = await asyncio.to_thread(store.offer, update)
        seat = Seat(
            delivery="", index=0, size=1, sources=(source,), backend="gloo", timeout_s=self._config.load_timeout_s
        )
        await asyncio.gather(
            *(follower.fetch(update, replace(seat, delivery=uuid.uuid4().hex)) for follower in self.followers)
        )

    async def offer(self, update: WeightUpdate) -> Source:
        """Serve a version that this node has to other nodes.

        Raises:
            EngineError: this node does not have it.
        """
        try:
            if self.store is None:
                raise UpdateError("the replica has no store")
            return await asyncio.to_thread(self.store.offer, update)
        except UpdateError as error:
            raise EngineError(f"{self.name} cannot serve version {update.weights.version}: {error}") from error

    async def stage(self, update: WeightUpdate) -> None:
        """Load new weights next to the ones that serve; requests continue, and `load` of the same update is short.

        Memory of the weights is needed twice.

        Raises:
            DeliveryError: a bucket did not come from a trainer rank. The replica continues to serve.
            EngineError: the update is incomplete or damaged, or the engine is dead. The replica continues to serve.
        """
        update = self._here(update)
        with self._delivering(update):
            ranks = await self._control("stage", self.backend.stage(update))
        if problem := difference(update, ranks):
            raise EngineError(f"{self.name}: version {update.weights.version} was not staged whole: {problem}")

    async def load(self, update: WeightUpdate, *, kv: KVPolicy = "recompute") -> WeightVersion:
        """Load new weights while the replica is paused and every request in flight is frozen.

        Rows and logprobs of earlier tokens stay unchanged.

        Args:
            update: the published version.
            kv: K/V of frozen requests. recompute: the new weights recompute it, with the recorded experts. keep:
                the K/V of the old weights stays, and so does the prefix cache.

        Raises:
            DeliveryError: a bucket did not come from a trainer rank.
            EngineError: the replica is not paused, a request in flight is not frozen, the update is incomplete, a
                bucket has another digest than the published one, or a parameter does not hold the published
                values. After a failed load the replica serves no request until a load succeeds.
        """
        what, update = f"version {update.weights.version}", self._here(update)
        self._gate.require_quiet(f"load of {what}")
        requests = self._gate.in_flight
        with self._delivering(update):
            try:
                await self.backend.check_update(update, kv=kv, in_flight=bool(requests))
            except ContractError as error:
                raise EngineError(f"{self.name}: {error}") from error
        self._gate.weights_unverified = f"{what} was not loaded whole"
        try:
            with self._delivering(update):
                ranks = await self._control("load", self.backend.load(update, kv=kv, requests=requests))
            self._verify(update, ranks)
            await self._control("load", self.backend.label(weight_label(update.weights)))
        except EngineError:
            with contextlib.suppress(EngineError):
                await self._control("load", self.backend.label(UNKNOWN_LABEL))
            raise
        self._gate.weights_unverified = None
        self._loaded.replace(update.weights, in_flight=bool(self._gate.in_flight))
        return update.weights

    @contextlib.contextmanager
    def _delivering(self, update: WeightUpdate) -> Generator[None]:
        """Raise DeliveryError in place of an error that names a bucket that did not come from a trainer rank."""
        try:
            yield
        except ReplicaLostError:
            raise
        except EngineError as error:
            from async_rl.weights.group import UNDELIVERED  # imports torch; a configuration does without

            if update.direct is None or UNDELIVERED not in str(error):
                raise
            raise DeliveryError(str(error)) from error

    def _here(self, update: WeightUpdate) -> WeightUpdate:
        """The update with the folder that the engine reads."""
        return update if self.store is None else replace(update, path=self.store.local(update.path))

    def _verify(self, update: WeightUpdate, ranks: Sequence[RankLoad]) -> None:
        """Raise EngineError unless the engine loaded the published tensors and its parameters hold them."""
        version = update.weights.version
        if problem := difference(update, ranks):
            self._gate.weights_unverified = f"its weights are not those of version {version}: {problem}"
            raise EngineError(f"{self.name}: version {version} was not loaded whole: {problem}")
        if wrong := self._live.replace(published_by(ranks), [rank.parameters for rank in ranks]):
            raise EngineError(
                f"{self.name}: version {version} was read with the published digests, but {len(wrong)} parts of the "
                f"model do not hold the published values ({'; '.join(wrong[:3])}{'; ...' if len(wrong) > 3 else ''}); "
                "the engine does not serve the published weights"
            )

    async def checksum(self) -> str:
        """Checksum of the model's parameters on all ranks, taken at the last load."""
        return self._live.checksum

    async def resume(self) -> None:
        """Open the gate: held `generate` calls and frozen requests continue.

        Raises:
            EngineError: the last load failed, or the engine is dead.
        """
        self._gate.require_resumable()
        await self._control("resume", self.backend.resume())
        self._gate.resume()

    async def stats(self) -> ReplicaStats:
        """Counters since the start."""
        return self._gate.stats()

    async def close(self) -> None:
        """Stop the engine. Waiting and running `generate` calls end with EngineError. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._gate.fail("the replica is closed")
        await asyncio.gather(self.backend.close(), *(follower.close() for follower in self.followers))
        if self.store is not None:
            await asyncio.to_thread(self.store.release)

    async def _control(self, action: str, work: Coroutine[Any, Any, T]) -> T:
        """The result of a control call, bounded by `engine.load_timeout_s` and by the engine's death."""
        what = f"{self.name}: {action}"
        try:
            async with asyncio.timeout(self._config.load_timeout_s):
                return await self._gate.unless_failed(work)
        except TimeoutError as error:
            raise EngineError(f"{what} took longer than engine.load_timeout_s={self._config.load_timeout_s}") from error
        except EngineError:
            raise
        except Exception as error:
            failure = await self.backend.engine_error(error, what)
            await self._check_alive(failure)
            raise failure from error

    def _engine_died(self, reason: str) -> None:
        """Fail, after a report of another node had time to come: its death ends the engine of this node, too."""
        if self.followers:
            self._gate.fail_later(reason)
        else:
            self._gate.fail(reason)

    async def _check_alive(self, error: EngineError) -> None:
        """Raise ReplicaLostError if the engine failed, as `error` of a call may show before its process has ended."""
        if self.followers:
            await self._gate.until_failed(error)
        self._gate.check_alive()
