import pytest

from agent_loop.loop import Message, Prompt
from agent_loop.reward import Completion, score_in_time
from message_queue.errors import RewardError, RolloutError
from message_queue.tokens import StopReason
from tests.helpers.fakes import FakeReward

PROMPT = Prompt(index=3, messages=(Message(role="user", content="?"),))
COMPLETION = Completion(turns=("yes",), stop_reason=StopReason.STOP)


async def test_score_in_time_gives_the_score_of_the_completion():
    reward = FakeReward(value=0.5)
    assert await score_in_time(reward, PROMPT, completion=COMPLETION, timeout_s=1) == (0.5, {})
    assert reward.seen == [COMPLETION]


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (FakeReward(error=KeyError("answer")), "KeyError: 'answer'"),
        (FakeReward(seconds=30), r"limits\.reward_timeout_s"),
        (FakeReward(value=float("nan")), "nan"),
        (FakeReward(value=float("inf")), "inf"),
    ],
)
async def test_score_in_time_names_the_prompt_and_the_cause_of_a_failure(reward, named):
    with pytest.raises(RewardError, match=f"prompt 3 .*{named}") as raised:
        await score_in_time(reward, PROMPT, completion=COMPLETION, timeout_s=0.01)
    assert isinstance(raised.value, RolloutError)


def test_prompt_without_messages_is_refused():
    with pytest.raises(ValueError, match="prompt 3"):
        Prompt(index=3, messages=())
