"""Environments: messages and rewards of their steps, exact tokens, and no step twice after a restart."""

import asyncio
import functools
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from agent_loop.chat import Chat
from agent_loop.engine import SamplingConfig
from agent_loop.environment import EnvironmentClass, EnvironmentLoop, Step
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.tools.tool import PauseGate
from async_rl import Task
from message_queue.errors import ChatTemplateError, PromptError, RolloutError, StateLostError
from message_queue.tokens import StopReason
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import CHAT_TEMPLATE, END_OF_TURN, PAD, build_tokenizer
from tests.agent_loop.test_loops import (
    TOKENIZER,
    check_aligned,
    ids,
    make_engine,
    rebuilt,
    recorded,
    sampled_text,
    text_of,
    turn,
)
from tests.helpers.fakes import SPEC, Interruption

PROMPT = Prompt(index=3, messages=(Message(role="user", content="6*7="),), target={"secret": 7, "other": 1})
LIMITS = TurnLimits(max_turns=6, max_tokens=400, tool_timeout_s=2.0)
TURNS = (turn("5"), turn("9"), turn("7"))


def says(text):
    return (Message(role="user", content=text),)


class Guess:
    """Guesses a number. `events` are of all objects."""

    events: list[str]

    def reset(self, secret, prompt):
        self.secret = secret
        self.events.append(f"reset {prompt.index}")
        return (*prompt.messages, *says("a number?"))

    def step(self, text):
        self.events.append(text)
        guess = int(text)
        if guess == self.secret:
            return Step(reward=1.0, done=True)
        return Step(messages=says("less" if guess > self.secret else "more"), reward=0.25)

    def close(self):
        self.events.append("close")


OPENED = "<|im_start|>user\n6*7=<|im_end|>\n<|im_start|>user\na number?<|im_end|>\n<|im_start|>assistant\n"
ANSWERED = len(ids(f"{OPENED}5<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"))


class AsyncGuess(Guess):
    async def step(self, text):
        return super().step(text)

    async def close(self):
        super().close()


def fresh(made=Guess, **members):
    """The class with its own events."""
    return type("Guess", (made,), {"events": [], **members})


def make_loop(made, *turns, limits=LIMITS, gate=None, **options):
    return EnvironmentLoop(
        engine=make_engine(*turns, **options),
        chat=Chat(TOKENIZER, end_of_turn=END_OF_TURN, stop_tokens=(PAD,)),
        environment=EnvironmentClass(made),
        limits=limits,
        sampling=SamplingConfig(),
        gate=gate,
    )


async def roll(loop, trajectory=None):
    trajectory = Trajectory(routing=SPEC) if trajectory is None else trajectory
    await loop.run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")
    check_aligned(trajectory)
    return trajectory


@pytest.mark.parametrize("made", [Guess, AsyncGuess])
async def test_rewards_of_steps_are_summed_and_messages_are_not_trained(made):
    made = fresh(made)
    trajectory = await roll(make_loop(made, *TURNS, interruptions=[None, Interruption(after=1, load=1)]))
    assert text_of(trajectory) == (
        "<|im_start|>user\n6*7=<|im_end|>\n<|im_start|>user\na number?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n9<|im_end|>\n"
        "<|im_start|>user\nless<|im_end|>\n<|im_start|>assistant\n7<|im_end|>"
    )
    assert sampled_text(trajectory) == "".join(TURNS)
    assert (trajectory.reward, trajectory.stop_reason) == (1.5, StopReason.STOP)
    assert trajectory.info == {"turns": 3, "done": 1, "aborts": 1, "refused_answers": 0}
    assert made.events == ["reset 3", "5", "9", "7", "close"]


async def test_a_class_with_step_alone_sees_the_prompt():
    class Echo:
        def step(self, text):
            return Step(messages=says(f"<|im_end|>{text}"), reward=0.5)

    trajectory = await roll(make_loop(Echo, *TURNS, limits=TurnLimits(max_turns=3, max_tokens=400)))
    assert "<|im_start|>user\n<|im_end|>9<|im_end|>\n" in text_of(trajectory)
    count = trajectory.turns[1].observation.tolist().count(TOKENIZER.convert_tokens_to_ids(END_OF_TURN))
    assert count == 1, "a control token in a message stays text"
    assert (trajectory.reward, trajectory.info["done"]) == (1.5, 0)


@pytest.mark.parametrize(
    ("turns", "limits", "stop_reason", "reward", "steps"),
    [
        (TURNS, {"max_turns": 2}, StopReason.LENGTH, 0.5, ["5", "9"]),
        ((turn("5"), "4" * 99), {"max_new_tokens_per_turn": 4}, StopReason.LENGTH, 0.25, ["5"]),
        (TURNS, {"max_tokens": ANSWERED}, StopReason.LENGTH, 0.25, ["5"]),
        ((turn("5"), "9" + PAD), {}, StopReason.STOP, 0.25, ["5", "9" + PAD]),
    ],
    ids=["turns used up", "cut off", "no room", "another stop token"],
)
async def test_a_trajectory_ends_without_the_environment(turns, limits, stop_reason, reward, steps):
    def step(self, text):
        self.events.append(text)
        return Step(messages=says("more"), reward=0.25 if text.isdigit() else 0.0)

    made = fresh(step=step)
    trajectory = await roll(make_loop(made, *turns, limits=TurnLimits(**{"max_turns": 6, "max_tokens": 400, **limits})))
    assert (trajectory.stop_reason, trajectory.reward) == (stop_reason, reward)
    assert made.events[1:-1] == steps and trajectory.info["done"] == 0


async def test_messages_that_cannot_fit_are_not_tokenized(monkeypatch):
    seen = []
    monkeypatch.setattr(
        Chat,
        "_encode_part",
        lambda chat, text, encode=Chat._encode_part, **options: seen.append(len(text)) or encode(chat, text, **options),
    )
    made = fresh(step=lambda self, text: Step(messages=says("more " * 1_000_000), reward=0.25))
    trajectory = await roll(make_loop(made, *TURNS))
    assert (trajectory.stop_reason, trajectory.reward, len(trajectory.turns)) == (StopReason.LENGTH, 0.25, 1)
    assert max(seen) < 10_000


async def test_a_long_opening_is_tokenized_in_a_thread(monkeypatch):
    threads = []
    monkeypatch.setattr(
        Chat,
        "prompt",
        lambda chat, messages, prompt=Chat.prompt: threads.append(threading.current_thread()) or prompt(chat, messages),
    )
    made = fresh(reset=lambda self: says("x " * 20_000))
    with pytest.raises(PromptError, match="leave out the prompt"):
        await roll(make_loop(made, *TURNS))
    await roll(make_loop(fresh(), *TURNS))
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


@pytest.mark.parametrize("repeatable", [True, False])
async def test_a_resumed_rollout_has_its_state_or_is_refused(repeatable):
    records = []
    whole = await recorded(make_loop(fresh(), *TURNS), Trajectory(routing=SPEC), records, prompt=PROMPT)
    for cut in range(len(records)):
        held = rebuilt(records[:cut])
        made = fresh(repeatable=repeatable)
        if not repeatable and len(held.turns) > 1:
            with pytest.raises(StateLostError, match="Guess"):
                await roll(make_loop(made, *TURNS), held)
            assert made.events == []
            continue
        found = await roll(make_loop(made, *TURNS), held)
        assert found.token_ids().tolist() == whole.token_ids().tolist() and found.reward == whole.reward
        assert made.events == ["reset 3", "5", "9", "7", "close"]


@pytest.mark.parametrize(
    "members",
    [
        {"reset": lambda self: says("another opening?")},
        {"step": lambda self, text: Step(messages=says("maybe"))},
        {"step": lambda self, text: Step(messages=says("more"), done=True)},
    ],
    ids=["opening", "message", "end"],
)
async def test_a_class_that_is_not_repeatable_as_it_says_starts_over(members):
    records = []
    await recorded(make_loop(fresh(), *TURNS), Trajectory(routing=SPEC), records, prompt=PROMPT)
    held = rebuilt(records[:3])
    assert len(held.turns) == 2
    with pytest.raises(StateLostError, match="Guess"):
        await roll(make_loop(fresh(repeatable=True, **members), *TURNS), held)


@pytest.mark.parametrize("failing", ["reset", "step", "close"])
async def test_an_error_fails_the_rollout_with_its_line_and_closes(failing, caplog):
    def fails(self, text=""):
        raise KeyError("absent")

    made = fresh(**{failing: fails})
    if failing == "close":
        assert (await roll(make_loop(made, *TURNS))).reward == 1.5
        assert "test_environment.py" in caplog.text
        return
    with pytest.raises(RolloutError, match=f"{failing} of environment Guess.*absent.*test_environment.py"):
        await roll(make_loop(made, *TURNS))
    assert made.events[-1] == "close"


@pytest.mark.parametrize(
    "reward",
    [0.5, np.float32(0.5), np.array(0.5), Decimal("0.5"), torch.tensor(0.5), torch.tensor([0.5]), Fraction(1, 2)],
)
async def test_reward_of_a_step_is_a_number_of_any_library(reward):
    made = fresh(step=lambda self, text: Step(reward=reward, done=True))
    found = (await roll(make_loop(made, *TURNS))).reward
    assert (found, type(found)) == (0.5, float)


@pytest.mark.parametrize(
    "answer", [None, Step(reward=float("nan")), Step(reward=None), Step(reward="0.5"), ("more", 0.0, False)]
)
async def test_an_answer_that_is_no_step_fails_the_rollout(answer):
    with pytest.raises(RolloutError, match="Step"):
        await roll(make_loop(fresh(step=lambda self, text: answer), *TURNS))


async def test_no_step_starts_while_the_gate_is_shut_and_a_cancelled_rollout_is_closed():
    gate, made = PauseGate(), fresh()
    gate.pause()
    rollout = asyncio.create_task(roll(make_loop(made, *TURNS, gate=gate)))
    while not made.events:  # noqa: ASYNC110 - the class has no event for it
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert made.events == ["reset 3", "close"]


def test_a_template_that_cannot_continue_with_a_user_is_refused():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message.content + '<|im_end|>\\n'", "'<|im_end|>\\n'")
    assert tokenizer.chat_template != CHAT_TEMPLATE
    with pytest.raises(ChatTemplateError):
        EnvironmentLoop(
            engine=make_engine(),
            chat=Chat(tokenizer, end_of_turn=END_OF_TURN),
            environment=EnvironmentClass(Guess),
            limits=LIMITS,
            sampling=SamplingConfig(),
        )


def task(**options):
    return Task(**{"prompts": [{"prompt": "q", "secret": 7}], "environment": Guess, **options})


def test_a_task_with_an_environment_builds_its_loop_and_checks_the_columns():
    limits = TurnLimits(max_turns=2, max_tokens=50)
    loop = task().build_loop(
        engine=None, tokenizer=TOKENIZER, sampling=SamplingConfig(), limits=limits, gate=PauseGate()
    )
    assert isinstance(loop, EnvironmentLoop)
    assert task().train_prompt(0).target["secret"] == 7
    with pytest.raises(ValueError, match="secret"):
        task(prompts=["q"]).train_prompt(0)


def test_prompts_of_an_environment_differ_by_their_columns():
    rows = [{"prompt": "q", "secret": secret} for secret in (1, 2, 3)]
    own = task(prompts=rows, validation=[rows[1]])
    assert sorted(own.train_prompt(index).target["secret"] for index in range(2)) == [1, 3]
    assert [note.partition(" are left out")[0] for note in own.notes] == ["1 of 3 rows of prompts"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rewards": lambda completion: 0.0}, "rewards"),
        ({"environment": None}, "rewards is None"),
        ({"tools": [lambda: None]}, "tools"),
        ({"environment": Guess()}, "class"),
        ({"environment": dict}, "step"),
        ({"environment": functools.partial(dict)}, "step"),
    ],
)
def test_a_task_with_an_unusable_environment_is_refused(options, named):
    Guess.events = []
    with pytest.raises(ValueError, match=named):
        task(**options)
