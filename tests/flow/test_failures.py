"""What a failed rollout costs, by policy."""

from collections import Counter
from types import SimpleNamespace

import pytest

from agent_loop.loop import RolloutError
from async_rl.controller.resume import failed_prompts
from async_rl.rollout.prompts import FailedPrompts, PromptSource
from async_rl.rollout.rollouter import FailureConfig
from async_rl.run import causes
from message_queue.tokens import StopReason
from tests.flow.crashes import STEPS, Life
from tests.flow.harness import FakeTrainer, Harness, Prompts
from tests.flow.test_crashes import check, lives_of
from tests.flow.test_pipeline import check_ledger
from tests.helpers.groups import trajectory


class Rewards:
    """Fails the second trajectory of every third group, `times` times."""

    def __init__(self, times):
        self.times, self.asked = times, Counter()

    def __call__(self, session):
        if not session.endswith("-t1") or int(session[1:].split("-")[0]) % 3:
            return None
        self.asked[session] += 1
        return RolloutError("no judge") if self.asked[session] <= self.times else None


async def test_a_reward_that_fails_is_asked_for_again_and_nothing_is_sampled_again(tmp_path):
    rewards = Rewards(times=2)
    harness = Harness(
        tmp_path, reward_fail=rewards, failure=FailureConfig(max_retries=2), trainer=FakeTrainer(step_s=0.01)
    )
    assert await harness.run()
    assert check_ledger(harness)["dropped"] == 0
    trained = {f"g{line['group']}-t1" for line in harness.lines("ledger.jsonl") if line["outcome"] == "trained"}
    asked = [number for session, number in rewards.asked.items() if session in trained]
    assert asked and set(asked) == {3}
    sessions = Counter(request.session for request in harness.replicas[0].requests if not request.existing_rows)
    assert set(sessions.values()) == {1}
    assert any("rollout g0-t1 failed, 2 of 3 times: RolloutError: no judge" in note for note in harness.spy.notes)


async def test_a_group_whose_rollout_failed_for_good_is_dropped_with_the_reason(tmp_path):
    harness = Harness(
        tmp_path, reward_fail=Rewards(times=9), failure=FailureConfig(max_retries=1), trainer=FakeTrainer(step_s=0.01)
    )
    assert await harness.run()
    assert check_ledger(harness)["dropped"] > 0
    reasons = [g["reason"] for g in harness.lines("ledger.jsonl")[:-1] if g["reason"]]
    assert all("no judge" in reason for reason in reasons)


async def test_the_rest_of_a_group_is_trained_without_the_rollout_that_failed(tmp_path):
    life = Life(
        tmp_path,
        reward_fail=Rewards(times=9),
        failure=FailureConfig(max_retries=1, on_failed="rest"),
    )
    harness = life.harness
    assert await harness.run()
    total = check_ledger(harness)
    assert total["dropped"] == 0
    failed = [g for g in life.delivered.values() if any(t.stop_reason is StopReason.ERROR for t in g.trajectories)]
    assert failed and all(g.group % 3 == 0 for g in failed)
    sizes = {len(batch) for batch in harness.trainer.batches}
    assert min(sizes) < 12, "the failed ones were trained"
    assert all(
        len(b) == 12 - sum(g % 3 == 0 for g in groups)
        for b, groups in zip(harness.trainer.batches, life.batches, strict=False)
    )


async def test_a_group_with_one_rollout_left_is_dropped(tmp_path):
    harness = Harness(
        tmp_path,
        reward_fail=lambda session: RolloutError("no judge") if session in ("g1-t1", "g1-t2") else None,
        failure=FailureConfig(on_failed="rest"),
        trainer=FakeTrainer(step_s=0.01),
    )
    assert await harness.run()
    reasons = {g["reason"] for g in harness.lines("ledger.jsonl")[:-1] if g["reason"]}
    assert reasons == {"rollouts failed: 1 of 3 are left"}


class FailsOnce:
    """The given members of every third group fail for good."""

    def __init__(self, *members):
        self.members = members

    def __call__(self, session):
        group, member = session[1:].split("-")
        return RolloutError("no judge") if not int(group) % 3 and member in self.members else None


async def test_a_rollout_that_failed_is_made_up_for_within_its_group(tmp_path):
    life = Life(
        tmp_path,
        reward_fail=FailsOnce("t1"),
        failure=FailureConfig(max_retries=1, on_failed="fill"),
    )
    harness = life.harness
    assert await harness.run()
    total = check_ledger(harness)
    assert (total["dropped"], total["token_error"]) == (0, 0)
    assert {len(batch) for batch in harness.trainer.batches} == {12}, "every batch is whole"
    for group in life.delivered.values():
        failed = [t.stop_reason is StopReason.ERROR for t in group.trajectories]
        assert failed == ([False, True, False, False] if not group.group % 3 else [False] * 3)
    masked = {g["group"]: g["masked_tokens"] for g in harness.lines("ledger.jsonl")[:-1] if g["outcome"] == "trained"}
    assert all(bool(tokens) == (not group % 3) for group, tokens in masked.items()), "what failed took no gradient"
    sessions = {request.session for request in harness.replicas[0].requests + harness.replicas[1].requests}
    assert "g0-t3" in sessions and "g1-t3" not in sessions


@pytest.mark.parametrize(("max_fills", "dropped"), [(1, True), (2, False)])
async def test_a_group_makes_up_for_no_more_than_max_fills_and_is_dropped_then(tmp_path, max_fills, dropped):
    harness = Harness(
        tmp_path,
        reward_fail=FailsOnce("t1", "t2"),
        failure=FailureConfig(on_failed="fill", max_fills=max_fills),
        trainer=FakeTrainer(step_s=0.01),
    )
    assert await harness.run()
    assert check_ledger(harness)["token_error"] == 0
    reasons = [g["reason"] for g in harness.lines("ledger.jsonl")[:-1] if g["reason"]]
    assert bool(reasons) == dropped and all("no judge" in reason for reason in reasons)


async def test_a_group_whose_rollout_failed_just_before_a_kill_is_made_up_for_after_it(tmp_path):
    harness = Harness(tmp_path, failure=FailureConfig(on_failed="fill"))
    admission = await harness.queue.admit(0)
    held = [trajectory(prompt=1) for _ in range(3)]
    held[1].stop_reason = StopReason.ERROR
    group = await harness.rollouter.roll(Prompts().train_prompt(0), admission, held=held)
    assert [t.stop_reason is StopReason.ERROR for t in group.trajectories] == [False, True, False, False]
    assert group.trajectories[3].num_sampled and {r.session for r in harness.replicas[0].requests} == {"g0-t3"}
    harness.recorder.close()


async def test_a_group_that_was_made_up_for_goes_on_after_a_kill(tmp_path):
    options = {
        "reward_fail": FailsOnce("t1"),
        "failure": FailureConfig(on_failed="fill"),
        "mean_length": 30,
        "token_s": 0.001,
    }
    lives = await lives_of(tmp_path, [24, 20], **options)
    assert check(lives)["dropped"] == 0
    grown = [g for life in lives for g, (_, lengths, _) in life.rolled.items() if len(lengths) > 3]
    made_up = [g for life in lives for g in life.delivered.values() if len(g.trajectories) > 3]
    assert made_up and all(len(g.trajectories) == 4 and not g.group % 3 for g in made_up)
    assert all(group % 3 == 0 for group in grown)


@pytest.mark.parametrize(
    ("field", "value"), [("max_retries", -1), ("retry_wait_s", -1.0), ("on_failed", "hope"), ("max_fills", 0)]
)
def test_config_names_what_is_wrong(field, value):
    with pytest.raises(ValueError, match=rf"rollout\.failure\.{field} is '?{value}"):
        FailureConfig(**{field: value})


class Broken:
    """A fault of an agent loop that spares the prompts that `works` is true for."""

    def __init__(self, works):
        self.works = works

    def __call__(self, prompt):
        return None if self.works(prompt) else RolloutError("no tool")


async def stopped_by_failures(life):
    """Run until `max_failed_groups` stops it; prompts of the groups that were dropped."""
    with pytest.raises(ExceptionGroup) as caught:
        await life.harness.run()
    assert "max_failed_groups" in next(causes(caught.value))
    check_ledger(life.harness)
    dropped = {g["group"] for g in life.harness.lines("ledger.jsonl")[:-1] if g["outcome"] == "dropped"}
    return {prompt for group, (prompt, _, _) in life.rolled.items() if group in dropped}


def trained_prompts(lives):
    """Prompt of each group that was trained."""
    prompts = {group: prompt for life in lives for group, (prompt, _, _) in life.rolled.items()}
    return [prompts[g["group"]] for g in lives[-1].harness.lines("ledger.jsonl")[:-1] if g["outcome"] == "trained"]


@pytest.mark.parametrize("failing_from", [0, 10])
async def test_prompts_of_failed_groups_are_admitted_again_after_the_stop(tmp_path, failing_from):
    first = Life(tmp_path, loop_fail=Broken(lambda prompt: prompt.index < failing_from))
    dropped = await stopped_by_failures(first)
    in_a_row = set(FailedPrompts(tmp_path / "failed_prompts.json").prompts)
    assert len(in_a_row) >= 4 and in_a_row == (dropped if not failing_from else in_a_row & dropped)

    second = Life(tmp_path)
    assert await second.harness.run()
    assert check_ledger(second.harness)["trained"] == STEPS * 4
    trained = trained_prompts([first, second])
    assert in_a_row <= set(trained) and len(trained) == len(set(trained)), "each is trained, and once"
    assert set(range(max(in_a_row))) <= set(trained) | dropped, "no prompt is skipped"
    assert not (tmp_path / "failed_prompts.json").exists()


async def test_prompts_that_fail_at_every_start_are_admitted_until_they_work(tmp_path):
    lives = []
    for works in (lambda prompt: False, lambda prompt: False, lambda prompt: True):
        lives.append(Life(tmp_path, loop_fail=Broken(works)))
        if len(lives) < 3:
            await stopped_by_failures(lives[-1])
    assert await lives[-1].harness.run()
    check_ledger(lives[-1].harness)
    trained = trained_prompts(lives)
    assert set(range(8)) <= set(trained) and len(trained) == len(set(trained))


async def test_prompts_of_single_failures_are_not_admitted_again(tmp_path):
    life = Life(tmp_path, loop_fail=Broken(lambda prompt: prompt.index % 3), max_failed_groups=99)
    assert await life.harness.run()
    assert check_ledger(life.harness)["dropped"] and not (tmp_path / "failed_prompts.json").exists()


def test_failed_prompts_outlive_a_kill_before_and_after_their_admission(tmp_path):
    path = tmp_path / "failed.json"
    FailedPrompts(path).add([5, 2])
    source = PromptSource(Prompts(), cursor=7, failed=FailedPrompts(path))
    assert source.current().index == 2 and FailedPrompts(path).prompts == [2, 5]
    source.advance()
    assert source.current().index == 5 and FailedPrompts(path).prompts == [5]
    restored = SimpleNamespace(open=[SimpleNamespace(prompt=5)], prompt_cursor=7)
    FailedPrompts(path).add([9])
    (tmp_path / "failed_prompts.json").write_bytes(path.read_bytes())
    assert failed_prompts(tmp_path, restored).prompts == [], "5 is in a group, and the cursor comes to 9"
