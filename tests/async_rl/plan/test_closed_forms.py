"""The planner against formulas, within 5 %."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.plan import simulation
from async_rl.plan.description import Cluster, Description, Distribution, Interruptions, Publish, Rates, Workload
from async_rl.plan.planner import make_plan, s_max
from async_rl.plan.simulation import simulate, simulate_synchronous
from message_queue.policies import StalenessConfig

CLOSE = 0.05


def describe(
    *,
    bound=1,
    policy="wait",
    lengths=None,
    groups=8,
    group=4,
    cluster=None,
    publish=None,
    workload=None,
    interruptions=None,
    **rates,
):
    """4 GPUs for 4 replicas and 4 for the trainer; 32 trajectories of 100 tokens; a token takes 0.01 s."""
    return Description(
        cluster=Cluster(**{"gpus": 8, "train_gpus": 4, "synchronous": "split"} | (cluster or {})),
        workload=Workload(
            groups_per_batch=groups,
            trajectories_per_group=group,
            lengths=lengths or Distribution(mean=100),
            **(workload or {}),
        ),
        rates=Rates(**{"decode_s": 0.01} | rates),
        publish=Publish(**(publish or {})),
        staleness=StalenessConfig(max_staleness=bound, policy=policy),
        interruptions=Interruptions(**(interruptions or {})),
    )


@pytest.mark.parametrize(
    ("changes", "step_s"),
    [
        ({"decode_s_per_request": 0.001, "train_s": 0.5}, 100 * (0.01 + 8 * 0.001) + 0.5),
        ({"max_running": 2, "train_s": 0.5}, 4 * 100 * 0.01 + 0.5),  # 8 requests of a replica in four waves
        ({"train_tokens_per_s": 100, "load_s": 3.0, "transfer_s": 2.0, "export_s": 1.5}, 1 + 8 + 6.5),
        (
            {"workload": {"turns": 4, "tool_s": Distribution(mean=2.0), "prompt_tokens": 50}, "train_tokens_per_s": 10},
            1 + 3 * 2 + 32 * 150 / 40,
        ),
        ({"prefill_tokens_per_s": 400, "workload": {"prompt_tokens": 50}}, 8 * 50 / 400 + 1),
        ({"cluster": {"synchronous": "colocated"}, "switch_s": 0.7, "train_tokens_per_s": 100}, 1 + 4 + 0.7),
    ],
)
def test_synchronous_step_of_equal_lengths(changes, step_s):
    assert simulate_synchronous(describe(**changes), steps=4).step_s == pytest.approx(step_s, rel=CLOSE)


def test_synchronous_step_ends_with_the_longest_of_exponential_lengths():
    harmonic = sum(1 / n for n in range(1, 33))
    seen = simulate_synchronous(describe(lengths=Distribution(kind="exponential", mean=1000)), steps=250)
    assert seen.step_s == pytest.approx(0.01 * 1000 * harmonic, rel=CLOSE)


def test_a_shared_prompt_is_trained_once_for_its_group():
    separate, shared = (
        simulate(
            describe(bound=3, train_tokens_per_s=100, workload={"prompt_tokens": 200, "prefix_sharing": each}), steps=6
        ).step_s
        for each in (False, True)
    )
    assert shared / separate == pytest.approx((200 + 4 * 100) / (4 * 300), rel=CLOSE)


def test_old_logprobs_of_stale_tokens_cost_a_third_of_their_training():
    without, with_old = (
        simulate(describe(bound=3, train_tokens_per_s=100, workload={"old_policy": each}), steps=6).step_s
        for each in (False, True)
    )
    assert with_old / without == pytest.approx(1 + 1 / 3, rel=CLOSE)
    fresh = describe(train_tokens_per_s=100, workload={"old_policy": True})
    assert simulate_synchronous(fresh, steps=4).step_s == pytest.approx(1 + 8, rel=CLOSE)


def test_step_at_the_limit_of_the_trainer_with_the_staleness_of_the_bound():
    for bound in (1, 3):
        seen = simulate(describe(bound=bound, train_s=3.0), steps=6)
        assert seen.step_s == pytest.approx(3.0, rel=CLOSE)
        assert (seen.trainer_idle, seen.staleness_mean, seen.staleness_p99) == (0, bound, bound)
    # at half the speed, as some trajectory is always open
    shared = describe(bound=3, shared_speed=0.5, train_s=3.0, lengths=Distribution(mean=400))
    assert simulate(shared, steps=20).step_s == pytest.approx(6, rel=CLOSE)
    # decoding of 1 s takes 2 s; meanwhile the trainer does 1 s of its work
    assert simulate(describe(shared_speed=0.5, train_s=3.0), steps=6).step_s == pytest.approx(4, rel=CLOSE)


@pytest.mark.parametrize(
    ("interruptions", "changes", "step_s"),
    [
        ({"checkpoint_every": 2, "checkpoint_s": 1.0}, {"train_s": 3.0}, 3.5),
        ({}, {"train_s": 3.0, "export_s": 1.0, "bound": 3, "publish": {"every": 2}}, 3.5),
        ({"slow_replica": 5.0}, {"bound": 0}, 5.0),
        ({"failed": 0.5}, {"bound": 3, "groups": 64, "group": 1, "max_running": 4}, 2 * 4),
        ({"validation_trajectories": 32}, {"max_running": 8, "bound": 0}, 2.0),
    ],
)
def test_interruptions_make_a_step_longer(interruptions, changes, step_s):
    seen = simulate(describe(interruptions=interruptions, **changes), steps=12)
    assert seen.step_s == pytest.approx(step_s, rel=CLOSE)


def test_step_at_the_limit_of_the_replicas():
    exponential = Distribution(kind="exponential", mean=400)
    described = describe(bound=6, lengths=exponential, max_running=4, decode_s_per_request=0.01, train_s=0.1)
    seen = simulate(described, steps=60)
    assert seen.step_s == pytest.approx(32 * 400 / (4 * 4 / (0.01 + 4 * 0.01)), rel=CLOSE)
    assert seen.rollout_idle < 0.02
    assert simulate(replace(described, staleness=StalenessConfig(max_staleness=0)), steps=60).step_s > 1.3 * seen.step_s


def test_resume_keep_and_drain_cost_what_they_do_in_a_replica():
    # 32 trajectories of 4 s, one publish of 1 s per step, and no other limit than the replicas
    steps = {}
    for update, kv in (("resume", "recompute"), ("keep", "keep"), ("keep", "recompute"), ("drain", "recompute")):
        described = describe(
            lengths=Distribution(mean=400),
            workload={"prompt_tokens": 100},
            publish={"on_update": update, "kv": kv},
            load_s=1.0,
            max_running=8,
            prefill_tokens_per_s=4000,
            train_s=2.0,
            bound=2,
        )
        steps[update, kv] = simulate(described, steps=8).step_s
    kept, recomputed = steps["keep", "keep"], steps["keep", "recompute"]
    prefill = 8 * 100 / 4000
    assert kept == pytest.approx(4 + 1 + prefill, rel=CLOSE)
    # the requests in flight are prefilled once more, with prompt and the tokens so far
    assert kept + prefill < recomputed < kept + prefill + 8 * 400 / 4000
    assert steps["resume", "recompute"] == pytest.approx(recomputed, rel=CLOSE)
    assert steps["drain", "recompute"] > kept


def test_pause_of_a_publish_costs_replicas_its_time_unless_staged_or_one_at_a_time():
    # The trainer is the limit; staged replicas do not stop.
    shares = {}
    for mode in ("at_once", "rolling", "staged"):
        described = describe(publish={"mode": mode}, load_s=2.0, max_running=4, bound=2, train_s=12.0)
        shares[mode] = simulate(described, steps=8)
    assert all(seen.step_s == pytest.approx(12, rel=CLOSE) for seen in shares.values())
    assert shares["staged"].rollout_idle <= shares["rolling"].rollout_idle


def test_s_max_of_exponential_lengths_and_a_run_that_reaches_it():
    # Slots of a replica are its part of a batch, so U is 1 / H_32 in the synchronous run: all but the last are idle.
    harmonic = sum(1 / n for n in range(1, 33))
    described = describe(
        bound=16,
        lengths=Distribution(kind="exponential", mean=1000),
        cluster={"synchronous": "colocated", "train_gpus": 4},
        max_running=4,
        train_tokens_per_s=32 * 1000 / (8 * 10),
    )
    generation, train = 0.01 * 1000 * harmonic, 10.0
    g = generation / (generation + train)
    expected = 1 / (1 - g + g / harmonic)
    plan = make_plan(described, steps=60, search=False)
    assert plan.given.s_max == pytest.approx(expected, rel=CLOSE)
    assert plan.given.speed_up == pytest.approx(expected, rel=CLOSE)


@settings(max_examples=12, deadline=None)
@given(
    bound=st.integers(0, 4),
    train_gpus=st.integers(1, 7),
    max_running=st.integers(2, 16),
    train_tokens_per_s=st.floats(50, 5000),
    cv=st.floats(0.2, 2),
    colocated=st.booleans(),
)
def test_speed_up_stays_below_s_max_and_staleness_within_the_bound(
    bound, train_gpus, max_running, train_tokens_per_s, cv, colocated
):
    described = describe(
        bound=bound,
        lengths=Distribution(kind="lognormal", mean=200, cv=cv, maximum=1000),
        cluster={"train_gpus": train_gpus, "synchronous": "colocated" if colocated else "split"},
        max_running=max_running,
        train_tokens_per_s=train_tokens_per_s,
    )
    plan = make_plan(described, steps=12, search=False)
    # Twelve steps of other trajectories than those of the synchronous run may be shorter.
    assert plan.given.speed_up <= plan.given.s_max * 1.15
    assert plan.given.seen.staleness_p99 <= bound
    assert plan.given.s_max == s_max(described, plan.synchronous)


def test_length_bias_of_policies_under_long_tails():
    def bias(policy):
        lengths = Distribution(kind="lognormal", mean=400, cv=2, maximum=8000)
        described = describe(policy=policy, lengths=lengths, bound=1, train_s=1.0, groups=16, group=1)
        return simulate(described, steps=40).length_bias

    assert bias("wait") == pytest.approx(1)
    assert bias("drop") < 0.95
    assert bias("recycle") < 0.95


def test_trajectories_of_a_dropped_group_leave_the_replicas():
    lengths = Distribution(kind="empirical", values=(100,) * 15 + (20_000,))
    described = describe(policy="drop", lengths=lengths, max_running=1, train_s=1.0, groups=16, group=1)
    all_of_them = 16 * np.mean(lengths.values) * 0.01 / 4  # seconds
    assert simulate(described, steps=30).step_s < all_of_them / 4


def test_part_of_a_cluster_stands_for_the_whole(monkeypatch):
    lengths = Distribution(kind="lognormal", mean=400, cv=1.5, maximum=8000)
    described = describe(
        bound=2, lengths=lengths, groups=36, group=4, cluster={"gpus": 24, "train_gpus": 12}, train_tokens_per_s=50
    )
    whole = [simulate(described, steps=24), simulate_synchronous(described, steps=24)]
    monkeypatch.setattr(simulation, "MAX_REPLICAS", 4)
    part = [simulate(described, steps=24), simulate_synchronous(described, steps=24)]
    for name in ("step_s", "tokens_per_s"):
        seen, expected = ([getattr(each, name) for each in runs] for runs in (part, whole))
        np.testing.assert_allclose(seen, expected, rtol=CLOSE)
