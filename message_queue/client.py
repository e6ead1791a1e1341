"""Typed async handle to a queue that runs in another process.

Knows the other side only by its shape: an object whose methods have `.remote(...)` that returns an awaitable, as the
handle of a Ray actor over `QueueService` has, or a `Together` over one of `QueueHost`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from message_queue.content import AppendedLengths, GroupMessage, outgoing_group, outgoing_record, read_group, references
from message_queue.contract import Admission, Batch, PutResult, QueueError, QueueSnapshot
from message_queue.journal import JournalError
from message_queue.ledger import LedgerError, LedgerRecord, LedgerTotal
from message_queue.progress import RolloutRecord
from message_queue.restart import Restored, decode_restored
from message_queue.staleness import StalenessError
from message_queue.tokens import ContractError, RoutingSpec
from message_queue.trajectory import PromptGroup
from message_queue.wire import check_rank_code
from message_queue.wire.packed import Buffers, NoSharedMemory, SharedMemory, SharedMemoryLost

REFUSALS = (QueueError, ContractError, LedgerError, StalenessError, JournalError)


class RemoteMethod(Protocol):
    """A method of an actor handle."""

    def remote(self, *args: Any, **kwargs: Any) -> Awaitable[Any]: ...


class QueueUnavailable(RuntimeError):
    """The queue's process is dead or does not answer; names what was waited for and how long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueClientConfig:
    """How long a caller waits for the queue's process.

    timeout_s: bound on one answer, beyond the time that the queue was asked to wait.
    slice_s: a call that waits is asked for again after this long, which is when a dead queue is noticed at the latest
    together with timeout_s. max_wait_s: bound on one wait as a whole; None waits as long as the queue answers.
    rank_code_rows: send the rows of a group by the rank of each expert set: fewer bytes for more work; the order within
    the top-k is lost. The group is put whole then, also where it was appended.
    """

    timeout_s: float = 60.0
    slice_s: float = 10.0
    max_wait_s: float | None = None
    rank_code_rows: bool = False

    def __post_init__(self) -> None:
        for name in ("timeout_s", "slice_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"queue.{name} is {getattr(self, name)}; must be > 0 seconds")
        if self.max_wait_s is not None and self.max_wait_s <= 0:
            raise ValueError(f"queue.max_wait_s is {self.max_wait_s}; must be > 0 seconds, or null for no bound")


class QueueClient:
    """The calls of `TrajectoryQueue`, with the same results and errors, on a queue in another process.

    A call that is cancelled or that fails loses nothing: an admission nobody heard of is what the next `admit` of its
    prompt returns, and a batch nobody received is what the next `take` of this client returns.

    Args:
        handle: of the actor that runs QueueService.
        name: unique among all clients this queue ever had; it names the calls.
        routing: what a routing row means; None when the run captures none.
        memory: that is shared with the queue and all its clients.

    Raises:
        ContractError: rank_code_rows for a model whose expert sets take more than 128 bits.
        QueueUnavailable: from every method, when the queue is dead or did not answer in time.
    """

    def __init__(
        self,
        handle: Any,
        *,
        name: str,
        routing: RoutingSpec | None,
        config: QueueClientConfig,
        memory: SharedMemory | None = None,
    ) -> None:
        if config.rank_code_rows and routing is not None:
            check_rank_code(routing)
        self._handle = handle
        self._name = name
        self._routing = routing
        self._config = config
        self._memory = memory or NoSharedMemory()
        self._appended = AppendedLengths()
        self._numbers = itertools.count()
        self._settled: set[str] = set()
        self._unreceived: list[str] = []
        self._received = 0  # ledger records

    async def open(self, *, timeout_s: float) -> Restored[PromptGroup]:
        """Open the journal of the queue; see `QueueService.open`.

        Args:
            timeout_s: bound on reading it.
        """
        restored = await self._call("open the journal", self._handle.open, allow_s=timeout_s)
        return decode_restored(restored, routing=self._routing)

    # ---- calls that wait

    async def admit(self, prompt: int) -> Admission:
        """Wait until a group may start; see `TrajectoryQueue.admit`."""
        return await self._wait(f"admit(prompt={prompt})", self._handle.admit, prompt, ticket=self._ticket())

    async def put(self, group: PromptGroup) -> PutResult:
        """Hand in a finished group; see `TrajectoryQueue.put`. Cancelled, it leaves the group open or ready."""
        ranked = self._config.rank_code_rows
        whole = not ranked and self._appended.whole(group)
        message = outgoing_group(group, self._memory, appended=whole, rank_coded=ranked)
        result = await self._wait(f"put(group={group.group})", self._handle.put_bytes, message, ticket=self._ticket())
        self._appended.forget(group.group)
        return result

    async def take(self) -> Batch[PromptGroup]:
        """Wait for the next batch; see `TrajectoryQueue.take`."""
        ticket = self._unreceived.pop() if self._unreceived else self._ticket()

        async def receive(batch: Batch[GroupMessage]) -> Batch[PromptGroup]:
            shared = iter(await self._arrays_of(batch, ticket))
            return Batch(
                groups=[read_group(message, shared, routing=self._routing) for message in batch.groups],
                update=batch.update,
                version_updates=batch.version_updates,
                min_update=batch.min_update,
            )

        return await self._wait("take()", self._handle.take_bytes, ticket=ticket, keep=True, receive=receive)

    async def wait_expired(self, *, known: Collection[int] = ()) -> list[int]:
        """Wait for groups to cancel; see `TrajectoryQueue.wait_expired`."""
        return await self._wait("wait_expired()", self._handle.wait_expired, list(known), ticket=self._ticket())

    # ---- calls that do not wait; see TrajectoryQueue

    async def drop(self, group: int, *, reason: str, segments: int = 0, tokens: int = 0, expired: bool = False) -> bool:
        generated = {"segments": segments, "tokens": tokens}
        what = f"drop(group={group})"
        dropped = await self._call(what, self._handle.drop, group, reason=reason, expired=expired, **generated)
        self._appended.forget(group)
        return dropped

    async def trained(self, groups: Sequence[int], *, train_step: int, tokens: Sequence[int] = ()) -> None:
        what = f"trained({len(groups)} groups, train_step={train_step})"
        await self._call(what, self._handle.trained, list(groups), train_step=train_step, tokens=list(tokens))

    async def publish(self, version: int, *, update: int) -> None:
        await self._call(f"publish(version={version})", self._handle.publish, version, update=update)

    async def loaded(self, version: int) -> None:
        await self._call(f"loaded(version={version})", self._handle.loaded, version)

    async def append(self, records: Sequence[RolloutRecord]) -> None:
        outgoing = [outgoing_record(record, self._memory) for record in records]
        await self._call(f"append({len(records)} records)", self._handle.append, outgoing)
        self._appended.add(records)

    async def sync(self) -> None:
        await self._call("sync()", self._handle.sync)

    async def checkpointed(self, train_step: int) -> None:
        await self._call(f"checkpointed(train_step={train_step})", self._handle.checkpointed, train_step)

    async def close_journal(self) -> None:
        await self._call("close_journal()", self._handle.close_journal)

    async def close(self) -> None:
        await self._call("close()", self._handle.close)

    async def expired(self) -> list[int]:
        return await self._call("expired()", self._handle.expired)

    async def snapshot(self) -> QueueSnapshot:
        return await self._call("snapshot()", self._handle.snapshot)

    async def drain_records(self) -> list[LedgerRecord]:
        records: list[LedgerRecord] = await self._call("drain_records()", self._handle.drain_records, self._received)
        self._received += len(records)
        return records

    async def closing_records(self) -> list[LedgerRecord | LedgerTotal]:
        return await self._call("closing_records()", self._handle.closing_records, self._received)

    # ---- inside

    def _ticket(self) -> str:
        return f"{self._name}/{next(self._numbers)}"

    async def _arrays_of(self, batch: Batch[GroupMessage], ticket: str) -> list[Buffers]:
        """What the references in a batch are of, from the queue where who put them there is gone."""
        wanted = [reference for message in batch.groups for reference in references(message)]
        try:
            return await self._memory.get(wanted) if wanted else []
        except SharedMemoryLost:
            return await self._call(f"arrays of the batch of {ticket}", self._handle.taken_arrays, ticket)

    async def _wait(
        self,
        what: str,
        begin: RemoteMethod,
        *args: Any,
        ticket: str,
        keep: bool = False,
        receive: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> Any:
        """Begin a call and ask for its result until there is one.

        keep: a call that fails is begun again by the next take, in case it got its batch. receive: reads the result,
        which the queue keeps until then.
        """
        try:
            result = await self._ask(what, begin, *args, ticket=ticket)
            if receive is not None:
                result = await receive(result)
        except REFUSALS:  # the answer of the call
            self._settled.add(ticket)
            raise
        except BaseException as error:  # cancelled, or no answer
            if keep:
                self._unreceived.append(ticket)
            if await self._withdraw(what, ticket, error) and not keep:
                self._settled.add(ticket)
            raise
        self._settled.add(ticket)
        return result

    async def _ask(self, what: str, begin: RemoteMethod, *args: Any, ticket: str) -> Any:
        clock, config = asyncio.get_running_loop().time, self._config
        started, settled = clock(), list(self._settled)
        result = await self._call(
            what, begin, *args, ticket=ticket, settled=settled, wait_s=config.slice_s, allow_s=config.slice_s
        )
        self._settled.difference_update(settled)
        while result is None:
            waited = clock() - started
            if config.max_wait_s is not None and waited >= config.max_wait_s:
                raise QueueUnavailable(
                    f"{self._name} waited {waited:.1f} s for {what}, and the queue has no result yet; "
                    f"queue.max_wait_s is {config.max_wait_s:g}"
                )
            result = await self._call(
                f"{what}, waited for {waited:.1f} s so far",
                self._handle.resume,
                ticket=ticket,
                wait_s=config.slice_s,
                allow_s=config.slice_s,
            )
        return result

    async def _withdraw(self, what: str, ticket: str, error: BaseException) -> bool:
        """Take a call back; whether the queue confirmed it."""
        try:
            await self._call(f"withdraw of {what}", self._handle.withdraw, ticket)
        except QueueUnavailable as unavailable:
            error.add_note(str(unavailable))
            return False
        return True

    async def _call(self, what: str, method: RemoteMethod, *args: Any, allow_s: float = 0.0, **kwargs: Any) -> Any:
        """One bounded round trip; `allow_s` is what the queue itself was asked to wait."""
        limit = allow_s + self._config.timeout_s
        try:
            async with asyncio.timeout(limit):
                return await method.remote(*args, **kwargs)
        except REFUSALS as error:
            raise _cause(error) from None
        except TimeoutError as error:
            raise QueueUnavailable(
                f"{self._name} got no answer from the queue within {limit:g} s to {what}; "
                f"queue.timeout_s is {self._config.timeout_s:g}"
            ) from error
        except Exception as error:
            raise QueueUnavailable(
                f"{self._name} got no answer from the queue to {what}: {type(error).__name__}: {error}"
            ) from error


def _cause(error: Exception) -> Exception:
    """What the queue raised, without the wrapper that carried it here."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, REFUSALS) else error
