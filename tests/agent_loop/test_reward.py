import pytest

from agent_loop.loop import Message, Prompt, RolloutError
from agent_loop.reward import Completion, RewardError, score_in_time
from message_queue.tokens import StopReason
from tests.helpers.fakes import FakeReward

PROMPT = Prompt(index=3, messages=(Message(role="user", content="?"),))
COMPLETION = Completion(turns=("yes",), stop_reason=StopReason.STOP)


async def score(reward, timeout_s=1.0):
    return await score_in_time(reward, PROMPT, completion=COMPLETION, timeout_s=timeout_s)


async def test_the_score_is_given_and_the_reward_saw_the_completion():
    reward = FakeReward(value=0.5)
    assert await score(reward) == 0.5
    assert reward.seen == [COMPLETION]


async def test_a_reward_that_raises_is_a_rollout_error_that_names_prompt_and_cause():
    with pytest.raises(RewardError, match="reward of prompt 3 failed: KeyError: 'answer'") as raised:
        await score(FakeReward(error=KeyError("answer")))
    assert isinstance(raised.value, RolloutError)


async def test_a_reward_that_takes_too_long_names_the_limit():
    with pytest.raises(RewardError, match=r"no score in 0\.01 s \(limits\.reward_timeout_s\)"):
        await score(FakeReward(seconds=30), timeout_s=0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_score_that_is_not_finite_is_refused(value):
    with pytest.raises(RewardError, match=f"reward of prompt 3 is {value}"):
        await score(FakeReward(value=value))


def test_a_prompt_without_messages_is_refused():
    with pytest.raises(ValueError, match="prompt 3 has no messages"):
        Prompt(index=3, messages=())
