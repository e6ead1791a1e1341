"""What must hold in every run, judged from the outside: by what the parts told each other, and by what was trained.

Nothing here asks the code under test what is right. Tokens, logprobs and rows are computed anew from weights and
context (`model.py`), updates and versions are counted where the trainer makes them, groups where the queue hands them
out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from async_rl.batch.training_batch import TrainingBatch
from async_rl.checkpoints import RunState
from async_rl.rollout.rollouter import session_name
from async_rl.simulate import model
from async_rl.simulate.acknowledged import Acknowledged
from async_rl.simulate.engine import Answered
from async_rl.simulate.prompt_account import PromptAccount
from async_rl.simulate.recycles import Recycles
from async_rl.simulate.restarts import GivenUp, Reopened, RestartJudge, check_stored, is_recycled, note_restart
from async_rl.simulate.scenario import Scenario
from async_rl.simulate.sessions import Sessions
from async_rl.simulate.trainer import INITIAL
from async_rl.simulate.trajectory_checks import SequenceData, Trained, TrajectoryJudge
from async_rl.simulate.violations import Violation, require
from message_queue.contract import Admission, Batch, QueueSnapshot
from message_queue.events import Event, Loaded, Published
from message_queue.heads import GroupHead
from message_queue.tokens import Int32Array, WeightVersion
from message_queue.trajectory import Trajectory

_LEFT_BEHIND = {"stopped before it was trained", "ended before it was recorded"}  # prompts are not done with these


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
        self._per_batch = scenario.updates_per_batch
        self.told = Acknowledged(updates_per_batch=self._per_batch)
        self._digests: dict[int, str] = {0: INITIAL}
        self._updates: dict[int, int] = {0: 0}  # by version
        self._steps: dict[int, str] = {}  # train step -> digest
        self._served = self._published = 0
        self._loaded: dict[str, int] = {}
        self._prompts = PromptAccount(batch_groups=scenario.batch_groups, updates_per_batch=self._per_batch)
        recycling = scenario.policy == "recycle"
        self._recycles = Recycles(recycling=recycling, max_recycles=scenario.max_recycles)
        self._given_up = GivenUp(scenario)
        self._replayed: dict[int, tuple[int, ...]] = {}
        self._batches: dict[int, tuple[int, ...]] = {}  # by train step
        self._dropped: set[int] = set()
        self._ended: dict[int, str] = {}
        self._admissions: dict[int, Admission] = {}
        self._taken: list[GroupHead] = []
        self._sessions = Sessions(most=2 * scenario.trajectories_per_group)
        self._damaged = False

    # ---- over restarts

    def begin(self) -> None:
        """A driver starts, with new replicas."""
        self._loaded = {}

    def journal_is_gone(self) -> None:
        """Somebody moved the journal away: what came after the checkpoint never happened."""
        self.told.forget()

    def reopened(self, found: Reopened, *, damaged_groups: Collection[int], new_driver: bool) -> None:
        """The queue opened its journal.

        Args:
            damaged_groups: those with a damaged record of content. new_driver: no older one may be heard any more.
        """
        state = found.state
        expected = self.told
        expected.trained |= {step: b for step, b in self._batches.items() if step <= state.train_step}  # it holds them
        self._damaged = damaged = bool(damaged_groups)
        given_up = self._given_up.check(found, expected, admissions=self._admissions, updates=self._updates)
        judge = RestartJudge(found, dropped=self._dropped | given_up.keys(), updates=self._updates)
        try:
            judge.check_nothing_is_lost(expected)
        except Violation:
            if not damaged or not found.losses_are_told:
                raise
        judge.check_content(expected, damaged=damaged_groups)
        judge.check_consistent()
        again = expected.replay(state.train_step)
        self._replayed = {step: batch for step, batch in again.items() if step <= found.end}
        recycled = {group: self._admissions[group].prompt for group, prompt in given_up.items() if prompt is None}
        self._recycles.unseen(recycled)
        self._prompts.given_up((p for p in given_up.values() if p is not None), again=recycled.values())
        self._recycles.reopened(found)
        self._prompts.reopened(found, recycled=self._recycles.prompts)
        self._go_on_with(found, new_driver=new_driver)
        note_restart(self.told, found)

    def _go_on_with(self, found: Reopened, *, new_driver: bool) -> None:
        live, restored = found.live, found.restored
        self._served = self._published = restored.version
        self._digests = {v: d for v, d in self._digests.items() if v <= restored.version}
        self._updates = {v: min(u, found.end) for v, u in self._updates.items() if v <= restored.version}
        self._admissions = {g: a for g, a in self._admissions.items() if g < restored.next_group} | live
        self._dropped -= live.keys()
        self._ended = {}
        self._sessions.reopened(found, losses=self._damaged, new_driver=new_driver)

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
        require("versions", weights.digest == known, "{} is made of other weights than {}", weights, known)
        self._digests[weights.version] = weights.digest
        self._updates[weights.version] = updates

    def trained_to(self, train_step: int, digest: str) -> None:
        """The trainer made a step."""
        if train_step in self._replayed:
            known = self._steps.get(train_step, digest)
            require("exactly once", digest == known, "step {} again gives {}, not {}", train_step, digest, known)
        self._steps[train_step] = digest

    def loaded_by(self, replica: str, weights: WeightVersion) -> None:
        """A replica took a version."""
        before = self._loaded.get(replica, -1)
        require("versions", weights.version >= before, "{} loaded {} after {}", replica, weights.version, before)
        known = self._digests.get(weights.version)
        require("versions", weights.digest == known, "{} loaded {}; exported was {}", replica, weights, known)
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
        self._given_up.ended(records)
        self._recycles.ended(records, prompt_of=lambda group: self._admissions[group].prompt)
        for record in records:
            if record["outcome"] == "dropped" and record["group"] in self._admissions:
                self._note_dropped(record)  # the driver may die before it is told

    def _note_dropped(self, record: Mapping[str, Any]) -> None:
        group = record["group"]
        self._dropped.add(group)
        if record["reason"].partition(":")[0] not in _LEFT_BEHIND and not is_recycled(record):
            self._prompts.dropped.add(self._admissions[group].prompt)

    def admitted(self, admissions: Sequence[Admission]) -> None:
        """The queue holds groups of these admissions."""
        for admission in admissions:
            self._admitted(admission)
        self._recycles.seen()

    def queue_followed(self, event: Event) -> None:
        """The state of the queue changed."""
        match event:
            case Published(version=version):
                require("versions", version > self._published, "published {} after {}", version, self._published)
                self._published = version
            case Loaded(version=version):
                require("versions", self._served <= version, "serves {} after {}", version, self._served)
                require("versions", version <= self._published, "serves {}, published {}", version, self._published)
                late = [name for name in self._serving() if self._loaded.get(name, -1) < version]
                require("versions", not late, "{} do not serve {}, which is told loaded", late, version)
                self._served = version
            case _:
                pass

    def _admitted(self, admission: Admission) -> None:
        if admission.group in self._admissions:
            known = self._admissions[admission.group]
            require("exactly once", known == admission, "{} was handed out as {}", known, admission)
            return
        self._admissions[admission.group] = admission
        version = admission.admitted_version
        require("versions", version == self._served, "admitted on {}; replicas serve {}", admission, self._served)
        if not self._recycles.admitted(admission):
            self._prompts.admitted(admission)

    def check_ledger(self, snapshot: QueueSnapshot) -> None:
        """The queue's counts agree with each other and with what was seen."""
        counts = snapshot.ledger
        require("ledger", counts.error == 0, "ledger/error is {}: {}", counts.error, counts)
        require("ledger", counts.token_error == 0, "ledger/token_error is {}: {}", counts.token_error, counts)
        known = counts.admitted == snapshot.next_group
        require("ledger", known, "{}; ids up to {}", counts, snapshot.next_group)
        held = snapshot.ready + snapshot.open + snapshot.taken
        require("ledger", counts.open == held, "{}; held are {}", counts, held)

    def records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """What the queue says became of groups."""
        self._ended = {}
        for record in records:
            group, outcome = record.get("group"), record["outcome"]
            if group is None or outcome == "open":
                continue
            require("ledger", group not in self._ended, "group {} ended twice: {}", group, record)
            self._ended[group] = outcome
            require("ledger", group in self._admissions, "group {} was never admitted: {}", group, record)
            if outcome == "dropped":
                self._check_reason(record)
                self._note_dropped(record)

    def _check_reason(self, record: Mapping[str, Any]) -> None:
        cause = record["reason"].partition(":")[0]
        failed = {"rollout failed"} if self._excused() else set[str]()
        allowed = {*_LEFT_BEHIND, *self._given_up.reasons(damaged=self._damaged), *failed}
        require("failure", cause in allowed, "group {} was dropped: {}", record["group"], record["reason"])

    # ---- what is trained

    def taken(self, batch: Batch) -> None:
        """The driver got a batch."""
        self._taken = batch.groups

    def check_batch(self, batch: TrainingBatch, *, train_step: int) -> list[int]:
        """The trainer is to take the gradient of `batch` with weights that hold `train_step` updates; its groups."""
        groups, last = self._taken, train_step + self._per_batch
        require("exactly once", len(groups) == self._scenario.batch_groups, "a batch of {} groups", len(groups))
        known = self._replayed.get(last, tuple(g.group for g in groups))
        batch_groups = self._batches[last] = tuple(g.group for g in groups)
        require("exactly once", batch_groups == known, "step {} takes {}, not {}", last, batch_groups, known)
        judges = [
            TrajectoryJudge(
                self._scenario,
                weights={v: self.weights(d) for v, d in self._digests.items()},
                lags={v: train_step + mini_batch - self._updates[v] for v in self._digests},
                oldest=last - 1 - self._scenario.max_staleness,
                updates=self._updates,
            )
            for mini_batch in range(self._per_batch)
        ]
        data, number = SequenceData.of(batch), 0
        prompts, tokens = [g.prompt for g in groups], sum(sum(d.mask) for d in data)
        self._prompts.trained(prompts, train_step=last, tokens=tokens)
        split = self._check_split(batch)
        for group, content in zip(groups, batch.contents, strict=True):
            self._check_group(group)
            judge = judges[split.get(group.group, 0)]
            for i, trajectory in enumerate(group.trajectories):
                if trajectory.failed:
                    continue
                session = session_name(group.group, i)
                judge.check(
                    Trained.of(content[i]),
                    [d for d in data if d.trajectory == number],
                    prompt=self._expected_prompt(group.prompt),
                    session=session,
                    answers=self._sessions.answers(session),
                    tool_calls=self._sessions.tool_calls(session),
                    interrupted=self._sessions.went_on(group.group),
                )
                number += 1
        require("exactly once", all(d.trajectory < number for d in data), "{} trajectories, too many rows", number)
        return [g.group for g in groups]

    def moved(self, groups: Mapping[int, Sequence[Trajectory]], *, damaged: Collection[int]) -> None:
        """Groups of a dead worker go on with what is stored of them."""
        for group, held in groups.items():
            self._sessions.moved(group)
            if group not in damaged:
                check_stored(group, held, self.told)

    def _check_split(self, batch: TrainingBatch) -> dict[int, int]:
        """The mini-batch of each group: whole groups, as many in each."""
        groups = [self._taken[group].group for group in batch.index[:, 0].tolist()]
        pairs = set(zip(groups, batch.mini_batch.tolist(), strict=True))
        split = dict(pairs)
        require("exactly once", len(pairs) == len(split), "groups are in several mini-batches: {}", sorted(pairs))
        size = self._scenario.batch_groups // self._per_batch
        sizes = Counter(split.values())
        fits = len(sizes) <= self._per_batch and all(count <= size for count in sizes.values())
        require("exactly once", fits, "mini-batches of {} groups, not {}", dict(sizes), size)
        return split

    def _check_group(self, group: GroupHead) -> None:
        admission = self._admissions.get(group.group)
        given = Admission(
            group=group.group,
            prompt=group.prompt,
            admitted_version=group.admitted_version,
            admitted_update=group.admitted_update,
        )
        require("exactly once", admission == given, "{} was admitted as {}", given, admission)
        sound = sum(not t.failed for t in group.trajectories)
        whole = sound == self._scenario.trajectories_per_group
        require("exactly once", whole, "group {} is incomplete", group.group)
        failed = len(group.trajectories) - sound
        excused = not failed or (self._scenario.on_failed == "fill" and failed == 1 and self._excused())
        require("failure", excused, "group {} is trained without {} of its rollouts", group.group, failed)
        oldest = min(group.tokens_per_version(), default=0)
        require("versions", oldest >= group.admitted_version, "{} has tokens of version {}", admission, oldest)

    def finish(self, state: RunState, *, train_step: int) -> None:
        """The run is over."""
        steps = self._scenario.steps
        done = (state.train_step, train_step)
        require("exactly once", done == (steps, steps), "{} steps in checkpoint and trainer, not {}", done, steps)
        self._prompts.check(state)

    def check_records_complete(self, records: Sequence[Mapping[str, Any]]) -> None:
        """`ledger.jsonl` of a run that came to its end names every group once."""
        named = sorted(r["group"] for r in records if "group" in r)
        every = sorted(self._admissions)
        require("ledger", named == every, "named {}, not {}", named, every)
        total = records[-1]
        require("ledger", total["error"] == 0, "the closing total is {}", total)
