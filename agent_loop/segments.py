"""Decode to a real stop: resume after every abort, within one token budget.

A resumed request sends everything so far and asks for what is left of the original budget. Each answer is appended to
the trajectory before the next request goes out, so an abort, a weight update or a failure loses no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from agent_loop.engine import Engine, EngineError, GenerateRequest, SamplingConfig
from agent_loop.loop import PromptError, RolloutError, TurnLimits
from message_queue.tokens import ContractError, Int32Array, StopReason, TokenOutput
from message_queue.trajectory import Trajectory, Turn


def observe_prompt(trajectory: Trajectory, token_ids: Int32Array, *, index: int, limits: TurnLimits) -> None:
    """Open an empty trajectory with its prompt.

    Raises:
        PromptError: the prompt leaves no token to sample.
        ContractError: the trajectory is not empty.
    """
    if trajectory.turns:
        raise ContractError(
            f"the trajectory already holds {len(trajectory)} tokens; a rollout starts from an empty one"
        )
    if limits.turn_budget(len(token_ids)) < 1:
        raise PromptError(
            f"prompt {index} has {len(token_ids)} tokens and limits.max_tokens is {limits.max_tokens}; "
            "raise the limit or leave out the prompt"
        )
    trajectory.observe(token_ids)


def sampled_tokens(turn: Turn) -> Int32Array:
    """What the model wrote in a turn, int32 [n]."""
    return np.concatenate([s.token_ids for s in turn.segments]) if turn.segments else np.zeros(0, np.int32)


class SegmentDecoder:
    """Decodes the turns of one trajectory.

    Args:
        stop_token_ids: each ends a turn and is part of it.
        session: name of the rollout. Requests are `session#0.`, `session#1.`, ...: as no session contains "#", no
            request id is a prefix of another, which engines that abort by prefix rely on.
        timeout_s: of one engine call.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        sampling: SamplingConfig,
        stop_token_ids: Sequence[int],
        session: str,
        cache_salt: str,
        timeout_s: float,
    ) -> None:
        if "#" in session:
            raise ValueError(f'session is {session!r}; "#" separates session and request, so it cannot be part of it')
        self._engine = engine
        self._sampling = sampling
        self._stop_token_ids = tuple(stop_token_ids)
        self._session = session
        self._cache_salt = cache_salt
        self._timeout_s = timeout_s
        self._num_requests = 0
        self.num_aborts = 0

    async def decode(self, trajectory: Trajectory, *, max_new_tokens: int) -> StopReason:
        """Extend `trajectory` up to a stop token or by `max_new_tokens`, whatever interrupts it.

        Segments without tokens are not appended: they sampled nothing, and the forward pass that samples next gives
        the rows. Returns STOP, TOOL_CALL or LENGTH, never ABORT. A last token that is a stop token is a STOP whatever
        the engine calls it, as an abort or the budget can end a decode at that very token.

        Raises:
            RolloutError: the engine gave up on the request; what it returned before is kept.
            EngineError: the engine failed or gave no answer in time.
            ContractError: the segment does not continue the trajectory.
        """
        left = max_new_tokens
        while left > 0:
            request = self._request(trajectory, left)
            segment = await self._generate(request)
            if len(segment) > left:
                raise ContractError(
                    f"replica {segment.replica} returned {len(segment)} tokens for request {request.request_id}, "
                    f"which asked for at most {left}"
                )
            if len(segment):
                trajectory.extend(segment)
                left -= len(segment)
                if int(segment.token_ids[-1]) in self._stop_token_ids:
                    return StopReason.STOP
            match segment.stop_reason:
                case StopReason.ABORT:
                    self.num_aborts += 1
                case StopReason.ERROR:
                    raise RolloutError(
                        f"replica {segment.replica} gave up on request {request.request_id} "
                        f"after {len(request.token_ids) + len(segment)} tokens"
                    )
                case reason:
                    return reason
        return StopReason.LENGTH

    def _request(self, trajectory: Trajectory, max_new_tokens: int) -> GenerateRequest:
        number, self._num_requests = self._num_requests, self._num_requests + 1
        return GenerateRequest(
            request_id=f"{self._session}#{number}.",
            token_ids=trajectory.token_ids(),
            max_new_tokens=max_new_tokens,
            rows_held=trajectory.num_rows,
            stop_token_ids=self._stop_token_ids,
            sampling=self._sampling,
            session=self._session,
            cache_salt=self._cache_salt,
        )

    async def _generate(self, request: GenerateRequest) -> TokenOutput:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await self._engine.generate(request)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise EngineError(
                f"request {request.request_id} got no answer in {self._timeout_s:g} s (limits.generate_timeout_s); "
                "the engine hangs, or the limit is shorter than its longest decode and pause"
            ) from error
