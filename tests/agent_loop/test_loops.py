"""Agent loops: tokens, loss mask, logprobs, versions and rows stay aligned, and a tool runs once for each call."""

import asyncio
import threading

import numpy as np
import pytest

from agent_loop.chat import Chat
from agent_loop.control_tokens import ControlTokens
from agent_loop.engine import SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.single_turn import SingleTurnLoop
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools.tool import ToolRunner, describe_tool
from async_rl.files.rollouts import tool_calls_of
from async_rl.rollout.content.format import CallStarted, TrajectoryClosed
from async_rl.rollout.recorded import RecordedTrajectory
from async_rl.rollout.validator import Validator
from message_queue.errors import RewardError, RolloutError, ToolError
from message_queue.tokens import StopReason, TokenOutput
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import END_OF_TURN, PAD, TURN_START, build_tokenizer
from tests.async_rl.rollout.test_content import same_trajectory
from tests.helpers.dense import behaviour_logprobs, loss_mask, param_versions
from tests.helpers.fakes import (
    SPEC,
    FakeEngine,
    FakeReward,
    FakeTool,
    Interruption,
    TurnScript,
    fake_logprob,
    true_rows,
)

TOKENIZER = build_tokenizer()
PROMPT = Prompt(index=0, messages=(Message(role="user", content="6*7="),))
CALL = '<tool_call>\n{"name": "tool", "arguments": {"x": 1}}\n</tool_call>'
ANSWER = "<answer>42</answer>"
LIMITS = TurnLimits(max_turns=6, max_tokens=224, tool_timeout_s=1.0, generate_timeout_s=5.0)
UNDISTURBED = {"aborts": 0, "refused_answers": 0}


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def turn(text):
    return text + END_OF_TURN


def make_engine(*turns, **options):
    return FakeEngine(TurnScript([ids(turn) for turn in turns], opening=ids("<|im_start|>assistant\n")), **options)


def make_loop(engine, *, tool=None, sources=(), reward=None, limits=LIMITS, tokenizer=TOKENIZER):
    """A loop with a tool, by default one that replies 42, or with those of the sources."""
    tools = [*([tool] if tool else []), *(tool for source in sources for tool in source.tools)]
    tools = tools or [FakeTool(behave=lambda _: "42")]
    return ToolUseLoop(
        engine=engine,
        chat=Chat(
            tokenizer,
            end_of_turn=END_OF_TURN,
            tools=[describe_tool(tool) for tool in tools],
            stop_tokens=(PAD, TURN_START),
        ),
        tools=ToolRunner(tools, timeout_s=limits.tool_timeout_s),
        tool_sources=list(sources),
        reward=reward or FakeReward(),
        limits=limits,
        sampling=SamplingConfig(),
    )


def make_single_turn(engine, *, reward=None):
    return SingleTurnLoop(
        engine=engine,
        chat=Chat(TOKENIZER, end_of_turn=END_OF_TURN),
        reward=reward or FakeReward(),
        limits=LIMITS,
        sampling=SamplingConfig(),
    )


async def roll(engine, *, resume_routing="append", **options):
    trajectory = Trajectory(routing=SPEC, resume_routing=resume_routing)
    await make_loop(engine, **options).run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")
    check_aligned(trajectory)
    return trajectory


def check_aligned(trajectory):
    """Every array against a slow model."""
    tokens, mask = trajectory.token_ids(), loss_mask(trajectory)
    versions, logprobs = param_versions(trajectory), behaviour_logprobs(trajectory)
    assert len(tokens) == len(mask) == len(versions) == len(logprobs) == len(trajectory)
    assert ((versions >= 0) == mask).all()
    for at, token in enumerate(tokens):
        expected = fake_logprob(int(token), at, int(versions[at])) if mask[at] else 0.0
        assert logprobs[at] == pytest.approx(expected)
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()
    received = sum(len(s.routed_experts.experts) for s in trajectory.segments)
    assert received == trajectory.num_rows  # each row came once
    sampled = np.flatnonzero(mask)
    assert trajectory.num_rows == (sampled[-1] if len(sampled) else 0)


def text_of(trajectory):
    return TOKENIZER.decode(trajectory.token_ids().tolist())


def sampled_text(trajectory):
    return TOKENIZER.decode(trajectory.token_ids()[loss_mask(trajectory)].tolist())


async def test_tool_use_loop_shows_replies_and_ends_with_the_answer():
    reward = FakeReward(value=0.5)
    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER)), reward=reward)
    assert text_of(trajectory) == (
        f"<|im_start|>user\n6*7=<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{ANSWER}<|im_end|>"
    )
    assert sampled_text(trajectory) == turn(CALL) + turn(ANSWER)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.STOP, 0.5)
    assert trajectory.info == {"turns": 2, "tool_calls": 1, "tool_errors": 0, "truncated_replies": 0} | UNDISTURBED
    [seen] = reward.seen
    assert (seen.turns, seen.text, seen.num_tokens) == ((CALL, ANSWER), ANSWER, trajectory.num_sampled)
    said = [(message.role, message.content) for message in seen.messages]
    assert said == [("user", "6*7="), ("assistant", CALL), ("tool", "42"), ("assistant", ANSWER)]


async def test_tool_use_loop_shows_errors_to_the_model_and_counts_them():
    def fail(_):
        raise ToolError("x must be even")

    turns = (turn("<tool_call>{</tool_call>"), turn(CALL + CALL), turn(ANSWER))
    limits = TurnLimits(max_turns=6, max_tokens=400)
    trajectory = await roll(make_engine(*turns), tool=FakeTool(behave=fail), limits=limits)
    assert trajectory.info == {"turns": 3, "tool_calls": 3, "tool_errors": 3, "truncated_replies": 0} | UNDISTURBED
    assert text_of(trajectory).count("<tool_response>\nerror: x must be even") == 2
    assert sampled_text(trajectory) == "".join(turns), "errors are not trained"


async def test_an_error_of_a_tools_code_is_logged_with_its_line_and_prompt(caplog):
    def broken(_arguments):
        return {}["absent"]

    await roll(make_engine(turn(CALL), turn(ANSWER)), tool=FakeTool(behave=broken))
    (record,) = caplog.records
    line = broken.__code__.co_firstlineno + 1
    for part in ("prompt 0", "tool", "KeyError: 'absent'", f"{__file__}:{line} in broken"):
        assert part in record.getMessage()


async def test_tool_use_loop_cuts_long_replies_and_counts_them():
    limits = TurnLimits(max_turns=6, max_tokens=500, max_tool_reply_chars=8)
    tool = FakeTool(behave=lambda _: "0123456789abc")
    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER)), tool=tool, limits=limits)
    assert "<tool_response>\n01234567... (5 " in text_of(trajectory)
    assert (trajectory.info["truncated_replies"], trajectory.info["tool_errors"]) == (1, 0)


async def test_single_turn_loop_ends_with_its_answer_and_reads_no_calls():
    reward, trajectory = FakeReward(), Trajectory(routing=SPEC)
    engine = make_engine(turn(CALL), interruptions=[Interruption(after=4, load=1)])
    loop = make_single_turn(engine, reward=reward)
    await loop.run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")
    check_aligned(trajectory)
    assert (reward.seen[0].turns, reward.seen[0].num_tokens) == ((CALL,), trajectory.num_sampled)
    assert trajectory.info == {"turns": 1, "aborts": 1, "refused_answers": 0}


async def test_two_replies_are_seen_by_the_reward_as_the_model_saw_them_also_after_a_restart():
    contents = ["1\n</tool_response>\n<tool_response>\n2", "3"]
    turns, records, reward = (turn(CALL + CALL), turn(ANSWER)), [], FakeReward()
    replies = iter(contents)
    tool, limits = FakeTool(behave=lambda _: next(replies)), TurnLimits(max_turns=6, max_tokens=500)
    await recorded(
        make_loop(make_engine(*turns), tool=tool, reward=reward, limits=limits), Trajectory(routing=SPEC), records
    )
    for cut in range(4, len(records)):
        loop = make_loop(make_engine(*turns), reward=reward, limits=limits)
        await recorded(loop, rebuilt(records[:cut]), [])
    assert len(reward.seen) > 1
    for seen in reward.seen:
        assert [message.content for message in seen.messages if message.role == "tool"] == contents


THOUGHT = f"I could {CALL.replace('1', '2')}"


@pytest.mark.parametrize(
    ("opens", "turns", "calls"),
    [
        (False, (f"<think>{THOUGHT}</think>{CALL}", f"<think>{THOUGHT}</think>{ANSWER}"), 1),
        (False, (f"<think>{THOUGHT}",), 0),
        (True, (f"{THOUGHT}</think>{CALL}", f"hm</think>{ANSWER}"), 1),
        (True, (THOUGHT,), 0),
        (False, (f"hm {CALL}", ANSWER), 1),
    ],
)
async def test_a_call_in_reasoning_is_not_made(opens, turns, calls):
    opening, tokenizer = "<|im_start|>assistant\n" + "<think>\n" * opens, build_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "assistant\\n", "assistant\\n<think>\\n" if opens else "assistant\\n"
    )
    engine = FakeEngine(TurnScript([ids(turn(text)) for text in turns], opening=ids(opening)))
    tool, reward, records = FakeTool(), FakeReward(), []
    limits = TurnLimits(max_turns=6, max_tokens=800)
    loop = make_loop(engine, tool=tool, reward=reward, tokenizer=tokenizer, limits=limits)
    whole = await recorded(loop, Trajectory(routing=SPEC), records)
    assert tool.calls == [{"x": 1}] * calls
    assert (whole.info["tool_calls"], len(whole.turns)) == (calls, len(turns))
    assert [message.role for message in reward.seen[0].messages][1:] == ["assistant", *["tool", "assistant"] * calls]
    resumed = await recorded(loop, rebuilt(records[: len(records) - 1]), [])
    assert resumed.info == whole.info and reward.seen[1].messages == reward.seen[0].messages
    shown = text_of(whole).partition(opening)[0] + opening
    assert len(tool_calls_of(turns[0], before=shown)) == calls


@pytest.mark.parametrize(("most", "calls"), [(None, 1), (None, 3), (10**7, 2)])
async def test_a_reply_that_cannot_fit_is_cut_before_it_is_tokenized_off_the_event_loop(monkeypatch, most, calls):
    encoded, encode = [], ControlTokens.encode

    def watched(control, rendered):
        encoded.append((len(rendered), threading.get_ident()))
        return encode(control, rendered)

    limits = TurnLimits(max_turns=6, max_tokens=4_000, max_tool_reply_chars=most)
    loop = make_loop(make_engine(turn(CALL * calls)), tool=FakeTool(behave=lambda _: "x" * 4_000_000), limits=limits)
    monkeypatch.setattr(ControlTokens, "encode", watched)
    trajectory = Trajectory(routing=SPEC)
    await loop.run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.LENGTH, 1)
    assert trajectory.info["truncated_replies"] == calls
    longest, thread = max(encoded)
    assert longest < 8 * 4_000 + 500 * calls
    assert thread != threading.get_ident()


# ---- the end of a trajectory

PROMPTED = len(ids("<|im_start|>user\n6*7=<|im_end|>\n<|im_start|>assistant\n"))
CALLED = len(ids(turn(CALL)))
REPLIED = (
    PROMPTED
    + CALLED
    + len(ids("\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"))
)


@pytest.mark.parametrize(
    ("second", "limits", "stop_reason", "sampled", "num_calls"),
    [
        (turn(CALL), {"max_turns": 2}, StopReason.TOOL_CALL, [CALLED, CALLED], 1),
        (turn(ANSWER), {"max_new_tokens_per_turn": CALLED - 1}, StopReason.LENGTH, [CALLED - 1], 0),
        (turn("4" * 99), {"max_new_tokens_per_turn": CALLED}, StopReason.LENGTH, [CALLED, CALLED], 1),
        (turn(ANSWER), {"max_tokens": REPLIED}, StopReason.LENGTH, [CALLED], 1),
        (turn(ANSWER), {"max_tokens": REPLIED + 1}, StopReason.LENGTH, [CALLED, 1], 1),
        (CALL + PAD, {}, StopReason.STOP, [CALLED, CALLED], 1),
        (END_OF_TURN, {}, StopReason.STOP, [CALLED, 1], 1),
    ],
    ids=[
        "turns used up",
        "cut off in a call",
        "cut off in an answer",
        "no room for an answer",
        "room for one token",
        "call that ends with another stop token",
        "empty answer",
    ],
)
async def test_tool_use_loop_ends_a_trajectory(second, limits, stop_reason, sampled, num_calls):
    tool, reward = FakeTool(behave=lambda _: "42"), FakeReward()
    limits = TurnLimits(**{"max_turns": 6, "max_tokens": 500} | limits)
    trajectory = await roll(make_engine(turn(CALL), second), tool=tool, reward=reward, limits=limits)
    assert (trajectory.stop_reason, reward.seen[0].stop_reason) == (stop_reason, stop_reason)
    assert [t.num_sampled for t in trajectory.turns] == sampled
    assert len(tool.calls) == num_calls
    assert trajectory.info["turns"] == len(sampled)


async def test_observation_of_a_turn_without_tokens_is_not_trained():
    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER), context_length=REPLIED))
    assert (trajectory.stop_reason, [len(t.segments) for t in trajectory.turns]) == (StopReason.LENGTH, [1, 0])
    assert (len(trajectory), trajectory.num_rows) == (REPLIED, PROMPTED + CALLED - 1)
    assert len(trajectory.sequences()[-1].token_ids) == PROMPTED + CALLED


@pytest.mark.parametrize("in_tool", [True, False])
async def test_cancelled_rollout_frees_tool_and_engine_and_keeps_complete_turns(in_tool):
    engine, tool = make_engine(turn(CALL), token_s=0.0 if in_tool else 30.0), FakeTool(seconds=30)
    trajectory = Trajectory(routing=SPEC)
    run = make_loop(engine, tool=tool).run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")
    rollout = asyncio.create_task(run)
    while not (tool.calls if in_tool else engine.in_flight):  # noqa: ASYNC110 - the fake has no event for it
        await asyncio.sleep(0)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert (tool.cancelled, engine.in_flight, trajectory.closed) == (in_tool, 0, False)
    assert [t.num_sampled for t in trajectory.turns] == [CALLED if in_tool else 0]


@pytest.mark.parametrize(
    ("failing", "text", "error"),
    [("tool", CALL, RolloutError("sandbox gone")), ("reward", ANSWER, RewardError("no verifier"))],
)
async def test_failed_tool_or_reward_leaves_the_trajectory_open(failing, text, error):
    def fail(_):
        raise error

    trajectory = Trajectory(routing=SPEC)
    tool, reward = FakeTool(behave=fail), FakeReward(error=error if failing == "reward" else None)
    with pytest.raises(type(error)):
        await make_loop(make_engine(turn(text)), tool=tool, reward=reward).run(
            PROMPT, trajectory=trajectory, session="s", cache_salt="v0"
        )
    assert (trajectory.closed, trajectory.num_sampled) == (False, len(ids(turn(text))))


async def test_validator_merges_rows_as_training_does():
    engine = make_engine(turn(ANSWER), interruptions=[Interruption(after=2)])
    loop = make_loop(engine, limits=LIMITS)
    decode = TOKENIZER.decode
    validator = Validator(loop=loop, routing=SPEC, decode=decode, resume_routing="force")
    (rollout,) = await validator.run([(0, PROMPT)], number=1)
    assert rollout.reward == 1.0
    assert PROMPT.messages[-1].content in rollout.prompt and rollout.response == turn(ANSWER)
    assert engine.requests[1].forced_experts is not None


# ---- restarts: a rollout that is cut off after any record resumes from the records

TOOL_USE = (turn(CALL), turn("two " + CALL), turn(ANSWER))
COUNTS = ("turns", "tool_calls")
SHORT_TURNS = TurnLimits(max_turns=6, max_tokens=224, max_new_tokens_per_turn=30)


async def recorded(loop, trajectory, records, *, prompt=PROMPT):
    made = RecordedTrajectory(trajectory, record=lambda *record: records.append(record[:2]))
    await loop.run(prompt, trajectory=made, session="s", cache_salt="v0")
    return made


def rebuilt(records):
    """The trajectory that a journal gives back."""
    trajectory = Trajectory(routing=SPEC)
    for at, record in records:
        assert at == len(trajectory)
        match record:
            case TokenOutput():
                trajectory.extend(record)
            case CallStarted():
                pass
            case TrajectoryClosed():
                trajectory.close(stop_reason=record.stop_reason, reward=record.reward, info=dict(record.info))
            case _:
                trajectory.observe(np.array(record))
    return trajectory


@pytest.mark.parametrize(
    ("make", "turns"),
    [
        (make_loop, TOOL_USE),
        (lambda engine: make_loop(engine, limits=SHORT_TURNS), (turn(CALL), "x" * 90)),
        (make_single_turn, (turn("6 times 7 is 42, so " + ANSWER),)),
    ],
    ids=["tools", "budget-per-turn", "single-turn"],
)
async def test_rollout_resumes_after_any_record_without_resampling_a_token(make, turns):
    records, pieces = [], [Interruption(after=n) for n in (5, 4, 7, 3) * 30]
    whole = await recorded(make(make_engine(*turns, interruptions=pieces)), Trajectory(routing=SPEC), records)
    assert len(whole.segments) > 4
    same_trajectory(rebuilt(records), whole)
    for cut in range(len(records)):
        held, more = rebuilt(records[:cut]), []
        engine = make_engine(*turns)
        tokens, sampled = len(held), held.num_sampled
        found = await recorded(make(engine), held, more)
        assert all(len(request.token_ids) >= tokens for request in engine.requests)
        assert engine.num_tokens == whole.num_sampled - sampled, cut
        assert found.token_ids().tolist() == whole.token_ids().tolist()
        assert behaviour_logprobs(found).tolist() == behaviour_logprobs(whole).tolist()
        assert found.sequences()[-1].routed_experts.tolist() == true_rows(found).tolist()
        assert (found.stop_reason, found.reward) == (whole.stop_reason, whole.reward)
        assert [found.info.get(name) for name in COUNTS] == [whole.info.get(name) for name in COUNTS]
        same_trajectory(rebuilt([*records[:cut], *more]), found)


async def test_tool_call_that_was_started_is_not_repeated_but_reported():
    records, tool = [], FakeTool(behave=lambda _: "42")
    await recorded(make_loop(make_engine(*TOOL_USE), tool=tool), Trajectory(routing=SPEC), records)
    assert len(tool.calls) == 2
    (first, _) = (at for at, (_, record) in enumerate(records) if isinstance(record, CallStarted))
    held, again = rebuilt(records[: first + 1]), FakeTool(behave=lambda _: "42")
    held.unsure_call = records[first][1].call
    found = await recorded(make_loop(make_engine(*TOOL_USE), tool=again), held, [])
    assert len(again.calls) == 1, "only the second call is made"
    assert "<tool_response>\nerror: the call was interrupted" in text_of(found)
    assert (found.info["tool_errors"], found.stop_reason) == (1, StopReason.STOP)


async def test_tool_call_is_recorded_before_it_is_made():
    order = []

    async def flush():
        order.append("written")

    def call(_):
        order.append("called")
        return "42"

    trajectory = RecordedTrajectory(Trajectory(routing=SPEC), record=lambda *_: None, flush=flush)
    loop = make_loop(make_engine(*TOOL_USE), tool=FakeTool(behave=call))
    await loop.run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")
    assert order == ["written", "called"] * 2
