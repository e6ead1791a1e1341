"""Decode to a real stop: in strides, and over every abort, within one token budget.

A request asks for the rest of the budget, but for at most `limits.segment_tokens` tokens. The next one sends
everything so far; in the same engine it finds that in its prefix cache. A turn of 10,000 tokens in strides of 4,096:

    request 0   prompt                    4,096 tokens
    request 1   prompt + 4,096 tokens     1,500 tokens, then an abort: new weights
    request 2   prompt + 5,596 tokens     4,096 tokens
    request 3   prompt + 9,692 tokens     308 tokens

Each answer is appended to the trajectory before the next request goes out, so an abort or a weight update loses no
token, and the death of an engine at most a stride.

An answer that breaks the contract is not used, and the request is repeated under another id. If an answer has
several segments, those before the first bad one are kept: each is checked by itself and ends where its weights ended,
as if the engine had been aborted there.

Which rows a request asks for follows from `Trajectory.resume_routing`:

    append          those not held
    force           those not held; the held ones go along, and the engine forwards their positions over them. Rows from
                    the first one that no engine could give (-1) do not: the routing there is unknown, so the engine
                    chooses from there on, as with append
    replace, split  all
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from agent_loop.engine import Engine, GenerateRequest, SamplingConfig
from agent_loop.loop import TurnLimits
from agent_loop.timeline import timed
from message_queue.errors import AnswerError, ContractError, EngineError, PromptError, RolloutError
from message_queue.tokens import Int32Array, StopReason, TokenOutput
from message_queue.trajectory import Trajectory, Turn

FindStop = Callable[[Int32Array], int | None]
"""Tokens of a turn up to the one in which its first stop string ends, that one included; None without any."""

STOP_STRING_STRIDE = 64  # tokens between two searches for a stop string: the most that are decoded in vain after one


def observe_prompt(trajectory: Trajectory, token_ids: Int32Array, *, index: int, limits: TurnLimits) -> None:
    """Open an empty trajectory with its prompt; a trajectory that was started before is unchanged.

    Raises:
        PromptError: the prompt leaves no token to sample.
        RolloutError: the trajectory was started with another prompt.
        ContractError: it is closed.
    """
    if trajectory.closed:
        raise ContractError(f"the trajectory of prompt {index} is closed; a rollout goes on with one that is open")
    if trajectory.turns:
        if not np.array_equal(trajectory.turns[0].observation, token_ids):
            raise RolloutError(
                f"a trajectory of prompt {index} holds {len(trajectory)} tokens that begin with another prompt; the "
                "data, the chat template or the tokenizer has changed since it was started"
            )
        return
    if limits.turn_budget(len(token_ids)) < 1:
        raise PromptError(
            f"prompt {index} has {len(token_ids)} tokens and rollout.limits.max_tokens is {limits.max_tokens}; "
            "raise the limit or leave out the prompt"
        )
    trajectory.observe(token_ids)


def sampled_tokens(turn: Turn) -> Int32Array:
    """int32 [n], tokens that the model wrote in a turn."""
    return np.concatenate([s.token_ids for s in turn.segments]) if turn.segments else np.zeros(0, np.int32)


def budget_left(trajectory: Trajectory, limits: TurnLimits) -> int:
    """Tokens that the last turn may still sample; 0 or less when it is full."""
    sampled = trajectory.turns[-1].num_sampled
    return limits.turn_budget(len(trajectory) - sampled) - sampled


class SegmentDecoder:
    """Decodes the turns of one trajectory.

    Args:
        stop_token_ids: tokens that each end a turn, as its last token.
        session: name of the rollout, without "#". Requests are `session#0.`, `session#1.`, ...
        call: number of the decoder, if a rollout has several: requests are `session#2-0.`, `session#2-1.`, ...
        limits: only segment_tokens, generate_timeout_s and max_refused_answers are used.
        find_stop: finds the end of a turn in its text; None if only tokens end a turn.

    Attributes:
        num_aborts: decodes that were resumed.
        num_refused: answers that broke the contract.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        sampling: SamplingConfig,
        stop_token_ids: Sequence[int],
        session: str,
        cache_salt: str,
        limits: TurnLimits,
        find_stop: FindStop | None = None,
        call: int | None = None,
    ) -> None:
        if "#" in session:
            raise ValueError(f'session is {session!r}; "#" separates session and request, so it cannot be part of it')
        self._engine = engine
        self._sampling = sampling
        self._stop_token_ids = tuple(stop_token_ids)
        self._session = session
        self._prefix = f"{session}#" if call is None else f"{session}#{call}-"
        self._cache_salt = cache_salt
        self._limits = limits
        self._find_stop = find_stop
        self._stride = limits.segment_tokens if find_stop is None else min(limits.segment_tokens, STOP_STRING_STRIDE)
        self._num_requests = 0
        self.num_aborts = 0
        self.num_refused = 0

    async def decode(self, trajectory: Trajectory, *, max_new_tokens: int) -> StopReason:
        """Extend the last turn up to a stop token, a stop string, or by `max_new_tokens`, across all interruptions.

        A turn that was started before is resumed, and a turn that had ended is unchanged.

        Segments without tokens are not appended: they sampled nothing, and the forward pass that samples next gives
        the rows. Returns STOP, TOOL_CALL or LENGTH, never ABORT. A last token that is a stop token is a STOP
        even if the engine names another reason, as an abort or the budget can end a decode at that very token.

        Raises:
            RolloutError: the engine gave up on the request, or its answers were refused too often; segments returned
                before are kept.
            EngineError: the engine failed or gave no answer in time.
        """
        if (ended := self._end(trajectory)) is not None:
            return ended
        end, refused_in_a_row = len(trajectory) + max_new_tokens, 0
        while (left := end - len(trajectory)) > 0:
            request = self._request(trajectory, left)
            try:
                answer = await self._generate(request)
                check_answer(answer, request)
                stopped = self._append(trajectory, answer)
            except (AnswerError, ContractError) as error:
                self.num_refused += 1
                refused_in_a_row += 1
                if refused_in_a_row > self._limits.max_refused_answers:
                    raise RolloutError(
                        f"the answer to request {request.request_id} was refused, {refused_in_a_row} in a row "
                        f"(limits.max_refused_answers={self._limits.max_refused_answers}): {error}"
                    ) from error
                continue
            refused_in_a_row = 0
            if stopped:
                return StopReason.STOP
            match answer[-1].stop_reason:
                case StopReason.ABORT:
                    self.num_aborts += 1
                case StopReason.ERROR:
                    raise RolloutError(
                        f"replica {answer[-1].replica} gave up on request {request.request_id} "
                        f"after {len(trajectory)} tokens"
                    )
                case StopReason.LENGTH if sum(map(len, answer)) == request.max_new_tokens:
                    pass  # the budget, or one stride
                case reason:
                    return reason
        return StopReason.LENGTH

    # ---- inside

    def _end(self, trajectory: Trajectory) -> StopReason | None:
        """Why the last turn ended; None if it continues, judged without a request to the engine."""
        turn = trajectory.turns[-1]
        if not turn.num_sampled:
            return None
        sampled, last = sampled_tokens(turn), turn.segments[-1].stop_reason
        if int(sampled[-1]) in self._stop_token_ids:
            return StopReason.STOP
        return last if last in (StopReason.STOP, StopReason.TOOL_CALL) else None

    def _append(self, trajectory: Trajectory, answer: Sequence[TokenOutput]) -> bool:
        """Extend by the sampled segments; whether the turn is at its end."""
        if not any(map(len, answer)):
            return False
        segments = self._up_to_stop_string(trajectory, answer)
        for received, segment in zip(answer, segments or answer, strict=False):
            if len(segment) < len(received):
                trajectory.check(received)  # the cut takes the last rows away, and with them a wrong extent
            if len(segment):
                trajectory.extend(segment)
        return segments is not None or int(trajectory.turns[-1].segments[-1].token_ids[-1]) in self._stop_token_ids

    def _up_to_stop_string(self, trajectory: Trajectory, answer: Sequence[TokenOutput]) -> list[TokenOutput] | None:
        """The part of `answer` up to the first stop string; None without a stop string."""
        if self._find_stop is None:
            return None
        before = sampled_tokens(trajectory.turns[-1])
        count = self._find_stop(np.concatenate([before, *(segment.token_ids for segment in answer)]))
        if count is None:
            return None
        return cut_segments(answer, count=max(1, count - len(before)), first_position=len(trajectory))

    def _request(self, trajectory: Trajectory, left: int) -> GenerateRequest:
        number, self._num_requests = self._num_requests, self._num_requests + 1
        is_whole = trajectory.resume_routing in ("replace", "split")
        return GenerateRequest(
            request_id=f"{self._prefix}{number}.",
            token_ids=trajectory.token_ids(),
            max_new_tokens=min(left, self._stride),
            existing_rows=0 if is_whole else trajectory.num_rows,
            forced_experts=trajectory.leading_rows() if trajectory.resume_routing == "force" else None,
            stop_token_ids=self._stop_token_ids,
            sampling=self._sampling,
            session=self._session,
            cache_salt=self._cache_salt,
        )

    async def _generate(self, request: GenerateRequest) -> list[TokenOutput]:
        deadline = asyncio.timeout(self._limits.generate_timeout_s)
        try:
            async with deadline:
                with timed("generate", replica="", tokens=0, aborted=False) as seen:
                    answer = await self._engine.generate(request)
                    if answer:
                        aborted = answer[-1].stop_reason is StopReason.ABORT
                        seen |= {"replica": answer[-1].replica, "tokens": sum(map(len, answer)), "aborted": aborted}
                    return answer
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise EngineError(
                f"request {request.request_id} got no answer in {self._limits.generate_timeout_s:g} s "
                "(limits.generate_timeout_s); the engine hangs, or the limit is shorter than the wait for a place, the "
                "longest decode and a pause together"
            ) from error


def check_answer(segments: Sequence[TokenOutput], request: GenerateRequest) -> None:
    """Refuse an answer that `Engine.generate` does not allow. The check does not depend on the trajectory.

    Raises:
        ContractError: no segment, more tokens than asked for, a segment before the last that has no tokens or does
            not end with an abort, or tokens after a stop token.
    """
    if not segments:
        raise ContractError(f"request {request.request_id} was answered with no segment; need at least one")
    who = f"replica {segments[-1].replica}"
    count = sum(map(len, segments))
    if count > request.max_new_tokens:
        raise ContractError(
            f"{who} returned {count} tokens for request {request.request_id}, "
            f"which asked for at most {request.max_new_tokens}"
        )
    for number, segment in enumerate(segments[:-1]):
        if segment.stop_reason is not StopReason.ABORT or not len(segment):
            raise ContractError(
                f"{who} went on after segment {number} of request {request.request_id}, which has {len(segment)} "
                f"tokens and stop_reason {segment.stop_reason}; all but the last hold tokens and end with abort"
            )
    token_ids = np.concatenate([segment.token_ids for segment in segments])
    for early in np.flatnonzero(np.isin(token_ids[:-1], request.stop_token_ids))[:1]:
        raise ContractError(
            f"{who}: request {request.request_id} has stop token {int(token_ids[early])} as token {int(early)} of "
            f"{len(token_ids)}; a stop token ends the decode"
        )


def cut_segments(segments: Sequence[TokenOutput], *, count: int, first_position: int) -> list[TokenOutput]:
    """The first `count` (>= 1) tokens, as an engine would have returned them that stopped there.

    Args:
        first_position: absolute position of the first token.
    """
    kept: list[TokenOutput] = []
    for segment in segments:
        size = min(len(segment), count)
        rows = segment.routed_experts
        if size < len(segment) and rows is not None:
            rows = rows.before(first_position + size - 1)
        kept.append(
            replace(
                segment,
                token_ids=segment.token_ids[:size],
                logprobs=segment.logprobs[:size],
                routed_experts=rows,
                support=None if segment.support is None else segment.support.part(0, size),
            )
        )
        count, first_position = count - size, first_position + size
        if not count:
            break
    kept[-1] = replace(kept[-1], stop_reason=StopReason.STOP)
    return kept
