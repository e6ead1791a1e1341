"""What must hold in every run, judged from the outside: by what the parts told each other, and by what was trained.

Nothing here asks the code under test what is right. Tokens, logprobs and rows are computed anew from weights and
context (`model.py`), updates and versions are counted where the trainer makes them, groups where the queue hands them
out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tensordict import TensorDict

from async_rl.checkpoints import RunState
from async_rl.rollout.rollouter import session_name
from async_rl.simulate import model
from async_rl.simulate.acknowledged import Acknowledged
from async_rl.simulate.engine import Answered
from async_rl.simulate.policy_changes import PolicyChanges
from async_rl.simulate.prompt_account import PromptAccount
from async_rl.simulate.recycles import Recycles, is_recycled
from async_rl.simulate.restarts import Reopened, RestartJudge, facts_after
from async_rl.simulate.scenario import Scenario
from async_rl.simulate.sessions import Sessions
from async_rl.simulate.trainer import INITIAL
from async_rl.simulate.trajectory_checks import SequenceData, TrajectoryJudge
from message_queue.contract import Admission, Batch, QueueSnapshot
from message_queue.tokens import Int32Array, StopReason, WeightVersion
from message_queue.trajectory import PromptGroup

INVARIANTS = {
    "ledger": "admitted = trained + dropped + open, and each count is what an outsider counts",
    "staleness": "no trained token is older than max_staleness optimizer updates, and its lag is told right",
    "provenance": "each trained token and logprob is what the weights it names give after its context",
    "rows": "a sequence of T tokens has T - 1 rows; each is of the forward pass that the merge rule names",
    "versions": "versions go up, nothing is served or stamped that was not published, no token is older than its group",
    "exactly once": "no group and no prompt is trained twice or skipped; no tool runs twice; no limit is exceeded",
    "failure": "a run stops early, loses a replica or drops a group only where something was broken on purpose",
    "progress": "a run ends: no deadlock, no standstill",
}
DURABLE_AFTER_S = {"always": 0.0, "interval": 12.0, "never": None}  # a sync of a slow disk takes up to 8 s
_LEFT_BEHIND = {"stopped before it was trained", "ended before it was recorded"}  # prompts are not done with these


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        assert invariant in INVARIANTS
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Oracle:
    """Facts of one run over all its restarts. Methods raise Violation.

    Args:
        expected_prompt: token ids of a prompt by its index.
        excused: whether a group may have been dropped for a failed rollout by now.
        serving: names of the replicas in the fleet. clock: virtual seconds.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        expected_prompt: Callable[[int], Int32Array],
        excused: Callable[[], bool],
        serving: Callable[[], Collection[str]],
        clock: Callable[[], float],
    ) -> None:
        self._scenario = scenario
        self._expected_prompt = expected_prompt
        self._excused = excused
        self._serving = serving
        self._weights: dict[str, model.Weights] = {}
        self._per_batch = scenario.updates_per_batch
        self.told = Acknowledged(
            durable_after_s=DURABLE_AFTER_S[scenario.fsync],
            clock=clock,
            shards=scenario.shards,
            updates_per_batch=self._per_batch,
        )
        self._digests: dict[int, str] = {0: INITIAL}
        self._updates: dict[int, int] = {0: 0}  # by version
        self._steps: dict[int, str] = {}  # train step -> digest
        self._served = self._published = 0
        self._loaded: dict[str, int] = {}
        self._prompts = PromptAccount(
            batch_groups=scenario.batch_groups, updates_per_batch=self._per_batch, require=_require
        )
        self._recycles = Recycles(max_recycles=scenario.max_recycles, require=_require)
        self._policies = PolicyChanges(scenario, require=_require)
        self._replayed: dict[int, tuple[int, ...]] = {}
        self._batches: dict[int, tuple[int, ...]] = {}  # by train step
        self._dropped: set[int] = set()
        self._ended: dict[int, str] = {}
        self._admissions: dict[int, Admission] = {}
        self._taken: list[PromptGroup] = []
        self._sessions = Sessions(most=2 * scenario.trajectories_per_group, require=_require)
        self._damaged = False

    # ---- over restarts

    def begin(self) -> None:
        """A driver starts, with new replicas."""
        self._loaded = {}
        self._policies.begin()
        self._recycles.recycling = self._policies.now.policy == "recycle"

    def journal_is_gone(self) -> None:
        """Somebody moved the journal away: what came after the checkpoint never happened."""
        self.told.restart([])

    def reopened(self, found: Reopened, *, damaged: bool, new_driver: bool) -> None:
        """The queue opened its journal.

        Args:
            damaged: the disk gave back what was not written, some time. new_driver: no older one may be heard any more.
        """
        state = found.state
        expected = self.told.expected()
        expected.trained |= {step: b for step, b in self._batches.items() if step <= state.train_step}  # it holds them
        self._damaged = damaged
        given_up = self._policies.given_up(found, expected, admissions=self._admissions, updates=self._updates)
        self._policies.forget_what_is_trained_otherwise(expected, found)
        judge = RestartJudge(found, dropped=self._dropped | given_up.keys(), updates=self._updates, require=_require)
        try:
            judge.check_nothing_is_lost(expected)
        except Violation:
            if not damaged or not found.losses_are_told:
                raise
        judge.check_consistent()
        again = expected.replay(state.train_step)
        self._replayed = {step: batch for step, batch in again.items() if step <= found.end}
        losses = damaged and found.losses_are_told
        recycled = {group: self._admissions[group].prompt for group, prompt in given_up.items() if prompt is None}
        self._recycles.unseen(recycled)
        self._prompts.given_up((p for p in given_up.values() if p is not None), again=recycled.values())
        self._recycles.reopened(found, losses=losses)
        self._prompts.reopened(found, losses=losses, recycled=self._recycles.prompts)
        self._go_on_with(found, new_driver=new_driver)
        self.told.restart(list(facts_after(found, expected)))
        if self._scenario.fsync != "never":
            self.told.all_synced()

    def _go_on_with(self, found: Reopened, *, new_driver: bool) -> None:
        live, restored = found.live, found.restored
        self._served = self._published = restored.version
        self._digests = {v: d for v, d in self._digests.items() if v <= restored.version}
        self._updates = {v: min(u, found.end) for v, u in self._updates.items() if v <= restored.version}
        self._admissions = {g: a for g, a in self._admissions.items() if g < restored.next_group} | live
        self._dropped -= live.keys()
        self._ended = {}
        forgotten = self._damaged or self._scenario.fsync == "never"
        self._sessions.reopened(found, losses=forgotten, new_driver=new_driver)

    def checkpointed(self, state: RunState, records: Sequence[Mapping[str, Any]]) -> None:
        """A checkpoint was written; records: what became of groups so far."""
        dropped = [r["group"] for r in records if r["outcome"] == "dropped" and not is_recycled(r)]
        self._prompts.check(state, dropped={self._admissions[g].prompt for g in dropped if g in self._admissions})

    # ---- what the parts told each other

    def weights(self, digest: str) -> model.Weights:
        """Weights by their digest."""
        if digest not in self._weights:
            self._weights[digest] = model.Weights(digest)
        return self._weights[digest]

    def exported(self, weights: WeightVersion, *, updates: int) -> None:
        """The trainer made a version."""
        known = self._digests.get(weights.version, weights.digest)
        _require("versions", weights.digest == known, "{} is made of other weights than {}", weights, known)
        self._digests[weights.version] = weights.digest
        self._updates[weights.version] = updates

    def trained_to(self, train_step: int, digest: str) -> None:
        """The trainer made a step."""
        if train_step in self._replayed:
            known = self._steps.get(train_step, digest)
            _require("exactly once", digest == known, "step {} again gives {}, not {}", train_step, digest, known)
        self._steps[train_step] = digest

    def loaded_by(self, replica: str, weights: WeightVersion) -> None:
        """A replica took a version."""
        before = self._loaded.get(replica, -1)
        _require("versions", weights.version >= before, "{} loaded {} after {}", replica, weights.version, before)
        known = self._digests.get(weights.version)
        _require("versions", weights.digest == known, "{} loaded {}; exported was {}", replica, weights, known)
        self._loaded[replica] = weights.version

    def answered(self, answer: Answered) -> None:
        """An engine answered."""
        self._sessions.answered(answer)

    def asked(self, session: str, *, tokens: int) -> None:
        """An engine is to go on after `tokens` tokens."""
        self._sessions.asked(session, tokens=tokens)

    def tool_called(self, session: str) -> None:
        """A tool started."""
        self._sessions.tool_called(session)

    def forced_digests(self) -> Sequence[str]:
        """Digests of all versions so far."""
        return list(self._digests.values())

    def ended(self, records: Sequence[Mapping[str, Any]]) -> None:
        """What the queue knows of groups that ended, and may have told nobody yet."""
        self._policies.ended(records)
        self._recycles.ended(records, prompt_of=lambda group: self._admissions[group].prompt)

    def admitted(self, admissions: Sequence[Admission]) -> None:
        """The queue holds groups of these admissions."""
        for admission in admissions:
            self._admitted(admission)
        self._recycles.seen()

    def queue_called(self, method: str, args: tuple[Any, ...]) -> None:
        """The queue did something."""
        if method == "publish":
            version = args[0]
            _require("versions", version > self._published, "published {} after {}", version, self._published)
            self._published = version
        elif method == "loaded":
            version = args[0]
            _require("versions", self._served <= version, "serves {} after {}", version, self._served)
            _require("versions", version <= self._published, "serves {}, published {}", version, self._published)
            late = [name for name in self._serving() if self._loaded.get(name, -1) < version]
            _require("versions", not late, "{} do not serve {}, which is told loaded", late, version)
            self._served = version

    def _admitted(self, admission: Admission) -> None:
        if admission.group in self._admissions:
            known = self._admissions[admission.group]
            _require("exactly once", known == admission, "{} was handed out as {}", known, admission)
            return
        self._admissions[admission.group] = admission
        version = admission.admitted_version
        _require("versions", version == self._served, "admitted on {}; replicas serve {}", admission, self._served)
        if not self._recycles.admitted(admission):
            self._prompts.admitted(admission)

    def check_ledger(self, snapshot: QueueSnapshot) -> None:
        """The queue's counts agree with each other and with what was seen."""
        counts = snapshot.ledger
        _require("ledger", counts.error == 0, "ledger/error is {}: {}", counts.error, counts)
        _require("ledger", counts.token_error == 0, "ledger/token_error is {}: {}", counts.token_error, counts)
        known = counts.admitted == snapshot.next_group or self._damaged
        _require("ledger", known, "{}; ids up to {}", counts, snapshot.next_group)
        held = snapshot.ready + snapshot.open + snapshot.taken
        _require("ledger", counts.open == held, "{}; held are {}", counts, held)

    def records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """What the queue says became of groups."""
        self._ended = {}
        for record in records:
            group, outcome = record.get("group"), record["outcome"]
            if group is None or outcome == "open":
                continue
            _require("ledger", group not in self._ended, "group {} ended twice: {}", group, record)
            self._ended[group] = outcome
            withdrawn = outcome == "dropped" and record["reason"].startswith("admission withdrawn")
            if withdrawn and group not in self._admissions:  # it came and went unseen
                self._admissions[group] = Admission(group=group, prompt=-1, admitted_version=0, admitted_update=0)
            _require("ledger", group in self._admissions, "group {} was never admitted: {}", group, record)
            if outcome == "dropped":
                self._check_reason(record)
                self._dropped.add(group)
                if record["reason"].partition(":")[0] not in _LEFT_BEHIND and not is_recycled(record):
                    self._prompts.dropped.add(self._admissions[group].prompt)

    def _check_reason(self, record: Mapping[str, Any]) -> None:
        cause = record["reason"].partition(":")[0]
        failed = {"rollout failed"} if self._excused() else set[str]()
        allowed = {"admission withdrawn", *_LEFT_BEHIND, *self._policies.reasons(damaged=self._damaged), *failed}
        _require("failure", cause in allowed, "group {} was dropped: {}", record["group"], record["reason"])

    # ---- what is trained

    def taken(self, batch: Batch[PromptGroup]) -> None:
        """The driver got a batch."""
        self._taken = batch.groups

    def check_batch(self, batch: TensorDict, *, train_step: int) -> list[int]:
        """The trainer is to take the gradient of `batch` with weights that hold `train_step` updates; its groups."""
        groups, last = self._taken, train_step + self._per_batch
        _require("exactly once", len(groups) == self._scenario.batch_groups, "a batch of {} groups", len(groups))
        known = self._replayed.get(last, tuple(g.group for g in groups))
        batch_groups = self._batches[last] = tuple(g.group for g in groups)
        _require("exactly once", batch_groups == known, "step {} takes {}, not {}", last, batch_groups, known)
        judges = [
            TrajectoryJudge(
                self._policies.scenario,
                weights={v: self.weights(d) for v, d in self._digests.items()},
                lags={v: train_step + mini_batch - self._updates[v] for v in self._digests},
                oldest=last - 1 - self._policies.scenario.max_staleness,
                updates=self._updates,
                require=_require,
            )
            for mini_batch in range(self._per_batch)
        ]
        data, number = SequenceData.of(batch), 0
        prompts, tokens = [g.prompt for g in groups], sum(sum(d.mask) for d in data)
        self._prompts.trained(prompts, train_step=last, tokens=tokens)
        split = self._check_split(batch)
        for group in groups:
            self._check_group(group)
            judge = judges[split.get(group.group, 0)]
            for i, trajectory in enumerate(group.trajectories):
                if trajectory.stop_reason is StopReason.ERROR:
                    continue
                session = session_name(group.group, i)
                judge.check(
                    trajectory,
                    [d for d in data if d.trajectory == number],
                    prompt=self._expected_prompt(group.prompt),
                    session=session,
                    answers=self._sessions.answers(session),
                    tool_calls=self._sessions.tool_calls(session),
                    interrupted=self._sessions.went_on(group.group),
                )
                number += 1
        _require("exactly once", all(d.trajectory < number for d in data), "{} trajectories, too many rows", number)
        return [g.group for g in groups]

    def _check_split(self, batch: TensorDict) -> dict[int, int]:
        """The mini-batch of each group: whole groups, as many in each."""
        pairs = set(zip(batch["group"].tolist(), batch["mini_batch"].tolist(), strict=True))
        split = dict(pairs)
        _require("exactly once", len(pairs) == len(split), "groups are in several mini-batches: {}", sorted(pairs))
        size = self._scenario.batch_groups // self._per_batch
        sizes = Counter(split.values())
        fits = len(sizes) <= self._per_batch and all(count <= size for count in sizes.values())
        _require("exactly once", fits, "mini-batches of {} groups, not {}", dict(sizes), size)
        return split

    def _check_group(self, group: PromptGroup) -> None:
        admission = self._admissions.get(group.group)
        given = Admission(
            group=group.group,
            prompt=group.prompt,
            admitted_version=group.admitted_version,
            admitted_update=group.admitted_update,
        )
        _require("exactly once", admission == given, "{} was admitted as {}", given, admission)
        sound = sum(t.stop_reason is not StopReason.ERROR for t in group.trajectories)
        whole = sound == self._scenario.trajectories_per_group
        _require("exactly once", whole, "group {} is incomplete", group.group)
        failed = len(group.trajectories) - sound
        excused = not failed or (self._scenario.on_failed == "fill" and failed == 1 and self._excused())
        _require("failure", excused, "group {} is trained without {} of its rollouts", group.group, failed)
        oldest = min(group.tokens_per_version(), default=0)
        _require("versions", oldest >= group.admitted_version, "{} has tokens of version {}", admission, oldest)

    def finish(self, state: RunState, *, train_step: int) -> None:
        """The run is over."""
        steps = self._scenario.steps
        done = (state.train_step, train_step)
        _require("exactly once", done == (steps, steps), "{} steps in checkpoint and trainer, not {}", done, steps)
        self._prompts.check(state)

    def check_records_complete(self, records: Sequence[Mapping[str, Any]]) -> None:
        """`ledger.jsonl` of a run that came to its end names every group once."""
        named = sorted(r["group"] for r in records if "group" in r)
        every = sorted(self._admissions)
        _require("ledger", named == every or self._damaged, "named {}, not {}", named, every)
        total = records[-1]
        _require("ledger", total["error"] == 0, "the closing total is {}", total)


def _require(invariant: str, holds: bool, text: str, *values: object) -> None:
    if not holds:
        raise Violation(invariant, text.format(*values))
