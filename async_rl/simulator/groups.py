"""Where every group and prompt is, over all restarts: by the events that the queue applied, and by what it answered.

A call is answered after its events are written, so what was answered is there after a restart. An event that was
applied and not answered may be there or not. What a restart says of itself is compared with both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from async_rl.controller.checkpoints import RunState
from async_rl.rollout.content.format import CallStarted, Forked, RolloutRecord, Scored, TrajectoryClosed
from async_rl.rollout.group_contents import StoredContent
from async_rl.rollout.rollouter import session_name
from async_rl.simulator.violations import require
from message_queue.events import Admitted, Dropped, Event, Trained
from message_queue.ledger import DropKind
from message_queue.recovery import Restored
from message_queue.state import QueueSnapshot
from message_queue.trajectory import Admission, Trajectory

if TYPE_CHECKING:
    from async_rl.simulator.world import World

End = Literal["trained", "dropped", "requeued"]
_Length = tuple[int, bool]  # tokens, whether the trajectory is closed
_EXPIRED = (DropKind.EXPIRED,)
_REASONS = {"wait": (), "drop": _EXPIRED, "mask": _EXPIRED, "recycle": (*_EXPIRED, DropKind.REQUEUED)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopened:
    """State of a run at its start."""

    state: RunState
    """Of the checkpoint."""
    restored: Restored
    """What the queue has found."""
    stored: StoredContent
    """What the driver has read of its groups."""
    snapshot: QueueSnapshot
    """The queue now."""
    attempts: int
    """To open the journal, this one included, since one succeeded."""
    end: int
    """Optimizer updates once all that was trained is repeated."""

    @property
    def live(self) -> dict[int, Admission]:
        """Groups in flight."""
        return {admission.group: admission for admission in self.snapshot.unfinished}

    @property
    def open(self) -> dict[int, Sequence[Trajectory]]:
        """Groups whose rollouts continue, and their trajectories."""
        groups = self.stored.groups
        return {a.group: groups[a.group].trajectories if a.group in groups else () for a in self.restored.open}


class GroupAccount:
    """Groups and prompts of one run over all its restarts. Methods raise Violation."""

    def __init__(self, world: World) -> None:
        self.admissions: dict[int, Admission] = {}
        self._world = world
        self._config = world.scenario.config
        self._damaged = world.disk.damaged_groups  # grows
        self._ends: dict[int, End] = {}  # an end that was applied and not written is taken back by a restart
        self._batches: dict[int, tuple[int, ...]] = {}  # last train step -> groups, as the trainer got them
        self._tokens: dict[int, int] = {}  # with gradient, by the same step
        self.replayed: set[int] = set()  # steps of `_batches` that a restart repeats as they were
        self._answered: dict[int, Literal["admitted", "ready", "dropped"]] = {}
        self._answered_step = self._answered_version = 0
        self._stored: dict[int, dict[tuple[int, int], _Length]] = {}  # group -> (trajectory, path) -> length
        self._times_before: Mapping[int, int] = {}  # how often prompts were requeued by a journal that is gone
        self._requeued: deque[int] = deque()  # prompts that the queue admits first
        self._returned: deque[int] = deque()  # prompts that the driver admits before new ones
        self._next_prompt = 0

    # ---- actions of the queue

    def followed(self, event: Event) -> None:
        """The state of the queue changed."""
        match event:
            case Admitted():
                self._admitted(event.admission)
            case Dropped():
                kind = event.reason.kind
                excused = kind is DropKind.ROLLOUT_FAILED and self._world.may_drop
                spread = kind is DropKind.NO_SPREAD and self._config.rollout.drop_without_spread > 0
                allowed = excused or spread or kind in _REASONS[self._config.staleness.policy]
                require("failure", allowed, "group {} was dropped: {}", event.group, event.reason)
                self._dropped(event.group, requeue=event.requeue, expired=False)
                if not event.requeue and kind is DropKind.EXPIRED and self._config.staleness.policy == "recycle":
                    prompt = self.admissions[event.group].prompt
                    times = self._times_requeued(prompt)
                    enough = times >= self._config.staleness.max_requeues
                    require("exactly once", enough, "prompt {} given up after {} times", prompt, times)
                if event.requeue:
                    self._requeued.append(self.admissions[event.group].prompt)
            case Trained(groups=groups, train_step=step):
                known = self._batches.get(step)
                require("exactly once", groups == known, "step {} trained {}, not {}", step, groups, known)
                self._ends |= dict.fromkeys(groups, "trained")
            case _:
                pass

    def _admitted(self, admission: Admission) -> None:
        if self._requeued:
            expected = self._requeued.popleft()
        elif self._returned:
            expected = self._returned.popleft()
        else:
            expected, self._next_prompt = self._next_prompt, self._next_prompt + 1
        require("exactly once", admission.prompt == expected, "{}; the next prompt is {}", admission, expected)
        fresh = admission.group not in self.admissions
        require("exactly once", fresh, "group {} was admitted before", admission.group)
        self.admissions[admission.group] = admission

    def _dropped(self, group: int, *, requeue: bool, expired: bool) -> None:
        self._ends[group] = "requeued" if requeue else "dropped"
        if requeue and not expired:
            prompt = self.admissions[group].prompt
            times, most = self._times_requeued(prompt), self._config.staleness.max_requeues
            require("exactly once", times <= most, "prompt {} requeued {} times", prompt, times)

    def _times_requeued(self, prompt: int) -> int:
        return self._prompts_that("requeued").count(prompt) + self._times_before.get(prompt, 0)

    def _prompts_that(self, end: End) -> list[int]:
        return [self.admissions[group].prompt for group, ended in self._ends.items() if ended == end]

    def answered(self, method: str, args: tuple[Any, ...], result: Any) -> None:
        """The queue answered a call, hence its changes are written."""
        match method, args, result:
            case "admit", _, Admission(group=group):
                require("exactly once", result == self.admissions.get(group), "{} was handed out", result)
                self._answered[group] = "admitted"
            case "put", (head,), given_up:
                self._answered[head.group] = "ready" if given_up is None else "dropped"
            case "drop", (group, *_), True:
                self._answered[group] = "dropped"
            case "publish", (version, *_), _:
                self._answered_version = version
            case "trained", _, _:
                self._answered_step = max(self._batches)
            case _:
                pass

    def stored(self, records: Sequence[RolloutRecord]) -> None:
        """Records of the content are written."""
        for record in records:
            what, stored = record.what, self._stored.setdefault(record.group, {})
            tokens = 0 if isinstance(what, TrajectoryClosed | CallStarted | Forked | Scored) else len(what)
            stored[record.trajectory, record.path] = record.at + tokens, isinstance(what, TrajectoryClosed | Scored)

    def rollout_starts(self, session: str) -> None:
        """A rollout of an agent starts, or starts over: its earlier records are not read any more."""
        for group, stored in self._stored.items():
            for number, path in [of for of in stored if session_name(group, of[0]) == session]:
                del stored[number, path]

    def trained(self, groups: tuple[int, ...], *, train_step: int, tokens: int) -> None:
        """The trainer takes the gradient of a batch that ends with `train_step`; `tokens` take part."""
        if train_step in self.replayed:
            known = self._batches[train_step]
            require("exactly once", groups == known, "step {} takes {}, not {}", train_step, groups, known)
        before = {group for step, batch in self._batches.items() if step != train_step for group in batch}
        twice = sorted(before.intersection(groups))
        require("exactly once", not twice, "groups {} are trained again at step {}", twice, train_step)
        self._batches[train_step], self._tokens[train_step] = groups, tokens

    # ---- accounts

    def check_ledger(self, snapshot: QueueSnapshot) -> None:
        """The queue's counts agree with each other."""
        counts = snapshot.ledger
        require("ledger", counts.error == 0, "ledger/error is {}: {}", counts.error, counts)
        require("ledger", counts.token_error == 0, "ledger/token_error is {}: {}", counts.token_error, counts)
        require("ledger", counts.admitted == snapshot.next_group, "{}; ids up to {}", counts, snapshot.next_group)
        open_groups = snapshot.ready + snapshot.open + snapshot.taken
        require("ledger", counts.open == open_groups, "{}; open are {}", counts, open_groups)

    def check_checkpoint(self, state: RunState) -> None:
        """Every prompt up to the cursor was trained once, dropped, or is to be readmitted."""
        trained = [self.admissions[group].prompt for group in self._settled(state.train_step)]
        self._check_prompts([*trained, *state.unfinished_prompts], cursor=state.prompt_cursor)
        expected = state.train_step // self._config.trainer.updates_per_batch * self._config.rollout.groups_per_batch
        require("exactly once", len(trained) == expected, "{} groups trained of {}", len(trained), expected)
        counted = state.queue.ledger.trained
        require("ledger", counted == expected, "the checkpoint counts {} trained, not {}", counted, expected)
        tokens = sum(count for step, count in self._tokens.items() if step <= state.train_step)
        counted = state.queue.ledger.trained_tokens
        require("ledger", counted == tokens, "the checkpoint counts {} trained tokens, not {}", counted, tokens)

    def check_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """`ledger.jsonl` of a run that came to its end names every group once, and a total."""
        named = sorted(r["group"] for r in records if "group" in r)
        require("ledger", named == sorted(self.admissions), "named {}, not {}", named, sorted(self.admissions))
        require("ledger", records[-1]["error"] == 0, "the closing total is {}", records[-1])

    def _check_prompts(self, left: Sequence[int], *, cursor: int) -> None:
        """Prompts that are `left` or dropped are all below the cursor, each once."""
        twice = sorted({p for p in left if left.count(p) > 1})
        require("exactly once", not twice, "prompts {} are trained twice, or trained and still to do", twice)
        beyond = sorted(p for p in left if p >= cursor)
        require("exactly once", not beyond, "prompts {} will be admitted again: the cursor is {}", beyond, cursor)
        lost = sorted(set(range(cursor)).difference(left, self._prompts_that("dropped")))
        require("exactly once", not lost, "prompts {} are neither trained, dropped, nor to be admitted again", lost)

    def _settled(self, train_step: int) -> list[int]:
        """Groups that were trained up to a step."""
        return [group for step, batch in self._batches.items() if step <= train_step for group in batch]

    # ---- a restart

    def journal_removed(self) -> None:
        """Journal and content are gone: everything after the checkpoint did not happen."""
        self._answered, self._stored = {}, {}
        self._answered_step = self._answered_version = 0

    def reopened(self, found: Reopened, *, updates: Mapping[int, int]) -> None:
        """The queue opened its journal: it has everything that was answered, and nothing that had ended.

        Args:
            updates: by version, as the trainer counts them.
        """
        restored, live, open_groups, step = found.restored, found.live, found.open, found.state.train_step
        for group, existing in open_groups.items():
            if group not in self._ends:
                self.check_stored(group, existing, notes=found.stored.notes)
        self._check_answered(found)
        self._ends = {g: end for g, end in self._ends.items() if g < restored.next_group and g not in live}
        if restored.began:  # the checkpoint counts the requeues before it
            self._ends = {
                group: end
                for group, end in self._ends.items()
                if end != "requeued" and self.admissions[group].prompt not in restored.waiting
            }
            self._times_before = found.state.queue.requeues
        self._check_given_up(found, updates)
        self.check_ledger(found.snapshot)
        for version, update in restored.version_updates.items():
            known = min(updates.get(version, update), found.end)
            require("versions", update == known, "version {} holds {} updates, not {}", version, update, known)
        self.admissions = {g: a for g, a in self.admissions.items() if g < restored.next_group} | live
        self._batches = {last: batch for last, batch in self._batches.items() if last <= found.end}
        left = [self.admissions[group].prompt for group in (*self._settled(step), *live)]
        self._check_prompts([*left, *restored.waiting], cursor=restored.prompt_cursor)
        self.replayed = {last for last in self._batches if last > step}
        self._requeued, self._returned = deque(), deque(sorted(restored.waiting))
        self._next_prompt = restored.prompt_cursor
        self._answered = {group: "admitted" if group in open_groups else "ready" for group in live}
        self._answered_step, self._answered_version = found.end, restored.version
        self._stored = {group: _lengths(existing) for group, existing in open_groups.items()}

    def check_stored(self, group: int, existing: Sequence[Trajectory], *, notes: Sequence[str]) -> None:
        """Everything of a group that was stored is there; if it was damaged, one of the notes says so."""
        have_of = _lengths(existing)
        noted = group in self._damaged and any(f"group {group}:" in note for note in notes)
        for (number, path), stored in self._stored.get(group, {}).items():
            have = have_of.get((number, path), (0, False))
            kept = have[0] >= stored[0] and have[1] >= stored[1]
            text = "path {} of trajectory {} of group {} is {}, not {}"
            require("exactly once", kept or noted, text, path, number, group, have, stored)

    def _check_answered(self, found: Reopened) -> None:
        state, restored = found.state, found.restored
        settled = self._settled(state.train_step)
        for group, answer in self._answered.items():
            if answer == "dropped" or group in settled:
                again = group in found.live or group in restored.given_up
                require("exactly once", not again, "group {} ended, and is there again", group)
            elif group in found.live:
                admission, live = self.admissions[group], found.live[group]
                as_it_was = replace(admission, admitted_update=min(admission.admitted_update, found.end))
                require("exactly once", live == as_it_was, "{} goes on as {}", as_it_was, live)
                again = answer == "ready" and group in found.open and group not in self._damaged
                require("exactly once", not again, "group {} was ready and is to be generated again", group)
        intact = state.train_step
        for step, batch in sorted(self._batches.items()):
            if intact < step <= self._answered_step and self._damaged.isdisjoint(batch):
                intact = step
            elif step > intact:
                break
        require("exactly once", found.end >= intact, "steps up to {} again, not {}", found.end, intact)
        version = self._answered_version
        require("versions", restored.version >= version, "goes on after {}, not {}", restored.version, version)

    def _check_given_up(self, found: Reopened, updates: Mapping[int, int]) -> None:
        """Groups that are gone are given up for their age, by this attempt to open the journal or one cut short."""
        restored, step = found.restored, found.state.train_step
        ended = (group for group, end in self._ends.items() if end != "trained")
        gone = restored.given_up.union(self._answered).difference(found.live, ended, self._settled(step))
        for group in gone:
            known = group in restored.given_up or found.attempts > 1
            require("exactly once", known, "group {} was acknowledged and is lost", group)
            admission, per_batch = self.admissions[group], self._config.trainer.updates_per_batch
            policy, bound = self._config.staleness.policy, self._config.staleness.max_staleness
            # An attempt that has not seen the damage yet repeats all steps, and the group is older at their end.
            end = max(found.end, self._answered_step) if self._damaged and found.attempts > 1 else found.end
            age = end - min(end, updates[admission.admitted_version]) + per_batch - 1
            waits = policy == "wait"  # after damage, groups to retrain take the places of others
            excused = bool(self._damaged) if waits else age > bound
            require("failure", excused, "{} is dropped by a restart under {}", admission, policy)
            requeue = admission.prompt in restored.waiting
            self._dropped(group, requeue=requeue, expired=waits)
        noted = not restored.given_up or any("dropped" in note for note in restored.notes)
        require("failure", noted, "groups {} are dropped without a note", sorted(restored.given_up))


def _lengths(trajectories: Sequence[Trajectory]) -> dict[tuple[int, int], _Length]:
    """By (trajectory, path)."""
    return {(number, path.path): (len(path), t.closed) for number, t in enumerate(trajectories) for path in t.paths}
