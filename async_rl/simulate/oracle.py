"""What must hold in every run, judged from the outside: by what the parts told each other, and by what was trained.

Nothing here asks the code under test what is right. Tokens, logprobs and rows are computed anew from weights and
context (`model.py`), updates and versions are counted where the trainer makes them, groups where the queue hands them
out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tensordict import TensorDict

from async_rl.checkpoints import RunState
from async_rl.simulate import model
from async_rl.simulate.engine import Answered
from async_rl.simulate.recycles import Recycles, is_recycled
from async_rl.simulate.scenario import Scenario
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
        serving: names of the replicas in the fleet.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        expected_prompt: Callable[[int], Int32Array],
        excused: Callable[[], bool],
        serving: Callable[[], Collection[str]],
    ) -> None:
        self._scenario = scenario
        self._expected_prompt = expected_prompt
        self._excused = excused
        self._serving = serving
        self._weights: dict[str, model.Weights] = {}
        self._updates = {INITIAL: 0}
        self._trained_prompts: dict[int, list[int]] = {}  # train step -> prompts
        self._trained_tokens: dict[int, int] = {}  # train step -> tokens with gradient
        self._dropped_prompts: set[int] = set()
        self.begin(RunState())

    # ---- over restarts

    def begin(self, state: RunState) -> None:
        """A run starts from a checkpoint: what came after it never happened."""
        self._state = state
        self._digests: dict[int, str] = {0: INITIAL} if state.train_step == 0 else {}
        self._served = self._published = state.param_version
        self._loaded: dict[str, int] = {}
        self._admissions: dict[int, Admission] = {a.group: a for a in state.queue.unfinished}
        self._expected_prompts = sorted(state.unfinished_prompts)
        self._next_prompt = state.prompt_cursor
        self._recycles = Recycles(state.queue.recycles, max_recycles=self._scenario.max_recycles, require=_require)
        self._ended: dict[int, str] = {}
        self._taken: list[PromptGroup] = []
        self._acknowledged = state.queue.ledger.trained
        self._answers: dict[str, list[Answered]] = {}
        self._tool_calls: dict[str, int] = {}
        self._trained_prompts = {s: p for s, p in self._trained_prompts.items() if s <= state.train_step}
        self.account(state)

    def checkpointed(self, state: RunState, records: Sequence[Mapping[str, Any]]) -> None:
        """A checkpoint was written; records: what became of groups so far."""
        dropped = [r["group"] for r in records if r["outcome"] == "dropped" and not is_recycled(r)]
        self.account(state, dropped={self._admissions[g].prompt for g in dropped if g in self._admissions})

    def account(self, state: RunState, *, dropped: Collection[int] = ()) -> None:
        """Every prompt up to the cursor was trained once, dropped, or is to be admitted again."""
        trained = [p for step, prompts in self._trained_prompts.items() if step <= state.train_step for p in prompts]
        left = [*trained, *state.unfinished_prompts]
        twice = sorted({p for p in left if left.count(p) > 1})
        _require("exactly once", not twice, "prompts {} are trained twice, or trained and still to do", twice)
        beyond = sorted(p for p in left if p >= state.prompt_cursor)
        _require("exactly once", not beyond, "prompts {} will be admitted again: the cursor is {}", beyond, state)
        lost = sorted(set(range(state.prompt_cursor)) - set(left) - self._dropped_prompts - set(dropped))
        _require("exactly once", not lost, "prompts {} are neither trained, dropped, nor to be admitted again", lost)
        expected = state.train_step * self._scenario.batch_groups
        _require("exactly once", len(trained) == expected, "{} groups trained of {}", len(trained), expected)
        counted = state.queue.ledger.trained
        _require("ledger", counted == expected, "the checkpoint counts {} trained groups, not {}", counted, expected)
        tokens = sum(count for step, count in self._trained_tokens.items() if step <= state.train_step)
        counted = state.queue.ledger.trained_tokens
        _require("ledger", counted == tokens, "the checkpoint counts {} trained tokens, not {}", counted, tokens)

    # ---- what the parts told each other

    def weights(self, digest: str) -> model.Weights:
        """Weights by their digest."""
        if digest not in self._weights:
            self._weights[digest] = model.Weights(digest)
        return self._weights[digest]

    def exported(self, weights: WeightVersion, *, updates: int) -> None:
        """The trainer made a version."""
        self._digests[weights.version] = weights.digest
        self._updates[weights.digest] = updates

    def loaded_by(self, replica: str, weights: WeightVersion) -> None:
        """A replica took a version."""
        before = self._loaded.get(replica, -1)
        _require("versions", weights.version > before, "{} loaded {} after {}", replica, weights.version, before)
        known = self._digests.get(weights.version)
        _require("versions", weights.digest == known, "{} loaded {}; exported was {}", replica, weights, known)
        self._loaded[replica] = weights.version

    def answered(self, answer: Answered) -> None:
        """An engine answered."""
        self._answers.setdefault(answer.session, []).append(answer)

    def tool_called(self, session: str) -> None:
        """A tool started."""
        self._tool_calls[session] = self._tool_calls.get(session, 0) + 1

    def forced_digests(self) -> Sequence[str]:
        """Digests of all versions so far."""
        return list(self._digests.values())

    def ended(self, records: Sequence[Mapping[str, Any]]) -> None:
        """What the queue knows of groups that ended, and may have told nobody yet."""
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
        elif method == "trained":
            self._acknowledged += len(args[0])

    def _admitted(self, admission: Admission) -> None:
        if admission.group in self._admissions:
            known = self._admissions[admission.group]
            _require("exactly once", known == admission, "{} was handed out as {}", known, admission)
            return
        self._admissions[admission.group] = admission
        version = admission.admitted_version
        _require("versions", version == self._served, "admitted on {}; replicas serve {}", admission, self._served)
        if self._recycles.admitted(admission):
            return
        prompt = self._expected_prompts.pop(0) if self._expected_prompts else self._next_prompt
        self._next_prompt += prompt == self._next_prompt
        _require("exactly once", admission.prompt == prompt, "{}; the next prompt is {}", admission, prompt)

    def check_ledger(self, snapshot: QueueSnapshot) -> None:
        """The queue's counts agree with each other and with what was seen."""
        counts = snapshot.ledger
        _require("ledger", counts.error == 0, "ledger/error is {}: {}", counts.error, counts)
        _require("ledger", counts.token_error == 0, "ledger/token_error is {}: {}", counts.token_error, counts)
        _require("ledger", counts.admitted == snapshot.next_group, "{}; ids up to {}", counts, snapshot.next_group)
        held = snapshot.ready + snapshot.open + snapshot.taken
        _require("ledger", counts.open == held, "{}; held are {}", counts, held)

    def records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """What the queue says became of groups."""
        for record in records:
            group, outcome = record.get("group"), record["outcome"]
            if group is None:
                continue
            _require("ledger", group not in self._ended, "group {} ended twice: {}", group, record)
            if outcome == "open":
                continue
            self._ended[group] = outcome
            withdrawn = outcome == "dropped" and record["reason"].startswith("admission withdrawn")
            if withdrawn and group not in self._admissions:  # it came and went unseen
                self._admissions[group] = Admission(group=group, prompt=-1, admitted_version=0, admitted_update=0)
            _require("ledger", group in self._admissions, "group {} was never admitted: {}", group, record)
            if outcome == "dropped":
                self._check_reason(record)
            if outcome == "dropped" and not is_recycled(record):
                self._dropped_prompts.add(self._admissions[group].prompt)

    def _check_reason(self, record: Mapping[str, Any]) -> None:
        cause = record["reason"].partition(":")[0]
        allowed = {"admission withdrawn", "stopped before it was trained"}
        if self._scenario.policy != "wait":
            allowed |= {"expired", *(["recycled"] if self._scenario.policy == "recycle" else [])}
        if self._excused():
            allowed.add("rollout failed")
        _require("failure", cause in allowed, "group {} was dropped: {}", record["group"], record["reason"])
        if cause == "expired" and self._scenario.policy == "recycle":
            self._recycles.gave_up(self._admissions[record["group"]].prompt)

    # ---- what is trained

    def taken(self, batch: Batch[PromptGroup]) -> None:
        """The driver got a batch."""
        self._taken = batch.groups

    def check_batch(self, batch: TensorDict, *, train_step: int) -> list[int]:
        """The trainer is to take the gradient of `batch` with weights that hold `train_step` updates; its groups."""
        groups = self._taken
        prompts = [g.prompt for g in groups]
        _require("exactly once", len(groups) == self._scenario.batch_groups, "a batch of {} groups", len(groups))
        before = [p for step in self._trained_prompts.values() for p in step]
        twice = sorted({p for p in prompts if prompts.count(p) + before.count(p) > 1})
        _require("exactly once", not twice, "prompts {} are trained again at step {}", twice, train_step + 1)
        self._trained_prompts[train_step + 1] = prompts
        judge = TrajectoryJudge(
            self._scenario,
            weights={v: self.weights(d) for v, d in self._digests.items()},
            lags={v: train_step - self._updates[d] for v, d in self._digests.items()},
            require=_require,
        )
        data, number = SequenceData.of(batch), 0
        self._trained_tokens[train_step + 1] = sum(sum(d.mask) for d in data)
        for group in groups:
            self._check_group(group)
            for i, trajectory in enumerate(group.trajectories):
                if trajectory.stop_reason is StopReason.ERROR:
                    continue
                session = f"g{group.group}-t{i}"
                judge.check(
                    trajectory,
                    [d for d in data if d.trajectory == number],
                    prompt=self._expected_prompt(group.prompt),
                    session=session,
                    answers=self._answers.get(session, []),
                    tool_calls=self._tool_calls.get(session, 0),
                )
                number += 1
        _require("exactly once", all(d.trajectory < number for d in data), "{} trajectories, too many rows", number)
        return [g.group for g in groups]

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
        self.account(state)

    def check_records_complete(self, records: Sequence[Mapping[str, Any]]) -> None:
        """`ledger.jsonl` of a run that came to its end names every group once."""
        named = sorted(r["group"] for r in records if "group" in r)
        _require("ledger", named == sorted(self._admissions), "named {}, not {}", named, sorted(self._admissions))
        total = records[-1]
        _require("ledger", total["error"] == 0, "the closing total is {}", total)


def _require(invariant: str, holds: bool, text: str, *values: object) -> None:
    if not holds:
        raise Violation(invariant, text.format(*values))
