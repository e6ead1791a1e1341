"""An engine replica: its contract, its life cycle, and the calls that an engine implements for it.

    serving --pause--> paused --(abort | drain)--> quiet  --load--> quiet  --resume--> serving
                              --freeze-----------> frozen --load--> frozen --resume-->

While a replica is paused, new `generate` calls wait at a gate. Weights are loaded only when no request runs: every
request has ended or is frozen inside the engine. A frozen request continues under the new weights in a new segment, so
that no segment mixes two versions. A dead engine fails every call. After a failed load the gate stays closed until a
load succeeds.

`EngineReplica` has the life cycle, the same for all engines. An `EngineBackend` has the calls to one engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

from agent_loop.engine import GenerateRequest
from async_rl.inference.checks import weight_label
from async_rl.inference.loads import RankLoad, difference, published_by
from async_rl.inference.nodes import Follower, bring
from async_rl.inference.serving import ServingConfig
from async_rl.inference.stub import InProcess
from async_rl.weights.live import LiveWeights
from async_rl.weights.store import LocalStore
from async_rl.weights.transport import Seat, Source, UpdateError, WeightUpdate
from message_queue.errors import AnswerError, ContractError, EngineError, ReplicaLostError
from message_queue.tokens import StopReason, TokenOutput, WeightVersion

T = TypeVar("T")
KVPolicy = Literal["keep", "recompute"]
NODE_NOTICE_S = 2.0  # from the death of an engine to the report of another node that may be the cause
UNKNOWN_LABEL = "unknown"  # label of weights that are not verified; an answer with it is refused


class DeliveryError(EngineError):
    """A version did not come from its servers, because of this node or another one; names the bucket and the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """Counters of one replica since its start."""

    in_flight: int
    """Requests admitted and not finished, now."""
    tokens_sampled: int
    """Tokens returned so far, including partial segments."""
    busy_seconds: float
    """Time with at least one request in flight, in seconds."""


@dataclass(slots=True, eq=False)
class InflightRequest:
    """A request that passed the gate and has no result yet."""

    request_id: str
    """Id of the request, unique while in flight."""
    abort_requested: bool = False
    """Whether the request must end with a partial segment."""
    evicted: bool = False
    """Whether the request must leave the engine and park; `resume` sends it back to the engine."""
    parked: bool = False
    """Whether the request waits outside the engine after an eviction."""
    result: list[TokenOutput] | None = None
    """Segments of the request; None until it has a result."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request has ended, with a result or an error."""
    outside: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the request is not in the engine: parked or finished."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the gate is open, and when an abort is requested: a parked request then leaves."""

    @property
    def aborted(self) -> bool:
        """Whether the request ended with a partial segment."""
        return bool(self.result) and self.result[-1].stop_reason is StopReason.ABORT

    async def park(self) -> None:
        """Wait outside the engine until the gate opens or an abort is requested."""
        self.evicted, self.parked = False, True
        self.outside.set()
        try:
            while not (self.released.is_set() or self.abort_requested):  # a pause may follow a resume at once
                await self.released.wait()
        finally:
            self.parked = False
            self.outside.clear()


class RequestGate:
    """Admits requests, holds them during a pause, tracks those in flight, and fails them all if the engine dies.

    Args:
        name: name of the replica, for error messages.
    """

    def __init__(self, name: str) -> None:
        self.weights_unverified: str | None = None
        """Reason why the content of the engine's weights is unknown; None if they are verified."""
        self._name = name
        self._open = asyncio.Event()
        self._open.set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fails_soon = False
        self._frozen = False
        self._requests: dict[str, InflightRequest] = {}
        self._tokens_sampled = 0
        self._busy_seconds = 0.0
        self._busy_since = 0.0

    @property
    def in_flight(self) -> list[InflightRequest]:
        """All requests in flight."""
        return list(self._requests.values())

    @asynccontextmanager
    async def admit(self, request_id: str) -> AsyncGenerator[InflightRequest, None]:
        """Wait until the gate is open, then count the request as in flight until the block ends.

        Raises:
            EngineError: the engine failed, or the id is already in flight.
        """
        while not self._open.is_set():  # a pause may follow a resume before this task runs
            await self._open.wait()
        self.check_alive()
        if request_id in self._requests:
            raise EngineError(
                f"{self._name}: request {request_id} is already in flight; ids are unique while in flight"
            )
        if not self._requests:
            self._busy_since = time.monotonic()
        request = self._requests[request_id] = InflightRequest(request_id)
        request.released.set()
        try:
            yield request
        finally:
            del self._requests[request_id]
            self._tokens_sampled += sum(map(len, request.result or ()))
            request.finished.set()
            request.outside.set()
            if not self._requests:
                self._busy_seconds += time.monotonic() - self._busy_since

    def pause(self) -> None:
        """Close the gate."""
        self.check_alive()
        self._open.clear()
        for request in self._requests.values():
            request.released.clear()

    def require_resumable(self) -> None:
        """Raise EngineError if the engine is dead or the content of its weights is unknown."""
        self.check_alive()
        if self.weights_unverified is not None:
            raise EngineError(f"{self._name}: cannot resume, {self.weights_unverified}; load a good version first")

    def resume(self) -> None:
        """Open the gate and release parked requests."""
        self.require_resumable()
        self._frozen = False
        self._open.set()
        for request in self._requests.values():
            request.released.set()

    def request_abort(self) -> list[InflightRequest]:
        """Mark all requests in flight for abort and return them."""
        self.check_alive()
        for request in self._requests.values():
            request.abort_requested = True
            request.released.set()
        return self.in_flight

    def freeze(self) -> int:
        """Record that the engine is frozen until `resume`; return the number of requests in flight."""
        self.require_paused("freeze")
        self._frozen = True
        return len(self._requests)

    async def drain(self) -> None:
        """Return when all requests that are in flight now have ended by themselves.

        Raises:
            EngineError: requests in flight are frozen, or the engine is dead.
        """
        self.check_alive()
        if self._frozen and self._requests:
            raise EngineError(
                f"{self._name}: drain with {len(self._requests)} frozen requests; call resume or abort first"
            )
        await self.unless_failed(until_finished(self.in_flight))

    def require_paused(self, action: str) -> None:
        """Raise EngineError unless the gate is closed."""
        self.check_alive()
        if self._open.is_set():
            raise EngineError(f"{self._name}: {action} while serving; call pause and abort (or drain, freeze) first")

    def require_quiet(self, action: str) -> None:
        """Raise EngineError unless the gate is closed and every request in flight is frozen."""
        self.require_paused(action)
        if self._requests and not self._frozen:
            raise EngineError(
                f"{self._name}: {action} with {len(self._requests)} requests in flight "
                f"({', '.join(list(self._requests)[:3])}, ...); call abort, drain or freeze first"
            )

    def fail(self, reason: str) -> None:
        """Record that the engine failed: waiting and later calls raise ReplicaLostError with the first reason."""
        if not self._failed.done():
            self._failed.set_exception(ReplicaLostError(f"{self._name}: {reason}"))
            self._failed.exception()  # retrieved here, or asyncio logs an unretrieved exception
        self._open.set()

    def fail_later(self, reason: str) -> None:
        """As `fail`, unless another reason comes within NODE_NOTICE_S."""
        self._fails_soon = True
        asyncio.get_running_loop().call_later(NODE_NOTICE_S, self.fail, reason)

    async def until_failed(self, error: EngineError) -> None:
        """If `error`, or `fail_later`, says that the engine died, return when it has failed, or after NODE_NOTICE_S."""
        if self._fails_soon or isinstance(error, ReplicaLostError):
            await asyncio.wait({self._failed}, timeout=NODE_NOTICE_S)

    def check_alive(self) -> None:
        """Raise ReplicaLostError if the engine failed."""
        if self._failed.done():
            raise ReplicaLostError(str(self._failed.exception()))

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; raises ReplicaLostError if the engine fails first.

        If `work` is cancelled, its cleanup has ended when this returns.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.check_alive()
            return await task
        finally:
            if task.cancel():
                await asyncio.wait({task})

    def stats(self) -> ReplicaStats:
        """Counters since the start."""
        running = time.monotonic() - self._busy_since if self._requests else 0.0
        return ReplicaStats(
            in_flight=len(self._requests),
            tokens_sampled=self._tokens_sampled,
            busy_seconds=self._busy_seconds + running,
        )


async def until_finished(requests: Iterable[InflightRequest]) -> None:
    """Return when each of `requests` has ended, with a result or an error."""
    for request in requests:
        await request.finished.wait()


@dataclass(slots=True, eq=False)
class LoadedWeights:
    """The weight versions that may have sampled tokens of the requests in flight."""

    current: WeightVersion
    """The loaded version."""
    by_label: dict[str, WeightVersion] = field(init=False)
    """`weight_label` -> version, of all versions that may have sampled a token of a request in flight."""

    def __post_init__(self) -> None:
        self.by_label = {weight_label(self.current): self.current}

    def replace(self, weights: WeightVersion, *, in_flight: bool) -> None:
        """Record a load; if no request is in flight, earlier versions are removed."""
        if not in_flight:
            self.by_label.clear()
        self.by_label[weight_label(weights)] = self.current = weights


class EngineBackend(Protocol):
    """The calls to one engine. `EngineReplica` orders them, bounds their time and checks their results.

    A call may raise EngineError or any exception of the engine's client; `engine_error` converts it.
    """

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` with the reason if the engine's process ends before `close`."""
        ...

    def check_request(self, request: GenerateRequest) -> None:
        """Raise ContractError if the engine cannot serve the request."""
        ...

    async def decode(
        self, request: GenerateRequest, inflight: InflightRequest, *, loaded: LoadedWeights
    ) -> list[TokenOutput]:
        """Decode a checked request. If the call is cancelled, the engine aborts the request.

        Raises:
            ContractError: the engine's answer breaks the contract.
            EngineError: the engine failed the request.
        """
        ...

    async def abort(self, requests: Sequence[InflightRequest]) -> None:
        """Make the engine end `requests`, all that are in flight, with partial segments, frozen ones too."""
        ...

    async def freeze(self) -> None:
        """Stop all requests inside the engine until `resume`; do nothing if they are stopped."""
        ...

    async def check_update(self, update: WeightUpdate, *, kv: KVPolicy, in_flight: bool) -> None:
        """Raise ContractError if the engine cannot load the update.

        Args:
            kv: see `Replica.load`.
            in_flight: whether frozen requests are in flight.
        """
        ...

    async def stage(self, update: WeightUpdate) -> Sequence[RankLoad]:
        """Load an update next to the weights that serve, while requests run; the next `load` with it exchanges both.

        Returns:
            a report of each rank, as the `load` returns it too.

        Raises:
            ContractError: the update lacks tensors.
        """
        ...

    async def load(
        self, update: WeightUpdate, *, kv: KVPolicy, requests: Sequence[InflightRequest]
    ) -> Sequence[RankLoad]:
        """Load a checked update while no request runs, and return a report of each rank.

        If the update is staged, exchange the weights.

        Args:
            kv: see `Replica.load`.
            requests: the frozen requests in flight.
        """
        ...

    async def label(self, label: str) -> None:
        """Set the label that the engine returns with each token that it samples from now on."""
        ...

    async def resume(self) -> None:
        """Continue frozen requests; do nothing if the engine is not frozen."""
        ...

    async def close(self) -> None:
        """Stop the engine and all its processes. Called once."""
        ...

    async def engine_error(self, error: Exception, what: str) -> EngineError:
        """The error to raise instead of an exception of the engine's client.

        Args:
            what: start of the message: the replica and the call.
        """
        ...


BackendT = TypeVar("BackendT", bound=EngineBackend)


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
