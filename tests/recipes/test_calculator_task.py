import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.reward import Completion
from message_queue.errors import ToolError
from message_queue.tokens import StopReason
from recipes.calculator.calculator import Calculator, LatencyConfig
from recipes.calculator.demonstrator import Demonstrator, NoiseConfig
from recipes.calculator.problems import Problem, ProblemConfig, draw_problem, make_prompt
from recipes.calculator.reward import ExactAnswer
from recipes.calculator.task import CalculatorConfig, CalculatorTask, build_chat, calculator_task
from recipes.calculator.tokenizer import END_OF_TURN, VOCABULARY, build_tokenizer
from tests.helpers.dense import loss_mask
from tests.helpers.fakes import FakeEngine, TurnScript
from tests.helpers.tasks import roll_task

TOKENIZER = build_tokenizer()
CONFIG = ProblemConfig()
LIMITS = TurnLimits(max_turns=6, max_tokens=224)
problems = st.builds(
    lambda seed, held_out: draw_problem(random.Random(seed), CONFIG, held_out=held_out), st.integers(), st.booleans()
)


def task(seed=0, **options):
    return CalculatorTask(CalculatorConfig(**options), seed=seed)


@given(problem=problems)
def test_the_answer_of_a_problem_is_that_of_python(problem):
    assert problem.answer == eval(problem.question)
    assert min(problem.partial_results) >= 0
    assert "*" not in problem.operators[1:]
    assert all(10 <= n <= 99 for n in problem.operands)


def test_lengths_of_problems_follow_their_weights():
    drawn = [draw_problem(random.Random(i), CONFIG, held_out=False) for i in range(4000)]
    shares = [sum(len(p.operators) == n for p in drawn) / len(drawn) for n in (1, 2, 3)]
    # Chains with a negative partial result are redrawn, so the shares lean a little to short ones.
    assert np.allclose(shares, [0.56, 0.28, 0.16], atol=0.04)
    long = task(operation_weights=(0.1, 0, 0, 0, 1))
    assert max(long.train_prompt(i).target["operations"] for i in range(20)) == 5


def test_training_prompts_are_a_function_of_seed_and_index():
    first = [task(seed=3).train_prompt(i) for i in range(20)]
    later = task(seed=3)
    assert [later.train_prompt(i) for i in reversed(range(20))] == first[::-1]
    assert [task(seed=4).train_prompt(i) for i in range(20)] != first
    assert [p.index for p in first] == list(range(20))


def test_validation_prompts_are_held_out_and_the_same_for_every_seed():
    trained = {task().train_prompt(i).messages[0].content for i in range(3000)}
    validated = task().validation_prompts(500)
    assert not trained & {p.messages[0].content for p in validated}
    assert task(seed=1).validation_prompts(5) == task(seed=2).validation_prompts(9)[:5] == validated[:5]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"operation_weights": []}, "operation_weights"),
        ({"operation_weights": [0.0, 0.0]}, "operation_weights"),
        ({"operation_weights": [-1.0, 2.0]}, "operation_weights"),
        ({"operation_weights": 3}, "operation_weights"),
        ({"operation_weights": [1, "x"]}, "operation_weights.1"),
        ({"operand_weights": [1]}, "operand_weights"),
        ({"min_operand": -1}, "min_operand"),
        ({"min_operand": None}, "min_operand"),
        ({"max_operand": 12}, "max_operand"),
        ({"max_operand": 10**6}, "max_operand"),
        ({"max_operand": "hello"}, "max_operand"),
        ({"tool_latency_s": -1.0}, "tool_latency_s"),
        ({"tool_latency_s": [1.0]}, "tool_latency_s"),
        ({"tool_tail_share": 1.5}, "tool_tail_share"),
        ({"tool_tail_factor": 0.5}, "tool_tail_factor"),
        ({"dense_first_layer": "perhaps"}, "dense_first_layer"),
    ],
)
def test_a_bad_option_of_the_task_is_refused_by_field(options, field):
    with pytest.raises(ValueError, match=rf"task\.options\.{field} "):
        calculator_task(options, seed=0)


def test_options_from_a_config_file_build_the_task():
    built = calculator_task({"operation_weights": [1, 1], "max_operand": 30}, seed=0)
    assert built.train_prompt(0) == task(operation_weights=(1, 1), max_operand=30).train_prompt(0)


@pytest.mark.parametrize("target", [{}, {"answer": 8}, {"answer": ""}, {"answer": None}])
def test_a_prompt_without_the_text_of_its_answer_is_refused(target):
    prompt = Prompt(index=0, messages=(Message(role="user", content="3+5="),), target=target)
    with pytest.raises(ValueError, match=r"target\.answer"):
        task().check_prompt(prompt)
    task().check_prompt(replace(prompt, target={"answer": "8"}))


def test_the_vocabulary_has_117_ids_and_digits_are_single_tokens():
    assert len(VOCABULARY) == len(set(VOCABULARY)) == len(TOKENIZER) == 117
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode("1234567890")] == list("1234567890")


@given(st.lists(st.sampled_from(VOCABULARY), max_size=40).map("".join))
def test_text_survives_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_a_saved_tokenizer_is_the_same_one(tmp_path):
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for ids, _ in task().demonstrations(0, 50):
        text = TOKENIZER.decode(ids.tolist())
        assert loaded.encode(text, add_special_tokens=False) == ids.tolist()
        assert loaded.decode(ids.tolist()) == text
    assert (loaded.eos_token, loaded.pad_token, len(loaded)) == (END_OF_TURN, "<|endoftext|>", 117)
    assert loaded.chat_template == TOKENIZER.chat_template


def test_the_first_stop_token_is_the_end_of_a_turn():
    assert [VOCABULARY[i] for i in task().stop_token_ids] == [END_OF_TURN, "<|endoftext|>", "<|im_start|>"]


@pytest.mark.parametrize(
    "expression", ["1-2", "1+2+3", "1/2", "", "1 + 2", "1+2\n", "1234567+1", "-1+2", None, 3, "\u0663+1"]
)
async def test_the_calculator_refuses_all_else_with_a_tool_error(expression):
    with pytest.raises(ToolError):
        await Calculator()({} if expression is None else {"expression": expression})


def test_latencies_of_the_calculator_have_their_mean_and_tail():
    slow = LatencyConfig(mean_s=2.0, tail_share=0.1, tail_factor=20.0)
    one, two = (Calculator(latency=slow, seed=5) for _ in range(2))
    drawn = [one.draw_latency() for _ in range(20_000)]
    assert drawn[:50] == [two.draw_latency() for _ in range(50)]
    assert np.mean(drawn) == pytest.approx(2.0 * (0.9 + 0.1 * 20), rel=0.1)
    assert np.quantile(drawn, 0.99) > 10 * np.median(drawn)


async def test_a_calculator_computes_one_operation_and_takes_its_time_if_it_is_slow():
    assert [await Calculator()({"expression": text}) for text in ("83*96", "7-7")] == ["7968", "0"]
    calculator = Calculator(latency=LatencyConfig(mean_s=30.0), seed=0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await calculator({"expression": "1+1"})


@pytest.mark.parametrize(
    ("turns", "stop_reason", "reward"),
    [
        (("<answer>8</answer>",), StopReason.STOP, 1.0),
        (("<tool_call>x</tool_call>", "<answer>8</answer>"), StopReason.STOP, 1.0),
        (("<answer>9</answer>",), StopReason.STOP, 0.0),
        (("<answer>08</answer>",), StopReason.STOP, 0.0),
        (("<answer>8</answer>!",), StopReason.STOP, 0.0),
        (("<answer>8</answer>",), StopReason.LENGTH, 0.0),
        (("<answer>8</answer>", "<tool_call>x</tool_call>"), StopReason.TOOL_CALL, 0.0),
        ((), StopReason.STOP, 0.0),
    ],
)
async def test_only_the_exact_answer_earns_the_reward(turns, stop_reason, reward):
    prompt = make_prompt(Problem((3, 5), ("+",)), index=0)
    assert await ExactAnswer().score(prompt, completion=Completion(turns=turns, stop_reason=stop_reason)) == reward


def demonstrator(**noise):
    clean = dict.fromkeys(NoiseConfig.__slots__, 0.0)
    return Demonstrator(chat=build_chat(TOKENIZER), tokenizer=TOKENIZER, noise=NoiseConfig(**(clean | noise)))


async def rolled(problem, turns):
    """The trajectory that the agent loop records if the model writes `turns`."""
    written = [TOKENIZER.encode(t + END_OF_TURN, add_special_tokens=False) for t in turns]
    opening = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False)
    engine, limits = FakeEngine(TurnScript(written, opening=opening)), TurnLimits(max_turns=50, max_tokens=2000)
    prompt = make_prompt(problem, index=0)
    return await roll_task(task(), engine, tokenizer=TOKENIZER, limits=limits, prompt=prompt)


@given(problem=problems, seed=st.integers(0, 10_000), noisy=st.booleans())
def test_a_demonstration_equals_the_trajectory_of_the_agent_loop(problem, seed, noisy):
    writer = (
        demonstrator(malformed_call=0.3, wrong_digit=0.3, give_up=0.3, early_answer=0.2) if noisy else demonstrator()
    )
    ids, mask = writer.demonstrate(problem, random.Random(seed))
    turns = [turn for turn, _ in writer.turns(problem, random.Random(seed))]
    trajectory = asyncio.run(rolled(problem, turns))
    assert ids.tolist() == trajectory.token_ids().tolist()
    assert mask.tolist() == loss_mask(trajectory).tolist()
    assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)
    if not noisy:
        assert trajectory.reward == 1.0
        assert trajectory.info["turns"] == len(problem.operators) + 1


def test_demonstrations_depend_on_seed_and_index_and_fit_the_limits():
    whole = task(seed=2).demonstrations(0, 40)
    part = task(seed=2).demonstrations(30, 10)
    assert [ids.tolist() for ids, _ in part] == [ids.tolist() for ids, _ in whole[30:]]
    assert [ids.tolist() for ids, _ in task(seed=3).demonstrations(0, 40)] != [ids.tolist() for ids, _ in whole]
    assert max(len(ids) for ids, _ in task().demonstrations(0, 3000)) <= LIMITS.max_tokens


@pytest.mark.parametrize(
    ("noise", "field"),
    [({"malformed_call": 1.0, "give_up": 0.0}, "malformed_call"), ({"direct_guess": 2}, "direct_guess")],
)
def test_noise_of_a_bad_rate_is_refused_by_field(noise, field):
    with pytest.raises(ValueError, match=rf"demonstrator\.{field}"):
        NoiseConfig(**noise)
