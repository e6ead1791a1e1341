"""Admission and batches of policy wait, and the values that a staleness config takes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from message_queue.policies import StalenessConfig, WaitPolicy
from message_queue.queue import TrajectoryQueue

counts = st.dictionaries(st.integers(0, 8), st.integers(0, 6), max_size=6)


def wait(s=1, b=2, p=1):
    return WaitPolicy(StalenessConfig(max_staleness=s), batch_groups=b, updates_per_batch=p)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("policy", lambda: StalenessConfig(policy="hope")),
        ("max_requeues", lambda: StalenessConfig(policy="recycle", max_requeues=0)),
        ("max_staleness", lambda: StalenessConfig(max_staleness=-1)),
        ("max_staleness", lambda: wait(s=1, p=3)),
        ("batch_groups", lambda: wait(b=0)),
        ("updates_per_batch", lambda: wait(p=0)),
        ("max_ready", lambda: TrajectoryQueue(wait(b=2), max_ready=1)),
    ],
)
def test_staleness_config_and_policy_refuse_impossible_values(field, make):
    with pytest.raises(ValueError, match=field):
        make()


@given(s=st.integers(0, 6), b=st.integers(1, 5), u=st.integers(0, 9), p=st.integers(1, 3))
def test_wait_admits_the_batches_within_max_staleness_on_the_newest_weights(s, b, u, p):
    s, groups = max(s, p - 1), 0
    while wait(s, b, p).admits({u: groups}, admitted_update=u, next_update=u):
        groups += 1
    assert groups == (s + 1) // p * b == wait(s, b, p).max_outstanding


@given(outstanding=counts, s=st.integers(0, 4), b=st.integers(1, 4), u=st.integers(0, 8), p=st.integers(1, 3))
def test_wait_is_feasible_if_oldest_first_meets_every_deadline(outstanding, s, b, u, p):
    s = max(s, p - 1)
    ages = sorted(Counter(outstanding).elements())
    on_time = all(u + rank // b * p + p - 1 - a <= s for rank, a in enumerate(ages))
    assert wait(s, b, p).is_feasible(outstanding, next_update=u) == on_time


def test_wait_has_no_batch_before_old_open_groups_are_ready():
    old_open, young_ready = {0: 1}, {1: 2}
    outstanding = Counter(old_open) + Counter(young_ready)
    assert not wait(s=1, b=2).batch_ready(young_ready, outstanding, next_update=1)
    assert wait(s=1, b=2).batch_ready({0: 1, 1: 2}, outstanding, next_update=1)
    assert wait(s=2, b=2).batch_ready(young_ready, outstanding, next_update=1)
