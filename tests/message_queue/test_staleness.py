"""The staleness policies: the bound holds for every group, and admission never leads into a dead end."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from message_queue.contract import Admission
from message_queue.policies import DropPolicy, WaitPolicy, build_policy
from message_queue.staleness import StalenessConfig
from message_queue.state import GroupState
from tests.helpers.groups import head_for

counts = st.dictionaries(st.integers(0, 8), st.integers(0, 6), max_size=6)


def wait(s=1, b=2, p=1):
    return WaitPolicy(StalenessConfig(max_staleness=s), batch_groups=b, updates_per_batch=p)


def test_config_names_the_policies_it_takes():
    with pytest.raises(ValueError, match=r"staleness\.policy is 'hope'; choose one of wait, drop, recycle, mask"):
        StalenessConfig(policy="hope")
    with pytest.raises(ValueError, match=r"staleness\.max_recycles is 0; must be >= 1"):
        StalenessConfig(policy="recycle", max_recycles=0)
    with pytest.raises(ValueError, match=r"staleness\.max_staleness is -1; must be >= 0"):
        StalenessConfig(max_staleness=-1)


def test_policy_refuses_what_can_never_be_trained():
    with pytest.raises(ValueError, match=r"staleness\.max_staleness is 1 with 3 optimizer updates per batch"):
        wait(s=1, p=3)
    with pytest.raises(ValueError, match="batch_groups is 0"):
        wait(b=0)
    with pytest.raises(ValueError, match="updates_per_batch is 0"):
        wait(p=0)


@given(s=st.integers(0, 4), b=st.integers(1, 5), u=st.integers(0, 9))
def test_on_the_newest_weights_admission_is_the_count_of_the_design(s, b, u):
    groups = 0
    while wait(s, b).admits({u: groups}, admitted_update=u, next_update=u):
        groups += 1
    assert groups == (s + 1) * b == wait(s, b).max_outstanding


@given(outstanding=counts, s=st.integers(0, 4), b=st.integers(1, 4), u=st.integers(0, 8), p=st.integers(1, 3))
def test_feasible_means_that_oldest_first_meets_every_deadline(outstanding, s, b, u, p):
    s = max(s, p - 1)
    ages = sorted(Counter(outstanding).elements())
    on_time = all(u + rank // b * p + p - 1 - a <= s for rank, a in enumerate(ages))
    assert wait(s, b, p).is_feasible(outstanding, next_update=u) == on_time


@given(outstanding=counts, s=st.integers(0, 4), b=st.integers(1, 4), u=st.integers(0, 8))
def test_feasible_is_the_deadline_count_of_the_design(outstanding, s, b, u):
    due = [sum(n for a, n in outstanding.items() if a <= u - s + k) for k in range(20)]
    expired = sum(n for a, n in outstanding.items() if a < u - s)
    by_count = not expired and all(n <= (k + 1) * b for k, n in enumerate(due))
    assert wait(s, b).is_feasible(outstanding, next_update=u) == by_count


def test_the_trainer_waits_for_old_open_groups():
    old_open, young_ready = {0: 1}, {1: 2}
    outstanding = Counter(old_open) + Counter(young_ready)
    assert not wait(s=1, b=2).batch_ready(young_ready, outstanding, next_update=1)
    assert wait(s=1, b=2).batch_ready({0: 1, 1: 2}, outstanding, next_update=1)
    assert wait(s=2, b=2).batch_ready(young_ready, outstanding, next_update=1)


def test_staleness_zero_is_synchronous_training():
    sync = wait(s=0, b=2)
    assert sync.admits({0: 1}, admitted_update=0, next_update=0)
    assert not sync.admits({0: 2}, admitted_update=0, next_update=0)
    assert not sync.admits({}, admitted_update=0, next_update=1)  # taken, weights of update 1 not loaded
    assert sync.admits({}, admitted_update=1, next_update=1)


@given(
    s=st.integers(0, 3),
    b=st.integers(1, 3),
    p=st.integers(1, 2),
    publish_every=st.integers(1, 3),
    moves=st.lists(st.tuples(st.sampled_from(["admit", "finish", "take", "load"]), st.integers(0, 99)), max_size=150),
)
def test_random_schedules_keep_the_bound_and_never_deadlock(s, b, p, publish_every, moves):
    publish_every *= p
    s = max(s, publish_every - 1, p - 1)
    policy = wait(s, b, p)
    open_, ready, published, loaded, u = [], [], 0, 0, 0

    def admits():
        return policy.admits(Counter(open_ + ready), admitted_update=loaded, next_update=u)

    def may_take():
        return policy.batch_ready(Counter(ready), Counter(open_ + ready), next_update=u)

    def take():
        nonlocal u, published
        ready.sort()
        taken, ready[:] = ready[:b], ready[b:]
        assert len(taken) == b
        assert all(u + p - 1 - a <= s for a in taken)
        u += p
        published = u // publish_every * publish_every

    for move, choice in moves:
        if move == "admit" and admits():
            open_.append(loaded)
        elif move == "finish" and open_:
            ready.append(open_.pop(choice % len(open_)))
        elif move == "take" and may_take():
            take()
        elif move == "load":
            loaded = published
    for _ in range(5):  # whatever happened, the optimizer goes on once rollouts finish and weights arrive
        ready, open_, loaded = ready + open_, [], published
        while not may_take():
            assert admits()
            ready.append(loaded)
        take()


def test_drop_takes_what_comes_and_gives_up_what_is_too_old():
    policy = build_policy(StalenessConfig(max_staleness=1, policy="drop"), batch_groups=2)
    assert isinstance(policy, DropPolicy)
    assert policy.admits({0: 3}, admitted_update=0, next_update=1)
    assert not policy.admits({0: 4}, admitted_update=0, next_update=1)
    assert not policy.admits({}, admitted_update=0, next_update=2)
    assert policy.batch_ready({1: 2}, {0: 1, 1: 2}, next_update=1)
    assert policy.expiry(0, next_update=1) is None
    assert policy.expiry(0, next_update=2) == "expired: staleness 2 exceeds 1"


def test_by_turn_is_oldest_first_under_wait_and_first_come_under_drop():
    ready = [
        GroupState(admission=Admission(group=g, prompt=0, admitted_version=a, admitted_update=a))
        for g, a in ((5, 2), (3, 1), (4, 1))
    ]
    assert [g.group for g in wait().by_turn(ready)] == [3, 4, 5]
    assert [g.group for g in DropPolicy(StalenessConfig(), batch_groups=2).by_turn(ready)] == [5, 3, 4]


def test_a_segment_without_tokens_has_no_staleness():
    admission = Admission(group=0, prompt=0, admitted_version=1, admitted_update=1)
    assert head_for(admission, versions=(9,), tokens=0).tokens_per_version() == {}
