"""The recipe over skyrl-gym, with the package itself."""

import pytest

from agent_loop.loop import TurnLimits
from async_rl.rollout.task import TaskConfig, build_task
from message_queue.tokens import StopReason
from tests.agent_loop.test_loops import TOKENIZER, make_engine, sampled_text, text_of, turn
from tests.helpers.tasks import roll_task

pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")
FACTORY = "recipes.skyrl_gym.task:skyrl_gym_task"
LIMITS = TurnLimits(max_turns=9, max_tokens=2000)


def task(**options):
    return build_task(TaskConfig(factory=FACTORY, options=options), seed=0)


async def roll(own, *turns):
    return await roll_task(own, make_engine(*turns), tokenizer=TOKENIZER, limits=LIMITS)


async def test_turns_of_an_environment_are_rewarded_until_it_is_done():
    answer = task().train_prompt(0).target["reward_spec"]["ground_truth"]
    turns = (turn("hm"), turn("#### 1"), turn(f"#### {answer}"))
    trajectory, asked = await roll(task(), *turns), task().train_prompt(0).messages[0].content
    assert sampled_text(trajectory) == "".join(turns) and asked in text_of(trajectory)
    assert "tentative numeric answer" in text_of(trajectory) and "only the final numeric answer" in text_of(trajectory)
    assert trajectory.stop_reason is StopReason.STOP and trajectory.info["done"] == 1
    assert trajectory.reward == pytest.approx(0.2 / 3 + 1.0)


async def test_an_environment_of_one_turn_ends_with_it():
    trajectory = await roll(task(environment="gsm8k"), turn("no"))
    assert (trajectory.reward, len(trajectory.turns)) == (0.0, 1)


@pytest.mark.parametrize(
    ("options", "named"), [({"environment": "nope"}, "'nope'.*gsm8k"), ({"module": "absent_module"}, "absent_module")]
)
def test_an_unknown_environment_or_module_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        task(**options)
