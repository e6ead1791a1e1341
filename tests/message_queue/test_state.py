"""QueueState against a slow model, and its ledger."""

import asyncio
from collections import Counter

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from message_queue.errors import QueueError
from message_queue.events import Admitted, Checkpointed, Dropped, Loaded, Published, Ready, Taken, Trained
from message_queue.journal import EventJournal
from message_queue.ledger import Drop, DropKind
from message_queue.queue import TrajectoryQueue
from message_queue.state import QueueState, StoredState
from message_queue.trajectory import Admission
from tests.helpers.groups import head_for
from tests.helpers.queue_runs import policy_of


def admission_of(group, *, prompt=0):
    return Admission(group=group, prompt=prompt, admitted_version=0, admitted_update=0)


class StateAgainstModel(RuleBasedStateMachine):
    """The model keeps every group for ever as [life, admission, tokens, masked, train_step] and counts from scratch."""

    def __init__(self):
        super().__init__()
        self.state = QueueState()
        self.groups, self.batches, self.updates = {}, 0, {0: 0}
        self.served = self.step = self.saved = self.prompt = 0
        self.requeued, self.requeues, self.gradient = [], Counter(), 0

    def of(self, *lives):
        return sorted(group for group, entry in self.groups.items() if entry[0] in lives)

    @rule()
    def admit(self):
        admission = self.state.next_admission(self.prompt)
        expected = self.requeued.pop(0) if self.requeued else self.prompt
        self.prompt += expected == self.prompt
        assert (admission.group, admission.prompt) == (len(self.groups), expected)
        assert (admission.admitted_version, admission.admitted_update) == (self.served, self.updates[self.served])
        self.state.apply(Admitted(admission=admission))
        self.groups[admission.group] = ["open", admission, 0, 0, None]

    @precondition(lambda self: self.of("open"))
    @rule(data=st.data(), tokens=st.integers(1, 4))
    def put(self, data, tokens):
        entry = self.groups[data.draw(st.sampled_from(self.of("open")))]
        self.state.apply(Ready(head=head_for(entry[1], tokens=tokens)))
        entry[0], entry[2] = "ready", tokens

    @precondition(lambda self: self.of("open", "ready", "taken"))
    @rule(data=st.data(), tokens=st.integers(0, 4), requeue=st.booleans())
    def drop(self, data, tokens, requeue):
        group = data.draw(st.sampled_from(self.of("open", "ready", "taken")))
        entry = self.groups[group]
        kind = DropKind.REQUEUED if requeue else DropKind.ROLLOUT_FAILED
        self.state.apply(Dropped(group=group, reason=Drop(kind, "why"), tokens=tokens))
        entry[2] = tokens if entry[0] == "open" else entry[2]
        entry[0] = "dropped"
        self.requeued += [entry[1].prompt] * requeue
        self.requeues[entry[1].prompt] = self.requeues[entry[1].prompt] + 1 if requeue else 0

    @precondition(lambda self: self.of("ready"))
    @rule(data=st.data(), masked=st.integers(0, 1))
    def take(self, data, masked):
        groups = data.draw(st.lists(st.sampled_from(self.of("ready")), min_size=1, max_size=3, unique=True))
        self.state.apply(Taken(groups=tuple(groups), update=self.batches, masked=(masked,) * len(groups)))
        self.batches += 1
        for group in groups:
            self.groups[group][0], self.groups[group][3] = "taken", masked

    @precondition(lambda self: self.of("taken"))
    @rule(data=st.data())
    def train(self, data):
        groups = data.draw(st.lists(st.sampled_from(self.of("taken")), min_size=1, max_size=3, unique=True))
        self.step += 1
        tokens = tuple(self.groups[group][2] - self.groups[group][3] for group in groups)
        self.state.apply(Trained(groups=tuple(groups), train_step=self.step, tokens=tokens))
        for group in groups:
            self.groups[group][0], self.groups[group][4] = "trained", self.step
            self.requeues[self.groups[group][1].prompt] = 0
        self.gradient += sum(tokens)

    @rule(load=st.booleans())
    def publish(self, load):
        version = max(self.updates) + 1
        self.state.apply(Published(version=version, update=self.batches))
        self.updates[version] = self.batches
        if load:
            self.state.apply(Loaded(version=version))
            self.served = version

    @rule()
    def checkpoint(self):
        self.state.apply(Checkpointed(train_step=self.step))
        self.saved = self.step

    @rule(data=st.data())
    def refuse(self, data):
        """Events that do not follow are refused and change nothing."""
        gone = [len(self.groups), *self.of("dropped", "trained")]
        group = data.draw(st.sampled_from(gone))
        wrong = [
            Dropped(group=group, reason=Drop(DropKind.EXPIRED, "late")),
            Taken(groups=(group,), update=self.batches, masked=(0,)),
            Taken(groups=(), update=self.batches + 1, masked=()),
            Trained(groups=(group,), train_step=self.step + 1, tokens=(0,)),
            Trained(groups=(), train_step=self.saved, tokens=()),
            Published(version=max(self.updates), update=self.batches),
            Published(version=max(self.updates) + 1, update=self.batches + 1),
            Loaded(version=max(self.updates) + 1),
            Checkpointed(train_step=self.step + 1),
        ]
        late = self.step + 1
        wrong += [Trained(groups=(g,), train_step=late, tokens=(0,)) for g in self.of("open", "ready")]
        wrong += [Trained(groups=(g, g), train_step=late, tokens=(0, 0)) for g in self.of("taken")]
        wrong += [Taken(groups=(g,), update=self.batches, masked=(0,)) for g in self.of("open", "taken")]
        if self.groups:
            wrong.append(Admitted(admission=admission_of(len(self.groups) - 1)))
        event, before = data.draw(st.sampled_from(wrong)), self.state.dump()
        with pytest.raises(QueueError):
            self.state.apply(event)
        assert self.state.dump() == before

    @invariant()
    def agrees(self):
        state, snapshot = self.state, self.state.snapshot()
        assert [sorted(lives) for lives in (state.open, state.ready, state.taken)] == [
            self.of("open"), self.of("ready"), self.of("taken"),
        ]  # fmt: skip
        assert sorted(state.trained) == [g for g in self.of("trained") if self.groups[g][4] > self.saved]
        for counter, lives in ((state.outstanding, ("open", "ready")), (state.ready_updates, ("ready",))):
            assert counter == Counter(self.groups[group][1].admitted_update for group in self.of(*lives))
        assert snapshot.unfinished == tuple(self.groups[g][1] for g in self.of("open", "ready", "taken"))
        assert (snapshot.next_group, snapshot.waiting) == (len(self.groups), tuple(self.requeued))
        assert snapshot.requeues == +self.requeues
        counts = snapshot.ledger
        assert (counts.error, counts.token_error) == (0, 0)
        assert (counts.admitted, counts.trained) == (len(self.groups), len(self.of("trained")))
        assert (counts.dropped, sum(counts.reasons.values())) == (len(self.of("dropped")),) * 2
        assert counts.trained_tokens == self.gradient
        assert counts.open_tokens == sum(self.groups[g][2] for g in self.of("ready", "taken"))
        assert set(state.versions) >= {e[1].admitted_version for e in map(self.groups.get, self.of("open", "ready"))}

    @invariant()
    def a_dump_makes_an_equal_state(self):
        stored = self.state.dump()
        again = QueueState.of(msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=StoredState))
        assert again.snapshot() == self.state.snapshot()
        assert msgspec.structs.replace(again.dump(), groups=()) == msgspec.structs.replace(stored, groups=())
        assert {group.group: group for group in again.dump().groups} == {group.group: group for group in stored.groups}
        assert list(again.ready) == list(self.state.ready)

    @invariant()
    def records_tell_each_end_once(self):
        ended, self.state.ended = self.state.ended, []
        for record in ended:
            life, _, tokens, masked, step = self.groups[record["group"]]
            assert (record["outcome"], record["train_step"], record["tokens"]) == (life, step, tokens)
            assert record["masked_tokens"] == (masked if life == "trained" else 0)


StateAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStateAgainstModel = StateAgainstModel.TestCase


def three_groups():
    state = QueueState()
    for prompt in range(3):
        state.apply(Admitted(admission=state.next_admission(prompt)))
        state.apply(Ready(head=head_for(admission_of(prompt, prompt=prompt))))
    return state


def test_ledger_error_shows_a_group_missing_from_the_state():
    state = three_groups()
    del state.ready[1]
    assert (state.counts.error, state.counts.token_error) == (1, 3)


def test_token_error_shows_tokens_that_the_trainer_did_not_count():
    state = three_groups()
    state.apply(Taken(groups=(0, 1), update=0, masked=(0, 1)))
    state.apply(Trained(groups=(0, 1), train_step=1, tokens=(3, 1)))
    assert (state.counts.error, state.counts.token_error) == (0, 1)
    total = state.counts.total()
    assert (total["trained"], total["masked_tokens"], total["open"], total["token_error"]) == (2, 1, 1, 1)


def test_a_replay_batch_is_taken_before_any_other():
    state = QueueState.of(msgspec.structs.replace(three_groups().dump(), replay=[(2, 0)]))
    with pytest.raises(QueueError):
        state.apply(Taken(groups=(0, 1), update=0, masked=(0, 0)))
    state.apply(Taken(groups=(2, 0), update=0, masked=(0, 0)))
    assert (list(state.taken), state.replay) == ([2, 0], [])


class Sizes(EventJournal):
    """Measures stored states, and stores nothing."""

    def __init__(self):
        self.groups = self.num_bytes = 0

    def record(self, items):
        for state in items:
            if isinstance(state, StoredState):
                self.groups, self.num_bytes = len(state.groups), len(msgspec.msgpack.encode(state))
        written = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written


@pytest.mark.parametrize("policy", ["wait", "drop"])
async def test_a_stored_state_holds_live_groups_only_however_many_have_passed(policy):
    batch, save_every, seen = 16, 4, []
    journal = Sizes()
    queue = TrajectoryQueue(policy_of(s=2, b=batch, policy=policy, p=1, max_requeues=3), journal=journal)
    admitted = [await queue.admit(prompt) for prompt in range(2 * batch)]
    for step in range(1, 100 * save_every + 1):
        for admission in admitted[:batch]:
            await queue.put(head_for(admission))
        admitted = admitted[batch:]
        taken = await queue.take()
        await queue.trained([head.group for head in taken.groups], train_step=step)
        await queue.publish(step, update=step)
        await queue.loaded(step)
        if step % save_every == 0:
            await queue.checkpointed(step)
            seen.append((journal.groups, journal.num_bytes))
        admitted += [await queue.admit((step + 1) * batch + number) for number in range(batch)]
    assert all(groups <= (2 + save_every) * batch for groups, _ in seen)
    assert max(num_bytes / groups for groups, num_bytes in seen[1:]) < 200
    assert (await queue.snapshot()).ledger.error == 0
