"""The recipe over reasoning-gym, with the package itself."""

import pytest

from agent_loop.reward import Completion
from async_rl.rollout.task import TaskConfig, build_task
from message_queue.tokens import StopReason

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
FACTORY = "recipes.reasoning_gym.task:reasoning_gym_task"
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def task(seed=0, **options):
    return build_task(TaskConfig(factory=FACTORY, options=options), seed=seed)


def texts(prompts):
    return [prompt.messages[-1].content for prompt in prompts]


def test_prompts_depend_on_the_seed_and_are_not_held_out():
    first, again = task(settings=SMALL, held_out=60), task(settings=SMALL, held_out=60)
    trained = texts(first.train_prompt(index) for index in range(50))
    assert trained == texts(again.train_prompt(index) for index in range(50))
    assert trained != texts(task(seed=7, settings=SMALL, held_out=60).train_prompt(index) for index in range(50))
    assert not set(trained) & set(texts(first.validation_prompts(60)))
    assert "<answer>" in first.train_prompt(0).messages[0].content


@pytest.mark.parametrize(("said", "right"), [("It is <answer>{}</answer>", True), ("It is {}", False), ("", False)])
async def test_the_reward_is_the_score_of_the_answer_in_tags(said, right):
    own = task(environment="basic_arithmetic")
    prompt = own.train_prompt(3)
    completion = Completion(turns=(said.format(prompt.target["answer"]),), stop_reason=StopReason.STOP)
    score = await own.reward.score(prompt, completion=completion)
    assert (score.value == 1.0) == right


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"environment": "nope"}, "'nope'"),
        ({"settings": {"nope": 1}}, "nope"),
        ({"settings": {"min_terms": -1}}, "min_terms"),
    ],
)
def test_an_unknown_environment_or_setting_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        task(**options)


def test_an_environment_whose_questions_are_all_held_out_is_refused():
    own = task(settings=SMALL, held_out=5000)
    with pytest.raises(ValueError, match="held_out"):
        own.train_prompt(0)
