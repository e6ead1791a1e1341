"""The calls that an engine implements for a replica, and the loads that all engines share.

load      between two engine steps: all ranks load the version
stage     while requests run: each rank loads the version into a twin of its model; `load` then exchanges both
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent_loop.engine import GenerateRequest
from async_rl.inference.checkpoint_weights import Shapes, check_update
from async_rl.inference.checks import weight_label
from async_rl.inference.gate import InflightRequest, KVPolicy
from async_rl.inference.loads import RankLoad
from async_rl.inference.scores import ScoreRequest
from async_rl.weights.transport import WeightUpdate, readable_by_ranks
from message_queue.errors import EngineError
from message_queue.tokens import TokenOutput, WeightVersion
from message_queue.training_sequence import TeacherScores

STAGED_AGAIN_S = 0.05  # between two questions whether a version is staged; engines have no event for it


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


class EngineBackend(ABC):
    """The calls to one engine. `EngineReplica` orders them, bounds their time and checks their results.

    A call may raise EngineError or any exception of the engine's client; `engine_error` converts it.

    Args:
        name: name of the replica, for segments and error messages.
        shapes: names and shapes of the tensors that every update must contain.
        timeout_s: bound in seconds on a load.
    """

    def __init__(self, *, name: str, shapes: Shapes, timeout_s: float) -> None:
        self._name = name
        self._shapes = shapes
        self._timeout_s = timeout_s
        self._frozen = False  # whether the engine's scheduler is paused
        self._staged: tuple[WeightVersion, Sequence[RankLoad]] | None = None  # the version in the twins of the ranks

    # ---- requests

    @abstractmethod
    def check_request(self, request: GenerateRequest) -> None:
        """Raise ContractError if the engine cannot serve the request."""

    @abstractmethod
    async def decode(
        self, request: GenerateRequest, inflight: InflightRequest, *, loaded: LoadedWeights
    ) -> list[TokenOutput]:
        """Decode a checked request. If the call is cancelled, the engine aborts the request.

        Raises:
            ContractError: the engine's answer breaks the contract.
            EngineError: the engine failed the request.
        """

    @abstractmethod
    async def score(self, request: ScoreRequest) -> TeacherScores:
        """Logprobs of given tokens. If the call is cancelled, the engine aborts the request.

        Raises:
            ContractError: the engine cannot serve the request, or its answer breaks the contract.
            EngineError: the engine failed the request.
        """

    @abstractmethod
    async def abort(self, requests: Sequence[InflightRequest]) -> None:
        """Make the engine end `requests`, all that are in flight, with partial segments, frozen ones too."""

    @abstractmethod
    async def freeze(self) -> None:
        """Stop all requests inside the engine until `resume`; do nothing if they are stopped."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue frozen requests; do nothing if the engine is not frozen."""

    # ---- weights

    async def check_update(self, update: WeightUpdate, *, kv: KVPolicy, in_flight: bool) -> None:
        """Raise ContractError if the engine cannot load the update.

        Args:
            kv: see `EngineReplica.load`.
            in_flight: whether frozen requests are in flight.
        """
        del kv, in_flight
        if self._staged is None or update.weights != self._staged[0]:
            await asyncio.to_thread(check_update, update, self._shapes, timeout_s=self._timeout_s)

    async def stage(self, update: WeightUpdate) -> Sequence[RankLoad]:
        """Load an update next to the weights that serve, while requests run; the next `load` with it exchanges both.

        Returns:
            a report of each rank, as the `load` returns it too.

        Raises:
            ContractError: the update lacks tensors.
        """
        await asyncio.to_thread(check_update, update, self._shapes, timeout_s=self._timeout_s)
        await self.start_staging(readable_by_ranks(update, timeout_s=self._timeout_s))
        while (ranks := await self.staged()) is None:  # noqa: ASYNC110 - engines have no event for it
            await asyncio.sleep(STAGED_AGAIN_S)
        self._staged = update.weights, ranks
        return ranks

    async def load(
        self, update: WeightUpdate, *, kv: KVPolicy, requests: Sequence[InflightRequest]
    ) -> Sequence[RankLoad]:
        """Load a checked update while no request runs, or exchange the weights if the update is staged.

        Args:
            kv: see `EngineReplica.load`.
            requests: the frozen requests in flight.

        Returns:
            a report of each rank.
        """
        del kv, requests
        staged, self._staged = self._staged, None
        if staged is not None and update.weights == staged[0]:
            await self.commit_staged()
            return staged[1]
        return await self.load_version(readable_by_ranks(update, timeout_s=self._timeout_s))

    @abstractmethod
    async def load_version(self, version: str) -> Sequence[RankLoad]:
        """Reports of all ranks on a load. version: see `async_rl.weights.transport.readable_by_ranks`."""

    @abstractmethod
    async def start_staging(self, version: str) -> None:
        """Start to load a version into the twins of the ranks; see `load_version`."""

    @abstractmethod
    async def staged(self) -> Sequence[RankLoad] | None:
        """Reports of all ranks on `start_staging`; None until the last has ended. Raises its error."""

    @abstractmethod
    async def commit_staged(self) -> None:
        """Exchange the weights with those of the twins on all ranks."""

    @abstractmethod
    async def label(self, label: str) -> None:
        """Set the label that the engine returns with each token that it samples from now on."""

    # ---- process

    @abstractmethod
    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` with the reason if the engine's process ends before `close`."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and all its processes. Called once."""

    @abstractmethod
    async def engine_error(self, error: Exception, what: str) -> EngineError:
        """The error to raise instead of an exception of the engine's client.

        Args:
            what: start of the message: the replica and the call.
        """
