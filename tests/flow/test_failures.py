"""Costs of a failed rollout, by policy."""

from collections import Counter
from types import SimpleNamespace

import pytest

from async_rl.controller.resume import failed_prompts
from async_rl.files.rollouts import FOLDER, read_failed
from async_rl.rollout.prompts import FailedPrompts, PromptSource
from async_rl.rollout.rollouter import FailureConfig
from async_rl.run import causes
from message_queue.errors import PromptError, RolloutError
from message_queue.tokens import StopReason
from tests.flow.crashes import STEPS, Life
from tests.flow.harness import FakeTrainer, Harness, prompt_at
from tests.flow.test_crashes import trained_prompts
from tests.helpers.groups import trajectory


class Rewards:
    """Fails the given members of every third group, `times` times."""

    def __init__(self, *members, times=99):
        self.members, self.times, self.asked = members, times, Counter()

    def __call__(self, session):
        group, member = session[1:].split("-")
        if int(group) % 3 or member not in self.members:
            return None
        self.asked[session] += 1
        return RolloutError("no judge") if self.asked[session] <= self.times else None


@pytest.mark.parametrize("max_retries", [1, 2])
async def test_failed_reward_is_retried_without_resampling(tmp_path, max_retries):
    rewards = Rewards("t1", times=2)
    harness = Harness(
        tmp_path,
        reward_fail=rewards,
        failure=FailureConfig(max_retries=max_retries),
        trainer=FakeTrainer(step_s=0.01),
        max_failed_groups=99,
        on_update="drain",  # a request that an update aborts before its first token is resent
    )
    assert await harness.run()
    trained = {f"g{line['group']}-t1" for line in harness.groups("trained")}
    tries = {number for session, number in rewards.asked.items() if session in trained}
    if max_retries == 2:
        assert harness.check_ledger()["dropped"] == 0 and tries == {3}
        assert not list(read_failed(tmp_path / FOLDER))
    else:
        assert harness.check_ledger()["dropped"] > 0 and not tries
    assert all("no judge" in line["reason"] for line in harness.groups("dropped"))
    sessions = Counter(request.session for request in harness.replicas[0].requests if not request.existing_rows)
    assert set(sessions.values()) == {1}
    assert any("g0-t1" in note and "no judge" in note for note in harness.spy.notes)


@pytest.mark.parametrize("on_failed", ["drop", "rest"])
async def test_a_failed_rollout_is_recorded_with_its_text_and_its_error(tmp_path, on_failed):
    harness = Harness(
        tmp_path,
        reward_fail=Rewards("t1", times=2),
        failure=FailureConfig(max_retries=1, on_failed=on_failed),
        trainer=FakeTrainer(step_s=0.01),
        max_failed_groups=99,  # how many fail in a row depends on the machine
    )
    assert await harness.run()
    failed = [rollout for _, rollout in read_failed(tmp_path / FOLDER)]
    groups = {line["group"] for line in harness.groups("dropped" if on_failed == "drop" else "trained")}
    assert {rollout.group for rollout in failed} >= {group for group in groups if not group % 3} and failed
    for rollout in failed:
        assert (rollout.group % 3, rollout.trajectory) == (0, 1) and rollout.prompt_index == rollout.group
        assert rollout.error == "RolloutError: no judge"
        (said,) = rollout.turns
        assert rollout.prompt.split()[0] == str(2 + rollout.prompt_index % 30) and len(rollout.prompt.split()) == 2
        assert len(f"{rollout.prompt} {said['text']}".split()) == rollout.tokens and said["reply"] == ""


async def test_rest_of_a_group_is_trained_without_the_failed_rollout(tmp_path):
    failure = FailureConfig(max_retries=1, on_failed="rest")
    life = Life(tmp_path, reward_fail=Rewards("t1"), failure=failure)
    assert await life.harness.run()
    assert life.harness.check_ledger()["dropped"] == 0
    failed = [g for g in life.delivered.values() if any(t.stop_reason is StopReason.ERROR for t in g.trajectories)]
    assert failed and all(g.group % 3 == 0 for g in failed)
    sizes = [len(batch) for batch in life.harness.trainer.batches]
    assert min(sizes) < 12, "the failed ones were trained"
    assert sizes == [12 - sum(g % 3 == 0 for g in groups) for groups in life.batches[: len(sizes)]]


async def test_group_with_one_rollout_left_is_dropped(tmp_path):
    harness = Harness(
        tmp_path,
        reward_fail=lambda session: RolloutError("no judge") if session in ("g1-t1", "g1-t2") else None,
        failure=FailureConfig(on_failed="rest"),
        trainer=FakeTrainer(step_s=0.01),
    )
    assert await harness.run()
    assert [line["group"] for line in harness.groups("dropped")] == [1]


def failures_of(group):
    return [t.stop_reason is StopReason.ERROR for t in group.trajectories]


async def test_fill_replaces_a_failed_rollout_within_its_group(tmp_path):
    failure = FailureConfig(max_retries=1, on_failed="fill")
    life = Life(tmp_path, reward_fail=Rewards("t1"), failure=failure)
    harness = life.harness
    assert await harness.run()
    assert harness.check_ledger()["dropped"] == 0
    assert {len(batch) for batch in harness.trainer.batches} == {12}, "every batch is complete"
    for group in life.delivered.values():
        assert failures_of(group) == ([False] * 3 if group.group % 3 else [False, True, False, False])
    for line in harness.groups("trained"):
        assert bool(line["masked_tokens"]) == (not line["group"] % 3), "failed rollouts take no gradient"
    sessions = {request.session for replica in harness.replicas for request in replica.requests}
    assert "g0-t3" in sessions and "g1-t3" not in sessions


@pytest.mark.parametrize(("max_fills", "dropped"), [(1, True), (2, False)])
async def test_fill_replaces_no_more_than_max_fills_rollouts(tmp_path, max_fills, dropped):
    harness = Harness(
        tmp_path,
        reward_fail=Rewards("t1", "t2"),
        failure=FailureConfig(on_failed="fill", max_fills=max_fills),
        trainer=FakeTrainer(step_s=0.01),
        max_failed_groups=99,
    )
    assert await harness.run()
    assert bool(harness.check_ledger()["dropped"]) == dropped
    assert all("no judge" in line["reason"] for line in harness.groups("dropped"))


@pytest.mark.parametrize("damaged", [False, True])
async def test_fill_continues_with_what_was_stored_before_a_kill(tmp_path, damaged):
    """A replaced rollout whose end is damaged stays failed."""
    harness = Harness(tmp_path, failure=FailureConfig(on_failed="fill"))
    admission = await harness.queue.admit(0)
    held = [trajectory(prompt=1) for _ in range(4 if damaged else 3)]
    held[1].stop_reason = None if damaged else StopReason.ERROR
    held[1].reward = None
    group = await harness.rollouter.roll(prompt_at(0), admission, existing=held)
    assert failures_of(group) == [False, True, False, False]
    if not damaged:
        assert group.trajectories[3].num_sampled and {r.session for r in harness.replicas[0].requests} == {"g0-t3"}
    harness.recorder.close()


class Broken:
    """A reward with a mistake, in the groups for whose number `fails` is true."""

    def __init__(self, fails=lambda group: True):
        self.fails, self.asked = fails, Counter()

    def __call__(self, session):
        group = int(session[1:].split("-")[0])
        if not self.fails(group):
            return None
        self.asked[group, session] += 1
        try:
            return len(3)
        except TypeError as error:
            return error

    def tries(self, group):
        return max(count for (of, _), count in self.asked.items() if of == group)


async def test_an_error_of_code_in_every_rollout_ends_the_run_with_its_line(tmp_path):
    harness = Harness(tmp_path, reward_fail=Broken())
    with pytest.raises(ExceptionGroup) as caught:
        await harness.run()
    (cause,) = causes(caught.value)
    for part in ("rollout failed: prompt ", "TypeError: object of type 'int' has no len()", "test_failures.py:"):
        assert part in cause
    dropped = [note for note in harness.spy.notes if note.startswith("group")]
    assert len(dropped) == 1, "one warning for one error"


async def test_an_error_of_code_is_retried_only_if_a_rollout_succeeded_since(tmp_path):
    reward = Broken(fails=lambda group: group != 2)
    harness = Harness(tmp_path, reward_fail=reward, failure=FailureConfig(max_retries=2))
    for group in range(4):
        admission = await harness.queue.admit(group)
        await harness.rollouter.roll(prompt_at(group), admission)
    assert [reward.tries(group) for group in (0, 1, 3)] == [3, 1, 3]
    harness.recorder.close()


async def test_a_prompt_that_does_not_fit_is_not_retried(tmp_path):
    tried = Counter()

    def too_long(prompt):
        tried[prompt.index] += 1
        return PromptError(f"prompt {prompt.index} has 99 tokens") if prompt.index == 1 else None

    harness = Harness(
        tmp_path, loop_fail=too_long, failure=FailureConfig(max_retries=5), trainer=FakeTrainer(step_s=0.01)
    )
    assert await harness.run()
    assert tried[1] <= 3 and any("prompt 1 has 99 tokens" in note for note in harness.spy.notes)


@pytest.mark.parametrize(
    ("field", "value"), [("max_retries", -1), ("retry_wait_s", -1.0), ("on_failed", "hope"), ("max_fills", 0)]
)
def test_failure_config_refuses_values_out_of_range(field, value):
    with pytest.raises(ValueError, match=rf"rollout\.failure\.{field}"):
        FailureConfig(**{field: value})


def works_for(works):
    """A fault of an agent loop that spares the prompts that `works` is true for."""
    return lambda prompt: None if works(prompt.index) else RolloutError("no tool")


async def stopped_by_failures(life):
    """Run until `max_failed_groups` stops it; prompts of the groups that were dropped."""
    with pytest.raises(ExceptionGroup) as caught:
        await life.harness.run()
    assert "max_failed_groups" in next(causes(caught.value))
    life.harness.check_ledger()
    return {life.rolled[line["group"]][0] for line in life.harness.groups("dropped")}


@pytest.mark.parametrize("failing_from", [0, 10])
async def test_prompts_of_failed_groups_are_readmitted_after_the_stop(tmp_path, failing_from):
    first = Life(tmp_path, loop_fail=works_for(lambda prompt: prompt < failing_from))
    dropped = await stopped_by_failures(first)
    in_a_row = set(FailedPrompts(tmp_path / "failed_prompts.json").prompts)
    assert len(in_a_row) >= 4 and min(in_a_row) >= failing_from
    assert failing_from or in_a_row >= dropped

    second = Life(tmp_path)
    assert await second.harness.run()
    assert second.harness.check_ledger()["trained"] == STEPS * 4
    trained = trained_prompts([first, second])
    assert in_a_row <= set(trained) and len(trained) == len(set(trained)), "each is trained, and once"
    assert set(range(max(in_a_row))) <= set(trained) | dropped, "no prompt is skipped"
    assert not (tmp_path / "failed_prompts.json").exists()


async def test_prompts_of_single_failures_are_not_readmitted(tmp_path):
    life = Life(tmp_path, loop_fail=works_for(lambda prompt: prompt % 3), max_failed_groups=99)
    assert await life.harness.run()
    assert life.harness.check_ledger()["dropped"] and not (tmp_path / "failed_prompts.json").exists()


def test_failed_prompts_survive_a_kill_before_and_after_admission(tmp_path):
    path = tmp_path / "failed.json"
    FailedPrompts(path).add([5, 2])
    source = PromptSource(prompt_at, cursor=7, failed=FailedPrompts(path))
    assert source.current().index == 2 and FailedPrompts(path).prompts == [2, 5]
    source.advance()
    assert source.current().index == 5 and FailedPrompts(path).prompts == [5]
    restored = SimpleNamespace(open=[SimpleNamespace(prompt=5)], prompt_cursor=7)
    FailedPrompts(path).add([9])
    (tmp_path / "failed_prompts.json").write_bytes(path.read_bytes())
    assert failed_prompts(tmp_path, restored).prompts == [], "5 is in a group, and the cursor comes to 9"
