"""Batches whose tokens several versions sampled, with the trainer itself as the engine."""

from dataclasses import replace

import numpy as np

from async_rl.trainer.batch.advantage import Advantages
from async_rl.trainer.batch.training_batch import training_batch
from message_queue.heads import head_of
from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.training_sequence import content_of
from message_queue.trajectory import PromptGroup, Trajectory
from tests.parallel.support import EXPERTS, LAYERS, TOP_K, VOCAB

PROMPT = 5
ROUTING = RoutingSpec(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)


def mixed_batch(spans, *, update, seed=0, routing=ROUTING, resume_routing="force", admitted=0, **settings):
    """A batch of random tokens and rows, to be trained after `update` updates; version v has v updates.

    spans: (version, tokens) of each trajectory, in order; a version may be (version, replica).
    """
    rng = np.random.default_rng(seed)
    groups = [
        PromptGroup(
            group=number,
            prompt=number,
            admitted_version=admitted,
            admitted_update=admitted,
            trajectories=[_trajectory(of_one, rng, routing, resume_routing)],
        )
        for number, of_one in enumerate(spans)
    ]
    values = rng.normal(size=len(groups)).astype(np.float32)
    return training_batch(
        [head_of(group) for group in groups],
        [content_of(group) for group in groups],
        advantages=Advantages(values=values, informative=values != 0),
        current_update=update,
        version_updates={version: version for version in range(update + 1)},
        **settings,
    )


def _trajectory(spans, rng, routing, resume_routing):
    made = Trajectory(routing=routing, resume_routing=resume_routing)
    made.observe(rng.integers(0, VOCAB, PROMPT).astype(np.int32))
    at = 0
    for version, tokens in spans:
        version, replica = version if isinstance(version, tuple) else (version, "replica-0")
        first, end = at, len(made.token_ids()) + tokens - 1
        rows = None
        if routing is not None:
            drawn = rng.random((end - first, len(LAYERS), EXPERTS)).argsort(-1)[:, :, :TOP_K]
            rows = RoutedExperts(first_position=first, experts=drawn.astype(routing.dtype))
        made.extend(
            TokenOutput(
                token_ids=rng.integers(0, VOCAB, tokens).astype(np.int32),
                logprobs=np.full(tokens, -1.0, np.float32),
                routed_experts=rows,
                weights=WeightVersion(version, f"digest-{version}"),
                stop_reason=StopReason.ABORT,
                replica=replica,
            )
        )
        at = end
    made.close(stop_reason=StopReason.STOP, reward=0.0)
    return made


def routed_by(trainer, batch, numbers):
    """The batch with rows that the trainer's routers choose, under its weights, in sequences of one version."""
    contents = [list(map(list, group)) for group in batch.contents]
    for number in numbers:
        (update,) = trainer._planner.whole(batch).updates
        alone = replace(update, micro_batches=[[[number]]])
        micro_batches = trainer._micro_batches(batch, alone, replay="R2")
        trainer._forward_backward.logprobs(micro_batches)
        group, trajectory, at = batch.index[number].tolist()
        sequence = contents[group][trajectory][at]
        tables = micro_batches.results[0].tables
        chosen = np.stack([tables[layer].numpy() for layer in LAYERS], axis=1)[: len(sequence.rows)]
        contents[group][trajectory][at] = replace(sequence, rows=chosen.astype(sequence.rows.dtype))
    return replace(batch, contents=[tuple(map(tuple, group)) for group in contents])


def sampled_by(trainer, batch, update, *, where=lambda _run: True):
    """The batch with the trainer's logprobs, under its weights, for the tokens of the version of `update` updates.

    where: takes the tokens of some runs alone.
    """
    part = batch.of_update(update)
    scored = trainer.logprobs(part)
    contents = [list(map(list, group)) for group in batch.contents]
    for number, logprobs in enumerate(scored):
        group, trajectory, at = batch.index[number].tolist()
        sequence = contents[group][trajectory][at]
        given, first, taken = sequence.logprobs.copy(), 0, 0
        for run in sequence.runs:
            if batch.version_updates[run.version] == update:
                if where(run):
                    given[first : first + run.tokens] = logprobs[taken : taken + run.tokens]
                taken += run.tokens
            first += run.tokens
        contents[group][trajectory][at] = replace(sequence, logprobs=given)
    return replace(batch, contents=[tuple(map(tuple, group)) for group in contents])
