"""What must hold in every run, judged from the outside: by what the parts told each other, and by what was trained.

Nothing here asks the code under test what is right. Tokens, logprobs and rows are recomputed from weights and
context (`model.py`), updates and versions are counted where the trainer makes them, groups where the queue hands them
out (`groups.py`).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from agent_loop.engine import GenerateRequest
from async_rl.controller.checkpoints import RunState
from async_rl.rollout.group_contents import StoredContent
from async_rl.rollout.rollouter import session_name
from async_rl.simulator import model
from async_rl.simulator.engine import INITIAL
from async_rl.simulator.groups import GroupAccount, Reopened
from async_rl.simulator.trajectory_checks import Rollout, TrajectoryJudge
from async_rl.simulator.violations import require
from async_rl.trainer.batch.training_batch import TrainingBatch
from message_queue.events import Admitted, Event, Loaded, Published
from message_queue.heads import GroupHead
from message_queue.recovery import Restored
from message_queue.state import QueueSnapshot
from message_queue.tokens import TokenOutput, WeightVersion
from message_queue.trajectory import Admission

if TYPE_CHECKING:
    from async_rl.simulator.world import World


def _root(session: str) -> str:
    """Session of the root path."""
    return session.partition("-p")[0]


_Rewarded = tuple[int, float, int]  # a trained rollout: its group in the batch, its reward, its sampled tokens


def _advantage(group: int, reward: float, rollouts: Sequence[_Rewarded], name: str) -> float:
    """Advantage of a rollout: relative to its group (grpo), or to the tokens of the batch (reinforce_plus_plus)."""
    if name == "grpo":
        rewards = [other for number, other, _ in rollouts if number == group]
    else:
        rewards = [other for _, other, sampled in rollouts for _ in range(sampled)]
    spread = len(set(rewards)) > 1
    return (reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6) if spread else 0.0


_FINISHED = 1 << 30  # tokens: nothing is generated any more


class Oracle:
    """Facts of one run over all its restarts. Methods raise Violation."""

    def __init__(self, world: World) -> None:
        self.groups = GroupAccount(world)
        self._world = world
        self._config = world.scenario.config
        self._digests: dict[int, str] = {0: INITIAL}  # by version
        self._updates: dict[int, int] = {0: 0}  # by version
        self._steps: dict[int, str] = {}  # train step -> digest
        self._served = self._published = 0
        self._loaded: dict[str, int] = {}  # replica -> version
        self._loading: set[str] = set()
        self.taken: list[GroupHead] = []  # the newest batch
        self._rollouts: dict[str, Rollout] = {}  # by session
        self._state = RunState()  # of the checkpoint that the journal is opened with
        self._attempts = 0  # to open it, since one succeeded
        self._new_driver = True

    # ---- over restarts

    def driver_starts(self) -> None:
        """With new replicas. No older driver may be heard any more."""
        self._loaded = {}
        self._new_driver = True
        self._loading = set()

    def queue_starts(self, state: RunState) -> None:
        """It is about to open its journal, with the checkpoint of `state`."""
        self._state = state
        self._attempts += 1

    def journal_removed(self) -> None:
        """A person removed the directory of the journal."""
        self.groups.journal_removed()
        self._attempts = 0

    def reopened(self, restored: Restored, stored: StoredContent, snapshot: QueueSnapshot) -> None:
        """The journal is open, and the content of its groups was read."""
        found = Reopened(
            state=self._state,
            restored=restored,
            stored=stored,
            snapshot=snapshot,
            attempts=self._attempts,
            end=self._state.train_step + restored.replay * self._config.trainer.updates_per_batch,
        )
        self._attempts = 0
        self.groups.reopened(found, updates=self._updates)
        self._served = self._published = restored.version
        self._digests = {v: d for v, d in self._digests.items() if v <= restored.version}
        self._updates = {v: min(u, found.end) for v, u in self._updates.items() if v <= restored.version}
        self._continue_rollouts(found)
        self._new_driver = False

    def _continue_rollouts(self, found: Reopened) -> None:
        before, self._rollouts = self._rollouts, {}
        of_agents = self._world.scenario.agent is not None
        for group in found.live:
            existing = found.open.get(group)
            for i in range(2 * self._config.rollout.trajectories_per_group):  # with those that make up for failed ones
                session = session_name(group, i)
                self._rollouts |= {name: of for name, of in before.items() if _root(name) == session}
                rollout = self.session(session)
                rollout.interrupted = True
                trajectory = existing[i] if existing is not None and i < len(existing) else None
                kept = 0 if trajectory is None else len(trajectory)
                if existing is None or (trajectory is not None and trajectory.closed):
                    kept = _FINISHED
                elif of_agents:  # it starts over
                    kept = 0
                rollout.kept = kept if self._new_driver else min(kept, rollout.kept)
                damaged = group in self._world.disk.damaged_groups
                if existing is not None and damaged:  # calls that are forgotten are repeated
                    turns = [] if trajectory is None else trajectory.turns[:-1]
                    answered = (segment.token_ids for turn in turns for segment in turn.segments)
                    calls = sum(int((ids == model.CALL).sum()) for ids in answered)
                    rollout.tool_calls = min(calls, rollout.tool_calls)

    def moved(self, groups: Collection[int], stored: StoredContent) -> None:
        """Groups of a dead worker continue with their stored records."""
        for group in groups:
            for i in range(2 * self._config.rollout.trajectories_per_group):
                self.session(session_name(group, i)).interrupted = True
            existing = stored.groups[group].trajectories if group in stored.groups else ()
            self.groups.check_stored(group, existing, notes=stored.notes)

    # ---- messages between the parts

    def exported(self, weights: WeightVersion, *, updates: int) -> None:
        """The trainer made a version."""
        known = self._digests.get(weights.version, weights.digest)
        require("versions", weights.digest == known, "{} is made of other weights than {}", weights, known)
        self._digests[weights.version] = weights.digest
        self._updates[weights.version] = updates

    def trained_to(self, train_step: int, digest: str) -> None:
        """The trainer made a step."""
        known = self._steps.get(train_step, digest)
        same = digest == known or train_step not in self.groups.replayed
        require("exactly once", same, "step {} again gives {}, not {}", train_step, digest, known)
        self._steps[train_step] = digest

    def _live_replicas(self) -> set[str]:
        run = self._world.run
        return set() if run is None else {member.name for member in run.pool.live_or_none}

    def loads(self, replica: str) -> None:
        """A replica starts a load; of the live ones, a rolling publish leaves all but a few serving."""
        self._loading = (self._loading | {replica}) & self._live_replicas()
        sync = self._config.sync
        held = sync.mode != "rolling" or len(self._loading) <= sync.max_paused
        require("versions", held, "{} load at the same time, of at most {}", sorted(self._loading), sync.max_paused)

    def loaded_by(self, replica: str, weights: WeightVersion) -> None:
        """A replica took a version."""
        before = self._loaded.get(replica, -1)
        require("versions", weights.version >= before, "{} loaded {} after {}", replica, weights.version, before)
        known = self._digests.get(weights.version)
        require("versions", weights.digest == known, "{} loaded {}; exported was {}", replica, weights, known)
        self._loaded[replica] = weights.version
        self._loading.discard(replica)

    def asked(self, request: GenerateRequest) -> None:
        """An engine is to continue: not before the kept tokens, and with rows that some version gave."""
        tokens, kept = len(request.token_ids), self.session(request.session).kept
        text = "{} is generated again from {}; {} were held"
        require("exactly once", tokens >= kept, text, request.session, tokens, kept)
        if request.forced_experts is None:
            return
        every = [model.weights(digest) for digest in self._digests.values()]
        contexts = model.contexts(request.token_ids.tolist())
        for context, row in zip(contexts, request.forced_experts.experts.tolist(), strict=False):
            known = any(row == weights.row(context) for weights in every)
            require("rows", known, "{} forces a row that no version gave: {}", request.request_id, row)

    def loop_starts(self, session: str) -> None:
        """A worker starts a rollout, or continues it with what was stored."""
        for name, rollout in self._rollouts.items():
            if _root(name) == session:
                rollout.received = []

    def asks(self, request: GenerateRequest) -> None:
        """A worker sends a request: with all that it received."""
        received = self.session(request.session).received
        kept = request.token_ids[: len(received)].tolist() == received
        require("kept", kept, "{} is asked for without a part of {}", request.request_id, received)

    def received(self, request: GenerateRequest, answer: Sequence[TokenOutput]) -> None:
        """A worker received an answer; it may refuse one that is not good."""
        sampled = [token for part in answer for token in part.token_ids.tolist()]
        rollout = self.session(request.session)
        sent = [one for one in rollout.answers if one.request.request_id == request.request_id]
        if sampled and sent and sum(map(len, sent[-1].segments)) == len(sampled):
            rollout.received = [*request.token_ids.tolist(), *sampled]

    def rollout_starts(self, session: str) -> None:
        """A rollout starts, or starts over, without a token."""
        self.groups.rollout_starts(session)
        rollout = self.session(session)
        self._rollouts = {name: rollout for name, rollout in self._rollouts.items() if _root(name) != session} | {
            session: Rollout(session, kept=rollout.kept, interrupted=rollout.interrupted)
        }

    def session(self, name: str) -> Rollout:
        """What was done for the requests of a session."""
        if name not in self._rollouts:
            self._rollouts[name] = Rollout(name)
        return self._rollouts[name]

    def followed(self, event: Event, snapshot: QueueSnapshot) -> None:
        """The state of the queue changed."""
        match event:
            case Published(version=version):
                require("versions", version > self._published, "published {} after {}", version, self._published)
                self._published = version
            case Loaded(version=version):
                require("versions", self._served <= version, "serves {} after {}", version, self._served)
                require("versions", version <= self._published, "serves {}, published {}", version, self._published)
                late = sorted(name for name in self._live_replicas() if self._loaded.get(name, -1) < version)
                require("versions", not late, "{} do not serve {}, which is told loaded", late, version)
                self._served = version
            case Admitted(admission=admission):
                version = admission.admitted_version
                require("versions", version == self._served, "admitted on {}; replicas serve {}", event, self._served)
            case _:
                pass
        self.groups.followed(event)
        self.groups.check_ledger(snapshot)

    # ---- trained batches

    def check_batch(self, batch: TrainingBatch, *, train_step: int) -> None:
        """The trainer is to take the gradient of `batch` with weights that hold `train_step` updates."""
        groups, per_batch = self.taken, self._config.trainer.updates_per_batch
        last, whole = train_step + per_batch, len(groups) == self._config.rollout.groups_per_batch
        require("exactly once", whole, "a batch of {} groups", len(groups))
        for group in groups:
            self._check_group(group)
        tokens = sum(len(batch.loss_tokens(sequence).positions) for sequence in range(len(batch)))
        self.groups.trained(tuple(g.group for g in groups), train_step=last, tokens=tokens)
        split, rollouts = self._check_split(batch), list[_Rewarded]()
        judges = [
            TrajectoryJudge(
                config=self._config,
                batch=batch,
                weights={v: model.weights(d) for v, d in self._digests.items()},
                updates=self._updates,
                update=train_step + mini_batch,
                oldest=last - 1 - self._config.staleness.max_staleness,
            )
            for mini_batch in range(per_batch)
        ]
        for place, group in enumerate(groups):
            prompt = model.prompt_ids(group.prompt)
            for i, trajectory in enumerate(group.trajectories):
                if trajectory.failed:
                    continue
                session = session_name(group.group, i)
                reward, given = trajectory.reward, self.session(session).reward
                require("reward", reward == given, "{} has the reward {}, and was given {}", session, reward, given)
                sampled = judges[split.get(group.group, 0)].check(
                    batch.content(place)[i],
                    len(rollouts),
                    prompt=prompt,
                    rollout_of=lambda path, root=session: self.session(f"{root}-p{path}" if path else root),
                )
                rollouts.append((place, reward, sampled))
        extra = [n for n in batch.trajectory.tolist() if n >= len(rollouts)]
        require("exactly once", not extra, "{} trajectories, too many rows", len(rollouts))
        for number, advantage in zip(batch.trajectory.tolist(), batch.advantages.tolist(), strict=True):
            group, reward, _ = rollouts[number]
            expected = _advantage(group, reward, rollouts, self._config.advantage.name)
            close = math.isclose(advantage, expected, rel_tol=1e-3, abs_tol=1e-4)
            require("advantage", close, "{} of {} has advantage {}, not {}", number, rollouts, advantage, expected)

    def _check_split(self, batch: TrainingBatch) -> dict[int, int]:
        """The mini-batch of each group: whole groups, as many in each."""
        groups = [self.taken[group].group for group in batch.index[:, 0].tolist()]
        pairs = set(zip(groups, batch.mini_batch.tolist(), strict=True))
        split = dict(pairs)
        require("exactly once", len(pairs) == len(split), "groups are in several mini-batches: {}", sorted(pairs))
        per_batch = self._config.trainer.updates_per_batch
        size, sizes = self._config.rollout.groups_per_batch // per_batch, Counter(split.values())
        fits = len(sizes) <= per_batch and all(count <= size for count in sizes.values())
        require("exactly once", fits, "mini-batches of {} groups, not {}", dict(sizes), size)
        return split

    def _check_group(self, group: GroupHead) -> None:
        admission = self.groups.admissions.get(group.group)
        given = Admission(
            group=group.group,
            prompt=group.prompt,
            admitted_version=group.admitted_version,
            admitted_update=group.admitted_update,
        )
        require("exactly once", admission == given, "{} was admitted as {}", given, admission)
        sound = sum(not t.failed for t in group.trajectories)
        whole = sound == self._config.rollout.trajectories_per_group
        require("exactly once", whole, "group {} is incomplete", group.group)
        failed = len(group.trajectories) - sound
        fills = self._config.rollout.failure.on_failed == "fill"
        excused = not failed or (fills and failed == 1 and self._world.may_drop)
        require("failure", excused, "group {} is trained without {} of its rollouts", group.group, failed)
        oldest = min(group.tokens_per_version(), default=0)
        require("versions", oldest >= group.admitted_version, "{} has tokens of version {}", admission, oldest)

    def finish(self, state: RunState, *, train_step: int) -> None:
        """The run is over, with a checkpoint of `state`."""
        steps = self._config.total_train_steps
        done = (state.train_step, train_step)
        require("exactly once", done == (steps, steps), "{} steps in checkpoint and trainer, not {}", done, steps)
        self.groups.check_checkpoint(state)
