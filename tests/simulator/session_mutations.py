"""Defects of sessions: of calls and their paths, in recovery, in the loss and in the reward."""

import asyncio
from dataclasses import replace

from agent_loop.programs.endpoint.host import EndedSession
from agent_loop.programs.program import ProgramLoop
from agent_loop.programs.session import AgentSession
from async_rl.rollout.content.reader import read_groups
from async_rl.rollout.recorded import RecordedTrajectory
from async_rl.trainer.batch.training_batch import training_batch
from message_queue.errors import RolloutError, StateLostError
from message_queue.tokens import StopReason
from message_queue.trajectory import SequenceBranch
from tests.simulator.defects import defect


@defect("exactly once", "provenance", agents=True)
class TokenIsInTwoLosses(RecordedTrajectory):
    def fork_as(self, number, *, turns, tokens):
        made = super().fork_as(number, turns=turns, tokens=tokens)
        made._branches = [SequenceBranch(0, made._rows)]
        return made


@defect("exactly once", of=read_groups, agents=True)
def recovery_loses_a_path(*args, **options):
    found, notes = read_groups(*args, **options)
    for group in found.values():
        for trajectory in group.trajectories:
            del trajectory._forks[-1:]
    return found, notes


NEWEST = {}  # answer of any session, by event loop


@defect("exactly once", "provenance", "ledger", agents=True)
class CallAttachesToAnAnswerOfAnotherSession(AgentSession):
    async def _answer(self, request, chat, conversation):
        answer = await super()._answer(request, chat, conversation)
        NEWEST[asyncio.get_running_loop()] = answer
        return answer

    def _place(self, request, chat, conversation):
        place = super()._place(request, chat, conversation)
        return place if place.before is None else place._replace(before=NEWEST[asyncio.get_running_loop()])


@defect("exactly once", agents=True)
class RetryIsSampledAgain(AgentSession):
    async def _once(self, request, key, make):
        return await super()._once(replace(request, is_retry=False, idempotency_key=None), key, make)


@defect("exactly once", agents=True)
class AnswersAreTokenizedAgain(AgentSession):
    def _place(self, request, chat, conversation):
        self._sampled.clear()
        return super()._place(request, chat, conversation)


@defect("reward", agents=True)
class FailedSessionIsScoredZero(ProgramLoop):
    async def run(self, prompt, *, trajectory, session, cache_salt):
        try:
            await super().run(prompt, trajectory=trajectory, session=session, cache_salt=cache_salt)
        except RolloutError as error:
            if isinstance(error, StateLostError) or not trajectory.num_sampled:
                raise
            trajectory.close(stop_reason=StopReason.STOP, reward=0.0)


@defect("reward", of=training_batch, agents=True)
def paths_of_a_rollout_have_different_advantages(*args, **options):
    batch = training_batch(*args, **options)
    return replace(batch, advantages=batch.advantages + batch.index[:, 2])


@defect("exactly once", agents=True)
class CallAfterTheEndIsAnswered(EndedSession):
    async def answer(self, request):
        return None
