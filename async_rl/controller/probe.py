"""Compares the logprobs of engines and trainer at equal weights, after a publish.

    publish   every replica is paused            -> a few probe requests wait there, before all other requests
              the replica loads v and resumes    -> the probe requests are decoded first
    train     the step after v                   -> a copy of v scores them, before the next version is exported

After the first comparison the trainer does not wait for answers: if a version is exported before those of an earlier
one are there, it keeps the copy of the earlier version, and the new one is not probed.

The prompts are fixed: the first tokens of prompts of the run. Tokens are sampled from the full distribution. The
trainer scores them over the routing rows of the engine, so engine and trainer differ by rounding only. The difference
is far larger if an engine serves other weights than it reports, or computes with them incorrectly.

k3 is the mean over tokens of exp(d) - 1 - d, with d = trainer - engine logprob. Tokens with d = 0.1 and d = -0.1 give
(0.00517 + 0.00484) / 2 = 0.0050. If the engine returns no rows of a mixture of experts, a near-tie in a router may be
decided differently, and a few tokens can have any difference. Then the largest quarter of the tokens is left out.

The bound in half precision follows the noise of the run: see `MismatchConfig.bound`. A resumed run measures it anew.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agent_loop.engine import GenerateRequest, SamplingConfig
from async_rl.config import MismatchConfig
from async_rl.controller.parts import Trainer
from async_rl.inference.pool import Member, ReplicaPool
from async_rl.inference.replica import EngineReplica
from async_rl.trainer.batch.advantage import Advantages
from async_rl.trainer.batch.training_batch import TrainingBatch, training_batch
from async_rl.trainer.mismatch import MismatchError, k3_of
from async_rl.trainer.rank_methods import TrainerRank
from message_queue.errors import AnswerError, ReplicaLostError
from message_queue.heads import head_of
from message_queue.tokens import Int32Array, RoutingSpec, StopReason, TokenOutput
from message_queue.training_sequence import GroupContent, content_of
from message_queue.trajectory import PromptGroup, Trajectory

PROMPT_TOKENS = 128  # longest prompt of a probe
FIRST_PROBES = 5  # whose k3 is the noise of the run
TRIMMED = 1 / 4  # share of the tokens that is left out without the engine's experts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Answer:
    """Answer of a replica to a probe request."""

    replica: str
    """Name of the replica."""
    prompt: Int32Array
    """int32 [p], token ids."""
    segments: Sequence[TokenOutput]
    """The first segment that the probed version sampled; empty if none."""


class Probe:
    """Sends probe requests to the replicas and compares the answers with the trainer.

    Args:
        pool: the replicas.
        config: number and length of the probes.
        dtypes: dtypes of engine and trainer.
        same_experts: whether both compute with the same experts: a dense model, or trainer.router_replay=R3.
        temperature: sampling temperature of the run.
        max_tokens: longest sequence that an engine serves.
        timeout_s: bound on one answer, the pause of a publish included; a replica that exceeds it counts as failed.
        routing: layers and shape of the routing rows that engines return; None if they return none.

    Attributes:
        num_prompts: sequences that each replica decodes.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        *,
        config: MismatchConfig,
        dtypes: Sequence[str],
        same_experts: bool,
        temperature: float,
        max_tokens: int,
        timeout_s: float,
        routing: RoutingSpec | None,
    ) -> None:
        self._pool = pool
        self.num_prompts = config.prompts
        self._num_tokens = min(config.tokens, max_tokens - 1)
        self._max_prompt = min(PROMPT_TOKENS, max_tokens - self._num_tokens)
        self._config = config
        self._dtypes = dtypes
        self._trimmed = 0.0 if same_experts else TRIMMED
        self._noise: list[float] = []
        self._timeout_s = timeout_s
        self._sampling = SamplingConfig(temperature=temperature)
        self._routing = routing
        self._prompts: list[Int32Array] = []
        self._asked: dict[int, list[asyncio.Task[_Answer | None]]] = {}

    @property
    def has_prompts(self) -> bool:
        """Whether `take_prompts` found a prompt."""
        return bool(self._prompts)

    def take_prompts(self, contents: Sequence[GroupContent]) -> None:
        """Use the prompts of these groups, one per group, for the rest of the run."""
        sequences = [sequences[0] for content in contents if (sequences := [s for t in content for s in t if s.runs])]
        prompts = [sequence.token_ids[: sequence.runs[0].start] for sequence in sequences]
        self._prompts = [prompt[: self._max_prompt] for prompt in prompts[: self.num_prompts]]

    def ask(self, member: Member, *, version: int) -> None:
        """Send the prompts to a replica; `compare` uses only tokens that `version` sampled."""
        tasks = self._asked.setdefault(version, [])
        for number, prompt in enumerate(self._prompts):
            tasks.append(asyncio.create_task(self._decode(member, number, prompt, version=version)))

    def ask_all(self, *, version: int) -> None:
        """`ask` every live replica."""
        for member in self._pool.live:
            self.ask(member, version=version)

    def has_answers(self, version: int) -> bool:
        """Whether all requests about `version` so far have ended."""
        return all(task.done() for task in self._asked.get(version, ()))

    def cancel(self) -> None:
        """Cancel the requests that were not compared yet."""
        for task in (task for tasks in self._asked.values() for task in tasks):
            task.cancel()
        self._asked.clear()

    async def compare(self, version: int, trainer: Trainer) -> float:
        """Largest k3 in nat between a replica and the trainer, which must score with `version`; NaN without answers.

        Raises:
            MismatchError: the k3 is larger than `MismatchConfig.bound`.
            EngineError: an engine refused a probe.
        """
        found = await asyncio.gather(*self._asked.get(version, ()))
        self._asked.pop(version, None)
        answers = [answer for answer in found if answer is not None and any(map(len, answer.segments))]
        if not answers:
            return math.nan
        batch = self._batch(answers, version=version)
        replicas = [answer.replica for answer in answers]
        scored = await trainer.call(TrainerRank.score, batch)
        k3 = k3_of_replicas(scored, batch, replicas=replicas, trimmed=self._trimmed)
        worst = max(k3, key=lambda replica: math.inf if math.isnan(k3[replica]) else k3[replica])
        bound = self._config.bound(dtypes=self._dtypes, noise=self._noise)
        if not k3[worst] <= bound:
            raise MismatchError(
                f"{worst} and the trainer disagree about version {version}: mismatch/k3_probe is {k3[worst]:.3g} at "
                f"equal weights, more than mismatch.max_k3={self._config.max_k3}, here {bound:.3g}; the engine does "
                "not serve the published weights, or computes with them differently. Set mismatch.max_k3=null to only "
                "report the value, or a number as bound"
            )
        if len(self._noise) < FIRST_PROBES:
            self._noise.append(k3[worst])
        return k3[worst]

    # ---- inside

    async def _decode(self, member: Member, number: int, prompt: Int32Array, *, version: int) -> _Answer | None:
        """Decode one probe; None if the replica died or its answer was refused."""
        name = f"probe{version}-{number}"
        request = GenerateRequest(
            request_id=f"{name}#0.",
            token_ids=prompt,
            max_new_tokens=self._num_tokens,
            sampling=self._sampling,
            session=name,
            cache_salt=name,
        )
        try:
            async with self._pool.calling(member, timeout_s=self._timeout_s, late="did not answer a probe"):
                segments = await member.replica.call(EngineReplica.generate, request)
        except (AnswerError, ReplicaLostError):
            return None
        sampled = [segment for segment in segments if segment.weights.version == version]
        return _Answer(replica=member.name, prompt=prompt, segments=sampled[:1])

    def _batch(self, answers: Sequence[_Answer], *, version: int) -> TrainingBatch:
        """A training batch with one sequence per answer."""
        groups: list[PromptGroup] = []
        for number, answer in enumerate(answers):
            trajectory = Trajectory(routing=self._routing)
            trajectory.observe(answer.prompt)
            for segment in answer.segments:
                trajectory.extend(segment)
            trajectory.close(stop_reason=StopReason.LENGTH, reward=0.0)
            groups.append(
                PromptGroup(
                    group=number, prompt=number, admitted_version=version, admitted_update=0, trajectories=[trajectory]
                )
            )
        nothing = Advantages(values=np.zeros(len(groups), np.float32), informative=np.ones(len(groups), np.bool_))
        return training_batch(
            [head_of(group) for group in groups],
            [content_of(group) for group in groups],
            advantages=nothing,
            current_update=0,
            version_updates={version: 0},
            temperature=self._sampling.temperature,
        )


def k3_of_replicas(
    scored: Sequence[torch.Tensor], batch: TrainingBatch, *, replicas: Sequence[str], trimmed: float = 0.0
) -> Mapping[str, float]:
    """Replica -> k3 in nat over its tokens; infinite or NaN if a logprob of the trainer is.

    Args:
        scored: the trainer's logprobs [n] of each sequence.
        batch: the sequences with their behaviour logprobs.
        replicas: name of the replica that sampled each sequence.
        trimmed: share of the tokens that is left out, those with the largest k3.
    """
    k3: dict[str, float] = {}
    for replica in dict.fromkeys(replicas):
        of = [number for number, name in enumerate(replicas) if name == replica]
        ours = torch.cat([scored[number] for number in of]).double()
        theirs = torch.from_numpy(np.concatenate([batch.loss_tokens(number).logprobs for number in of])).double()
        tokens = k3_of(ours, theirs)
        if tokens.isfinite().all():
            tokens = tokens.sort().values[: len(tokens) - int(trimmed * len(tokens))]
        k3[replica] = float(tokens.mean())
    return k3
