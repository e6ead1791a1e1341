"""Replica and trainer of a simulated run: tokens come at a constant rate, and weights are a hash of the training."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agent_loop.engine import GenerateRequest
from async_rl.cluster.trainer import TrainerError, TrainerLostError
from async_rl.inference.checks import kept_tokens
from async_rl.inference.gate import InflightRequest, KVPolicy
from async_rl.inference.spans import cut_into_segments
from async_rl.rollout.group_contents import fetched
from async_rl.simulator import model
from async_rl.simulator.standins import ScriptedReplica, ScriptedTrainer
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.weights.transport import WeightUpdate
from message_queue.errors import AnswerError, EngineError
from message_queue.tokens import RoutedExperts, StopReason, TokenOutput, WeightVersion

if TYPE_CHECKING:
    from async_rl.simulator.world import World

INITIAL = hashlib.blake2b(b"initial weights", digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answer of an engine, as far as it is good."""

    request: GenerateRequest
    """What it answers."""
    segments: tuple[TokenOutput, ...]
    """Those that are good."""
    unavailable: range
    """Positions without rows."""


@dataclass(slots=True, eq=False)
class _Decode:
    """A decode under way."""

    request: GenerateRequest
    """To be answered."""
    inflight: InflightRequest
    """The request at the gate."""
    context: list[int]
    """Of each token, sampled ones included; see `model.contexts`."""
    sampled: list[tuple[int, WeightVersion]] = field(default_factory=list[tuple[int, WeightVersion]])
    """Tokens, and the weights that sampled them."""
    stuck: bool = False
    """Whether it never ends."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has to recheck its request."""


class SimulatedReplica(ScriptedReplica):
    """A replica whose answers name their weights.

    Args:
        token_s: virtual seconds per token of one request.
    """

    def __init__(self, name: str, *, world: World, token_s: float) -> None:
        super().__init__(name, weights=WeightVersion(0, INITIAL))
        self.load_s = world.scenario.load_s
        self._world = world
        self._token_s = token_s
        self._decodes: dict[str, _Decode] = {}

    # ---- control

    def _on_abort(self) -> None:
        for decode in self._decodes.values():
            decode.changed.set()

    def _on_freeze(self) -> None:
        for decode in self._decodes.values():
            decode.inflight.evicted = not decode.inflight.parked
            decode.changed.set()

    async def _on_load(self, weights: WeightVersion, kv: KVPolicy, *, seconds: float) -> WeightVersion | None:
        self._world.judge(self._world.oracle.loads, self.name)
        kind, late_s = self._world.fault(f"load/{self.name}")
        await asyncio.sleep(seconds + late_s)
        match kind:
            case "weights never loaded":
                await asyncio.Event().wait()
            case "weights that did not arrive":
                return self.weights
            case "weights refused":
                raise EngineError(f"{self.name}: the update is incomplete")
            case "weights of another version":
                return WeightVersion(weights.version, "0bad")
            case "engine dies":
                self._fail("its engine died in a load")
            case "process dies":
                self._world.kill(self.name)
            case _:
                pass
        self._gate.require_quiet("load")
        self._world.note(self.name, "loaded", weights.version)
        self._world.judge(self._world.oracle.loaded_by, self.name, weights)
        return None

    def _fail(self, reason: str) -> None:
        self._gate.fail(reason)
        for decode in self._decodes.values():
            decode.inflight.released.set()
            decode.changed.set()

    # ---- decoding

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        async with self._gate.admit(request.request_id) as inflight:
            decode = _Decode(request, inflight, model.contexts(request.token_ids.tolist()))
            self._decodes[request.request_id] = decode
            try:
                inflight.result = await self._decode(decode)
                return inflight.result
            finally:
                del self._decodes[request.request_id]

    async def _decode(self, decode: _Decode) -> list[TokenOutput]:
        request = decode.request
        self._world.judge(self._world.oracle.asked, request)
        kind, tokens = self._world.fault(f"generate/{self.name}")
        decode.stuck = kind == "no answer"
        if kind == "engine dies":
            self._fail("its engine died in a decode")
        gives_up = kind in ("gives up", "aborts by itself")
        most = min(request.max_new_tokens, int(tokens)) if gives_up else request.max_new_tokens
        reason = await self._sample(decode, most)
        if reason is StopReason.LENGTH and most < request.max_new_tokens:
            reason = StopReason.ERROR if kind == "gives up" else StopReason.ABORT
        return self._sent(request, self._segments(decode, reason))

    async def _sample(self, decode: _Decode, most: int) -> StopReason:
        """Sample up to `most` tokens; returns why it ends. New weights may come in between."""
        loop, calls = asyncio.get_running_loop(), self._world.scenario.config.rollout.limits.max_turns > 1
        session, sampled = model.session_number(decode.request.session), decode.sampled
        while len(sampled) < most:
            if decode.inflight.evicted:
                await decode.inflight.park()
            self._gate.check_alive()
            if decode.inflight.abort_requested and not decode.stuck:
                return StopReason.ABORT
            started, by, planned = loop.time(), self.weights, list[int]()
            weights, ahead = model.weights(by.digest), decode.context[-1]
            while len(sampled) + len(planned) < most and (not planned or planned[-1] != model.END):
                planned.append(weights.token(ahead, session, calls=calls))
                ahead = model.after(ahead, planned[-1])
            whole = await _whole_wait(decode.changed, None if decode.stuck else len(planned) * self._token_s)
            self._gate.check_alive()
            count = len(planned) if whole else min(len(planned), int((loop.time() - started) / self._token_s))
            for token in planned[: 0 if decode.stuck else count]:
                sampled.append((token, by))
                decode.context.append(model.after(decode.context[-1], token))
            if sampled and sampled[-1][0] in decode.request.stop_token_ids:
                return StopReason.STOP
        return StopReason.LENGTH

    def _segments(self, decode: _Decode, reason: StopReason) -> list[TokenOutput]:
        """The answer: tokens, logprobs, kept tokens and rows of the weights that made them."""
        request, context = decode.request, decode.context
        start, existing, rows = len(request.token_ids), request.existing_rows, None
        samplers = [by for _, by in decode.sampled]
        if samplers:
            owners = [samplers[max(0, p + 1 - start)] for p in range(existing, len(context) - 1)]
            experts = [model.weights(by.digest).row(c) for by, c in zip(owners, context[existing:-1], strict=True)]
            shape = (len(experts), *model.ROUTING.row_shape)
            rows = RoutedExperts(first_position=existing, experts=np.array(experts, model.ROUTING.dtype).reshape(shape))
        sampled = enumerate(decode.sampled, start)
        made = [(model.weights(by.digest), context[p - 1], token) for p, (token, by) in sampled]
        kept = [weights.kept(before, token) for weights, before, token in made] if request.sampling.is_cut else None
        return cut_into_segments(
            request,
            token_ids=np.array([token for token, _ in decode.sampled], np.int32),
            logprobs=np.array([weights.logprob(before, token) for weights, before, token in made], np.float32),
            routed_experts=rows,
            spans=[(by, samplers.count(by)) for by in dict.fromkeys(samplers)] or [(self.weights, 0)],
            stop_reason=reason,
            replica=self.name,
            support=None if kept is None else kept_tokens(kept, "kept tokens"),
        )

    def _sent(self, request: GenerateRequest, segments: list[TokenOutput]) -> list[TokenOutput]:
        """The answer as it arrives: spoiled if that is its turn."""
        kind, count = self._world.fault(f"answer/{self.name}")
        sent, good, missing = segments, segments, range(0)
        first, last = segments[0].routed_experts, segments[-1].routed_experts
        # the others ask for rows that they already hold
        append = self._world.scenario.config.rollout.resume_routing in ("append", "force")
        match kind if len(segments[-1]) else "":
            case "unavailable rows" if append and first is not None:
                lacking = min(int(count), len(first.experts))
                missing = range(first.first_position, first.first_position + lacking)
                less = replace(first, first_position=missing.stop, experts=first.experts[lacking:], unavailable=lacking)
                sent = [replace(segments[0], routed_experts=less), *segments[1:]]
            case "a row too few" if last is not None:
                fewer = replace(last, experts=last.experts[:-1])
                sent, good = [*segments[:-1], replace(segments[-1], routed_experts=fewer)], segments[:-1]
            case "a refused answer":
                raise AnswerError(f"{self.name}: request {request.request_id}: the answer breaks the contract")
            case _:
                pass
        answer = Answered(request=request, segments=tuple(filter(len, good)), unavailable=missing)
        note = request.request_id, len(request.token_ids), sum(map(len, answer.segments))
        self._world.note(request.session, "answered", *note)
        self._world.oracle.session(request.session).answers.append(answer)
        return sent


async def _whole_wait(changed: asyncio.Event, seconds: float | None) -> bool:
    """Wait, or less if something changes for the request; whether it was the whole time."""
    changed.clear()
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        return True
    return False


class SimulatedTrainer(ScriptedTrainer):
    """A trainer whose weights are a hash of everything it was trained on.

    Attributes:
        digest: digest of the weights now.
        train_step: updates that they hold.
    """

    def __init__(self, world: World) -> None:
        train_s = world.scenario.train_s
        self.train_s = train_s / world.scenario.config.trainer.updates_per_batch
        self.export_s, self.save_s, self.saved_s = train_s / 4, train_s / 16, 1.5 * train_s
        self.digest = INITIAL
        self.train_step = 0
        self._world = world

    async def train(self, batch: TrainingBatch) -> dict[str, float]:
        batch, metrics = replace(batch, contents=await fetched(batch.contents)), dict[str, float]()
        for mini_batch in range(self._world.scenario.config.trainer.updates_per_batch):
            metrics = await super().train(batch)
            if not mini_batch:
                self._world.judge(self._world.oracle.check_batch, batch, train_step=self.train_step)
                self._world.progressed()
            content = hashlib.blake2b(self.digest.encode(), digest_size=8)
            for number in (batch.mini_batch == mini_batch).nonzero()[0].tolist():
                for part in (batch.sequence(number).token_ids, batch.loss_tokens(number).logprobs):
                    content.update(part.tobytes())
            content.update(batch.advantages[batch.mini_batch == mini_batch].tobytes())
            self.digest = content.hexdigest()
            self.train_step += 1
        self._world.judge(self._world.oracle.trained_to, self.train_step, self.digest)
        self._world.note("trainer", "train", self.train_step, self.digest)
        return metrics

    async def export(self, directory: Path | str, *, version: int, keep_version: int) -> WeightUpdate:
        update = await super().export(directory, version=version, keep_version=keep_version)
        self._world.judge(self._world.oracle.exported, update.weights, updates=self.train_step)
        self._world.note("trainer", "export", version, self.digest)
        return update

    def _weights(self, version: int) -> WeightVersion:
        return WeightVersion(version, self.digest)

    async def save(self, directory: Path) -> None:
        await super().save(directory)
        self._state = {"digest": self.digest, "train_step": self.train_step}

    async def saved(self) -> None:
        await super().saved()
        (self.saving / "state.json").write_text(json.dumps(self._state))

    async def save_pretrained(self, folder: Path, *, like: Path) -> None:
        self._world.note("trainer", "save_pretrained", self.digest)

    async def restore(self, directory: Path) -> None:
        state = json.loads((directory / "state.json").read_text())
        self.digest, self.train_step = state["digest"], state["train_step"]

    async def _work(self, what: str, seconds: float) -> None:
        kind, _ = self._world.fault(what)
        await super()._work(what, seconds)
        if kind == "trainer fails":
            raise TrainerError(f"trainer rank 0: {what} failed: out of memory")
        if kind == "trainer dies":
            raise TrainerLostError(f"trainer rank 0: process died during {what}")
