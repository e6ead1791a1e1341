"""The ledger closes to zero, and refuses every transition that would make it lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from message_queue.ledger import Ledger, LedgerError


def test_records_tell_what_became_of_each_group():
    ledger = Ledger()
    for group in range(4):
        ledger.admitted(group, version=group // 2)
    for group in (0, 1):
        ledger.delivered(group, segments=2, tokens=10 + group)
    ledger.trained(1, train_step=7)
    ledger.dropped(2, reason="rollout failed: ToolError: boom", segments=1, tokens=5)
    assert ledger.drain_records() == [
        {
            "group": 1,
            "admitted_version": 0,
            "outcome": "trained",
            "reason": None,
            "train_step": 7,
            "segments": 2,
            "tokens": 11,
            "masked_tokens": 0,
        },
        {
            "group": 2,
            "admitted_version": 1,
            "outcome": "dropped",
            "reason": "rollout failed: ToolError: boom",
            "train_step": None,
            "segments": 1,
            "tokens": 5,
            "masked_tokens": 0,
        },
    ]
    assert ledger.closing_records([3, 0], open_tokens=10) == [
        {
            "group": 0,
            "admitted_version": 0,
            "outcome": "open",
            "reason": None,
            "train_step": None,
            "segments": 2,
            "tokens": 10,
            "masked_tokens": 0,
        },
        {
            "group": 3,
            "admitted_version": 1,
            "outcome": "open",
            "reason": None,
            "train_step": None,
            "segments": 0,
            "tokens": 0,
            "masked_tokens": 0,
        },
        {
            "outcome": "total",
            "admitted": 4,
            "trained": 1,
            "dropped": 1,
            "open": 2,
            "error": 0,
            "trained_tokens": 11,
            "masked_tokens": 0,
            "dropped_tokens": 5,
            "open_tokens": 10,
            "token_error": 0,
            "reasons": {"rollout failed": 1},
        },
    ]


def test_a_lost_group_shows_as_an_error():
    ledger = Ledger()
    ledger.admitted(0, version=0)
    assert ledger.counts(open_groups=1).error == 0
    assert ledger.counts(open_groups=0).error == 1


def test_a_drop_of_a_delivered_group_keeps_what_it_delivered():
    ledger = Ledger()
    ledger.admitted(0, version=0)
    ledger.delivered(0, segments=1, tokens=9)
    ledger.dropped(0, reason="expired: staleness 2 exceeds 1")
    assert ledger.counts(open_groups=0).dropped_tokens == 9


@pytest.mark.parametrize(
    ("illegal", "message"),
    [
        (lambda ledger: ledger.admitted(0, version=0), "group 0 was admitted twice"),
        (lambda ledger: ledger.delivered(1, segments=1, tokens=1), "group 1 was delivered twice"),
        (lambda ledger: ledger.trained(0, train_step=1), "group 0 cannot be trained: it was never delivered"),
        (lambda ledger: ledger.trained(2, train_step=1), "group 2 is not open"),
        (lambda ledger: ledger.dropped(2, reason="again"), "group 2 is not open"),
        (lambda ledger: ledger.dropped(9, reason="unknown"), "group 9 is not open"),
        (lambda ledger: ledger.dropped(0, reason=""), "group 0 was dropped without a reason"),
    ],
)
def test_illegal_transitions_raise_and_change_nothing(illegal, message):
    ledger = Ledger()
    for group in range(3):
        ledger.admitted(group, version=0)
    ledger.delivered(1, segments=1, tokens=1)
    ledger.delivered(2, segments=1, tokens=1)
    ledger.trained(2, train_step=1)
    before = ledger.counts(open_groups=2)
    with pytest.raises(LedgerError, match=message):
        illegal(ledger)
    assert ledger.counts(open_groups=2) == before


@given(st.lists(st.sampled_from(["admit", "deliver", "train", "drop"]), max_size=60))
def test_every_group_ends_in_exactly_one_place(moves):
    ledger, open_, delivered, ended, ids = Ledger(), [], [], [], iter(range(100))
    for move in moves:
        if move == "admit":
            open_.append(next(ids))
            ledger.admitted(open_[-1], version=0)
        elif move == "deliver" and open_:
            delivered.append(open_.pop())
            ledger.delivered(delivered[-1], segments=1, tokens=2)
        elif move == "train" and delivered:
            ended.append(delivered.pop())
            ledger.trained(ended[-1], train_step=1)
        elif move == "drop" and open_:
            ended.append(open_.pop())
            ledger.dropped(ended[-1], reason="lost")
    live = [*open_, *delivered]
    assert ledger.counts(open_groups=len(live)).error == 0
    *records, total = ledger.closing_records(live)
    assert sorted(r["group"] for r in records) == sorted([*live, *ended])
    assert total["trained_tokens"] == 2 * total["trained"]


def test_a_continued_ledger_goes_on():
    first = Ledger()
    first.admitted(0, version=0)
    first.dropped(0, reason="why")
    second = Ledger(before=first.counts(open_groups=0))
    second.admitted(1, version=0)
    counts = second.counts(open_groups=1)
    assert (counts.admitted, counts.dropped, counts.open, counts.error) == (2, 1, 1, 0)
