"""Phases of replicas in a publish, under events in any order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from async_rl.inference.publish_state import Phase, PublishState
from message_queue.errors import EngineError
from message_queue.tokens import WeightVersion

SEVEN = WeightVersion(7, "d7")


def make_state():
    return PublishState(SEVEN, "abc")


@pytest.mark.parametrize(
    ("events", "wrong"), [((), "loaded"), (("staged",), "staged"), (("staged",), "loaded"), (("fence",), "staged")]
)
def test_event_that_cannot_follow_is_refused(events, wrong):
    state = make_state()
    for event in events:
        getattr(state, event)("a")
    with pytest.raises(ValueError, match="a is"):
        getattr(state, wrong)("a")


def test_version_has_one_set_of_weights():
    state = make_state()
    PublishState(SEVEN, "a", before=state)  # after a restart the same one is reloaded
    PublishState(WeightVersion(8, "d7"), "a", before=state)
    for weights in (WeightVersion(7, "other"), WeightVersion(6, "d7")):
        with pytest.raises(ValueError, match="version"):
            PublishState(weights, "a", before=state)


def test_replicas_of_one_version_have_the_same_parameters():
    state = make_state()
    state.compare("a", "c1")
    state.compare("b", "c1")
    with pytest.raises(EngineError, match=r"late .*c2.* version 7.* a has c1"):
        state.compare("late", "c2")


class Publish(RuleBasedStateMachine):
    """Replicas that stage, load and die in any order, and a publish that may be cancelled."""

    @initialize(count=st.integers(1, 6), max_paused=st.none() | st.integers(1, 6))
    def start(self, count, max_paused):
        self.names = [f"r{number}" for number in range(count)]
        self.max_paused = max_paused
        self.state = PublishState(SEVEN, self.names, max_paused=max_paused)
        self.cancelled, self.asked = False, []

    def within(self, *phases):
        return [name for name in self.names if self.state.phase(name) in phases]

    @precondition(lambda self: self.within(Phase.STAGING))
    @rule(data=st.data())
    def staged(self, data):
        self.state.staged(data.draw(st.sampled_from(self.within(Phase.STAGING))))

    @precondition(lambda self: self.within(Phase.LOADING))
    @rule(data=st.data())
    def loaded(self, data):
        self.state.loaded(data.draw(st.sampled_from(self.within(Phase.LOADING))))

    @rule(data=st.data())
    def fence(self, data):
        self.state.fence(data.draw(st.sampled_from(self.names)))

    @rule()
    def cancel(self):
        self.state.cancel()
        self.cancelled = True

    @rule()
    def ask(self):
        staging, paused = self.within(Phase.STAGING), len(self.state.paused)
        waiting = self.within(Phase.STAGED)
        chosen = self.state.next_loads()
        room = len(waiting) if self.max_paused is None else self.max_paused - paused
        assert len(chosen) == (0 if staging else min(room, len(waiting)))
        assert not (self.cancelled and chosen), "a cancelled publish pauses no replica"
        assert not set(chosen) & set(self.asked), "no replica is paused twice"
        self.asked += chosen

    @invariant()
    def no_more_are_paused_than_may_be(self):
        assert len(self.state.paused) <= (self.max_paused or len(self.names))
        assert self.state.paused == set(self.within(Phase.LOADING))


Publish.TestCase.settings = settings(max_examples=100, deadline=None)
test_publish_in_any_order_of_events = Publish.TestCase
