"""Whether a queue that opened its journal again has all that it has to have, and nothing that is over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from async_rl.checkpoints import RunState
from async_rl.simulate.acknowledged import Expected, Fact, Held, Published, Ready, Trained
from message_queue.contract import Admission, QueueSnapshot
from message_queue.restart import Restored
from message_queue.trajectory import PromptGroup

Require = Callable[..., None]
TOLD_LOSSES = ("damaged:", "lost", "cut off", "given up", "there was no journal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopened:
    """What came of it. state: of the checkpoint that the run goes on from. attempts: this one and those cut short.

    updates_per_batch: optimizer steps of each batch that is trained again.
    """

    state: RunState
    restored: Restored[PromptGroup]
    snapshot: QueueSnapshot
    attempts: int
    updates_per_batch: int = 1

    @property
    def end(self) -> int:
        """Optimizer updates once everything is trained again that was trained."""
        return self.state.train_step + self.restored.replay * self.updates_per_batch

    @property
    def live(self) -> dict[int, Admission]:
        """Groups that go on."""
        return {admission.group: admission for admission in self.snapshot.unfinished}

    @property
    def open(self) -> dict[int, PromptGroup]:
        """Of them, those that are generated."""
        return {group.group: group for group in self.restored.open}

    @property
    def losses_are_told(self) -> bool:
        """Whether a person is told that something is missing, unless it was told to nobody who lived."""
        return self.attempts > 1 or any(word in note for note in self.restored.notes for word in TOLD_LOSSES)


class RestartJudge:
    """Compares what is there with what the driver was told.

    Args:
        dropped: groups that the queue gave up, whoever was told. updates: by version, as the trainer counts them.
        require: called with (invariant, whether it holds, text, values).
    """

    def __init__(
        self, reopened: Reopened, *, dropped: Collection[int], updates: dict[int, int], require: Require
    ) -> None:
        self._reopened = reopened
        self._dropped = dropped
        self._updates = updates
        self._require = require

    def check_nothing_is_lost(self, expected: Expected) -> None:
        """Everything that was acknowledged is there, as it was."""
        state, restored, live = self._reopened.state, self._reopened.restored, self._reopened.live
        steps = expected.step_of()
        for group, admission in expected.admitted.items():
            if group in expected.dropped or steps.get(group, state.train_step + 1) <= state.train_step:
                self._require("exactly once", group not in live, "group {} ended, and is there again", group)
            elif group not in self._dropped:
                self._check_group(admission, expected)
        again = len(expected.replay(state.train_step))
        self._require("exactly once", restored.replay >= again, "{} of {} steps again", restored.replay, again)
        version = expected.version
        self._require("versions", restored.version >= version, "goes on after {}, not {}", restored.version, version)
        cursor = max([state.prompt_cursor, *(a.prompt + 1 for a in expected.admitted.values())])
        self._require(
            "exactly once", restored.prompt_cursor >= cursor, "prompt {} of {}", restored.prompt_cursor, cursor
        )

    def check_consistent(self) -> None:
        """Whatever is missing, what is there fits together."""
        snapshot, restored = self._reopened.snapshot, self._reopened.restored
        counts = snapshot.ledger
        self._require("ledger", counts.error == 0, "ledger/error is {} after a restart: {}", counts.error, counts)
        for version, update in restored.version_updates.items():
            known = min(self._updates.get(version, update), self._reopened.end)
            older = update < known and self._reopened.losses_are_told  # its record is lost: what it sampled is too old
            fits = update == known or older
            self._require("versions", fits, "version {} holds {} updates, not {}", version, update, known)

    # ---- inside

    def _check_group(self, admission: Admission, expected: Expected) -> None:
        group, end = admission.group, self._reopened.end
        found = self._reopened.live.get(group)
        self._require("exactly once", found is not None, "group {} was acknowledged and is lost", group)
        as_it_was = replace(admission, admitted_update=min(admission.admitted_update, end))
        self._require("exactly once", found == as_it_was, "{} goes on as {}", as_it_was, found)
        held = self._reopened.open.get(group)
        if group in expected.ready:
            self._require("exactly once", held is None, "group {} was ready and is to be generated again", group)
        if held is None:
            return
        have_of = dict(enumerate((len(t), t.closed) for t in held.trajectories))
        for number, told in expected.of_group(group).items():
            have = have_of.get(number, (0, False))
            kept = have[0] >= told.length and have[1] >= told.closed
            self._require("exactly once", kept, "trajectory {} of group {} is {}, not {}", number, group, have, told)


def facts_after(reopened: Reopened, expected: Expected) -> Iterator[Fact]:
    """What the driver is as good as told now."""
    open_groups = reopened.open
    for group, admission in reopened.live.items():
        yield admission
        if group not in open_groups:
            yield Ready(group)
            continue
        for number, trajectory in enumerate(open_groups[group].trajectories):
            yield Held(group, number, len(trajectory), trajectory.closed)
    for step, batch in expected.replay(reopened.state.train_step).items():
        if step <= reopened.end:
            yield Trained(batch, step)
    yield Published(reopened.restored.version)
