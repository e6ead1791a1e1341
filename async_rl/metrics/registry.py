"""Metrics of a train step: key, reduction over steps, unit and meaning."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from async_rl.metrics.lengths import QUANTILES, WINDOW
from message_queue.heads import GroupHead, TrajectoryHead
from message_queue.ledger import DropKind
from message_queue.state import QueueSnapshot
from message_queue.tokens import StopReason

Reduction = Literal["mean", "max", "sum", "last"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Description of a metric."""

    reduction: Reduction
    """How values of several steps become one value."""
    unit: str
    """Unit; empty for a plain number."""
    meaning: str
    """Shown in the report."""


_OF_LAG = {
    "lag0": "tokens sampled by the current weights over a context that only they computed",
    "lag0_mixed": "tokens sampled by the current weights over a context that older weights computed in part",
    "lag1": "tokens sampled one update ago",
    "lag2": "tokens sampled two updates ago",
    "lag3": "tokens sampled three or more updates ago",
}
LAGS = tuple(_OF_LAG)
"""Buckets of tokens by staleness. In `lag0`, trainer and engine differ by rounding only."""
_EXACT = "over the tokens that only rounding can change (exact)"
FILTERS = {
    "clip": "sampled tokens whose ratio is clipped",
    "truncate": "sampled tokens whose weight is cut to its cap",
    "mask": "sampled tokens that a mask drops from the policy term",
}
_MISMATCH = {
    "mismatch/k1": Metric("mean", "nat", "mean of behaviour - current logprob"),
    "mismatch/k3": Metric("mean", "nat", "mean of exp(d) - 1 - d, d = current - behaviour logprob"),
    "mismatch/abs_mean": Metric("mean", "nat", "mean of |d|"),
    "mismatch/abs_p99": Metric("max", "nat", "99th percentile of |d|, from above by at most 9 %"),
    "mismatch/abs_max": Metric("max", "nat", "largest |d|"),
    "mismatch/f2": Metric("mean", "share", "F(2): tokens with |d| > log 2"),
    "mismatch/f5": Metric("mean", "share", "F(5): tokens with |d| > log 5"),
    "mismatch/chi2": Metric("mean", "", "chi-squared of current from behaviour: mean of (exp(d) - 1)^2"),
    "ess/token": Metric("mean", "share", "effective sample size of the token weights exp(d)"),
}

ROUTING = {
    "routing/overlap": Metric("mean", "share", "recorded experts that the live router would choose too"),
    "routing/gate_mass": Metric("mean", "share", "probability that the live router gives to the recorded experts"),
    "routing/refused_fraction": Metric("mean", "share", "recorded experts that trainer.replay_threshold left out"),
    "routing/fallback_fraction": Metric("mean", "share", "rows of real tokens left to the live router"),
}
_LAYER = re.compile(r"(.+)_layer(\d+)")
INFO = "info/"  # followed by a key of `Trajectory.info`


def _by_lag(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics over the tokens of each lag bucket."""
    return {
        f"{key}_{lag}": replace(metric, meaning=f"{key.partition('/')[2]} of {tokens}")
        for key, metric in metrics.items()
        for lag, tokens in _OF_LAG.items()
    }


def _by_sign(key: str, meaning: str) -> dict[str, Metric]:
    """Shares of tokens by sign of the advantage."""
    texts = {f"{key}_{sign}": f"{meaning} with {sign} advantage" for sign in ("positive", "negative")}
    return {key: Metric("mean", "share", text) for key, text in texts.items()}


def _filter_metrics(name: str, meaning: str) -> dict[str, Metric]:
    """Share of tokens that a filter changed: total, by sign of the advantage and by lag bucket."""
    total = {f"{name}/fraction": Metric("mean", "share", meaning)}
    return total | _by_sign(f"{name}/fraction", f"{meaning}, among tokens") | _by_lag(total)


METRICS: dict[str, Metric] = {
    "train_step": Metric("last", "steps", "optimizer steps done"),
    "optimizer_steps": Metric("sum", "steps", "optimizer steps made on the batch (trainer.updates_per_batch)"),
    "param_version": Metric("last", "version", "newest published version"),
    "reward/mean": Metric("mean", "reward", "mean over the trajectories of the batch"),
    "reward/std": Metric("mean", "reward", "standard deviation over the trajectories of the batch"),
    "reward/groups_without_signal": Metric(
        "mean", "share", "groups whose trajectories all have the same reward, for each agent"
    ),
    "reward/groups_all_right": Metric("mean", "share", "groups without signal whose reward is above 0"),
    "reward/groups_all_wrong": Metric("mean", "share", "groups without signal whose reward is 0 or less"),
    "rollout/cut_off_fraction": Metric("mean", "share", "trajectories whose last turn hit a token limit (LENGTH)"),
    "rollout/out_of_turns_fraction": Metric(
        "mean", "share", "trajectories whose last tool calls were not executed: limits.max_turns (TOOL_CALL)"
    ),
    "info/turns": Metric("mean", "turns", "model calls per trajectory"),
    "info/tool_calls": Metric("mean", "calls", "tool calls per trajectory, executed or malformed"),
    "info/tool_errors": Metric("mean", "calls", "tool calls that failed per trajectory"),
    "info/truncated_replies": Metric("mean", "replies", "tool replies that were cut; see limits.max_tool_reply_chars"),
    "info/aborts": Metric("mean", "aborts", "resumed decodes per trajectory"),
    "info/paths": Metric("mean", "paths", "conversations that the calls of an agent program made, per trajectory"),
    "info/retries": Metric("mean", "calls", "retries of an agent program that got the recorded answer, per trajectory"),
    "info/refused_answers": Metric("mean", "answers", "refused engine answers per trajectory, each requested again"),
    "loss": Metric("mean", "nat", "policy loss, aggregated over tokens by loss.aggregation"),
    "grad_norm": Metric("mean", "", "global norm before clipping"),
    "lr": Metric("last", "", "learning rate of the step"),
    "entropy": Metric("mean", "nat", "mean over sampled tokens, current policy"),
    **{key: metric for name, of in FILTERS.items() for key, metric in _filter_metrics(name, of).items()},
    "kl/reference": Metric("mean", "nat", "mean k3 estimate of KL(current || reference), log ratios cut at 3 nat"),
    "kl/proximal": Metric("mean", "nat", "loss.kl_in=reward: log(proximal / reference), mean over tokens in the loss"),
    "kl/penalty": Metric("mean", "reward", "loss.kl_in=reward: mean over trajectories, subtracted from the reward"),
    "critic/loss": Metric("mean", "", "value loss, mean over tokens in the loss and steps of the critic"),
    "critic/explained_variance": Metric(
        "mean", "share", "1 - Var(return - value) / Var(return) over the tokens of the batch; 1 for exact values"
    ),
    "critic/value_mean": Metric("mean", "reward", "mean value of the state before each token in the loss"),
    "critic/grad_norm": Metric("max", "", "largest norm of a gradient of the critic before clipping"),
    "critic/lr": Metric("last", "", "learning rate of the last step of the critic"),
    "critic/updates": Metric("last", "updates", "steps of the critic so far"),
    "critic/staleness": Metric(
        "mean", "updates", "critic steps between the weights that sampled a token and its value, mean over tokens"
    ),
    "teacher/kl_sampled": Metric("mean", "nat", "log(student / teacher), mean over sampled tokens with a teacher"),
    "teacher/kl_forward": Metric("mean", "nat", "KL(teacher || student) over the teacher's top_k and the rest, mean"),
    "teacher/kl_reverse": Metric("mean", "nat", "KL(student || teacher) over the teacher's top_k and the rest, mean"),
    "teacher/scored_fraction": Metric("mean", "share", "tokens in the loss that a teacher scored"),
    "teacher/seconds": Metric("mean", "s", "from the end of a rollout to its scores, mean over rollouts"),
    "teacher/failures": Metric(
        "sum", "tries", "scores that failed or came too late, each asked for once more or given up"
    ),
    "teacher/waiting": Metric("max", "trajectories", "most that waited for one teacher in a rollout worker"),
    "tokens": Metric("sum", "tokens", "sampled tokens in the loss, without groups that have no gradient"),
    "tokens/positive": Metric("sum", "tokens", "tokens in the loss with positive advantage"),
    "tokens/negative": Metric("sum", "tokens", "tokens in the loss with negative advantage"),
    **{f"tokens/{lag}": Metric("sum", "tokens", f"in the loss: {meaning}") for lag, meaning in _OF_LAG.items()},
    "staleness/mean": Metric("mean", "updates", "mean over tokens in the loss, in their mini-batch"),
    "staleness/p99": Metric("max", "updates", "99th percentile over tokens in the loss"),
    "staleness/max": Metric("max", "updates", "maximum over tokens in the loss"),
    "staleness/masked_tokens": Metric("sum", "tokens", "sampled tokens that are too old for the loss"),
    "staleness/masked_fraction": Metric("mean", "share", "masked share of the sampled tokens"),
    **_by_sign("staleness/masked_fraction", "masked share of tokens"),
    **_MISMATCH,
    **_by_lag(_MISMATCH),
    "mismatch/k3_probe": Metric("max", "nat", "k3 of the newest comparison of engine and trainer at equal weights"),
    "old/k3": Metric("mean", "nat", f"k3 of old - behaviour logprob, {_EXACT}"),
    **{
        f"old/k3_{lag}": Metric("mean", "nat", f"k3 of old - behaviour logprob, exact {of}")
        for lag, of in _OF_LAG.items()
    },
    "old/k3_inexact": Metric("mean", "nat", "the same over the other tokens whose version is stored"),
    "old/k3_largest": Metric("max", "nat", f"the same over the tokens of a replica and version, {_EXACT}"),
    "old/movement_k3": Metric("mean", "nat", "k3 of current - old logprob: the movement of the weights alone"),
    "old/exact_fraction": Metric("mean", "share", "tokens in the loss that are exact: their old logprob is verified"),
    "old/missing_fraction": Metric("max", "share", "tokens in the loss whose version is not stored"),
    "old/passes": Metric("mean", "", "tokens that the walk over versions computed, over those of one pass"),
    "old/versions": Metric("mean", "versions", "versions that the walk loaded"),
    "old/stored_share": Metric("mean", "share", "bytes of a stored version over those of the model, on rank 0"),
    "ess/sequence": Metric("mean", "share", "effective sample size of the product of exp(d) over each trajectory"),
    **ROUTING,
    "routing/missing_fraction": Metric("max", "share", "forwarded positions for which the engine returned no row"),
    "routing/bytes_per_token": Metric("mean", "bytes", "row bytes received per token of the batch"),
    "partial/resumed_fraction": Metric("mean", "share", "trajectories that were aborted and resumed at least once"),
    "partial/max_segments": Metric("max", "segments", "most segments of one trajectory"),
    "length/offered_mean": Metric("mean", "tokens", "sampled tokens per trajectory, as if none were given up"),
    "length/given_up_fraction": Metric("last", "share", f"unfinished among the newest {WINDOW} trajectories"),
    "length/trained_mean": Metric("mean", "tokens", "tokens in the loss per trajectory of the batch"),
    **{
        f"length/{kind}_{name}": Metric("last", "tokens", f"{name} of {meaning}, newest {WINDOW} trajectories")
        for kind, meaning in (("offered", "sampled tokens"), ("trained", "tokens in the loss"))
        for name in QUANTILES
    },
    "step/seconds": Metric("sum", "s", "wall time of the step, including the wait for its batch"),
    "idle/trainer": Metric("mean", "share", "time of the step that the trainer waited for a batch"),
    "idle/rollout": Metric("mean", "share", "time of the step that replicas had no request in flight"),
    "queue/ready": Metric("mean", "groups", "finished groups that wait for the trainer"),
    "queue/open": Metric("mean", "groups", "groups that are being generated"),
    "draft/proposed": Metric(
        "last", "tokens", "drafts that the model verified since the start of the replicas, without aborted decodes"
    ),
    "draft/accepted_fraction": Metric("last", "share", "drafts of draft/proposed that became tokens"),
    "sync/seconds": Metric("mean", "s", "newest publish, first pause (or staging) to last resume"),
    "sync/pause_seconds": Metric("mean", "s", "newest publish, longest pause of a replica"),
    "throughput/tokens_per_s": Metric("mean", "tokens/s", "sampled tokens trained per second of wall time"),
    "throughput/train_tflops": Metric(
        "mean", "TFLOP/s", "of a trainer rank while it trains, without recomputation and passes without gradient"
    ),
    "tree/tokens": Metric("mean", "tokens", "tokens of the sequences that the trainer computed with gradient"),
    "tree/unique_tokens": Metric(
        "mean", "tokens", "these with a shared token counted once for each micro-batch (trainer.prefix_sharing)"
    ),
    "tree/compression": Metric("mean", "", "tree/tokens over tree/unique_tokens; 1 if nothing is shared"),
    "throughput/mfu": Metric("mean", "share", "throughput/train_tflops over the peak of the GPU (trainer.peak_flops)"),
    "ledger/admitted": Metric("last", "groups", "admitted since the start of the run"),
    "ledger/trained": Metric("last", "groups", "trained since the start of the run"),
    "ledger/dropped": Metric("last", "groups", "dropped since the start of the run"),
    "ledger/open": Metric("last", "groups", "admitted, neither trained nor dropped"),
    "ledger/requeued": Metric("last", "groups", "dropped groups whose prompt is admitted again"),
    "ledger/without_spread": Metric("last", "groups", "dropped groups whose rewards are all equal"),
    "ledger/error": Metric("last", "groups", "admitted - trained - dropped - open; must be 0"),
    "ledger/trained_tokens": Metric("last", "tokens", "sampled tokens that were trained"),
    "ledger/masked_tokens": Metric("last", "tokens", "tokens of trained groups: too old, failed or untrained"),
    "ledger/dropped_tokens": Metric("last", "tokens", "tokens of dropped groups"),
    "ledger/open_tokens": Metric("last", "tokens", "tokens of finished groups in the queue"),
    "ledger/token_error": Metric("last", "tokens", "generated - trained - masked - dropped - open; must be 0"),
}


def of_layer(key: str, layer: int) -> str:
    """Key of a routing metric for one layer, numbered globally from 0: `routing/overlap_layer3`."""
    return f"{key}_layer{layer}"


def split_layer(key: str) -> tuple[str, int] | None:
    """Inverse of `of_layer`: `routing/overlap_layer3` -> ("routing/overlap", 3); None for any other key."""
    found = _LAYER.fullmatch(key)
    return None if found is None or found[1] not in ROUTING else (found[1], int(found[2]))


def metric_of(key: str) -> Metric | None:
    """Metric of a key; None if the key is not a metric.

    Also accepts keys that are not in METRICS because the model or the task determines them: routing metrics of a layer,
    and `info/` keys for `Trajectory.info`.
    """
    if (found := split_layer(key)) is not None:
        return replace(ROUTING[found[0]], meaning=f"{ROUTING[found[0]].meaning}, in layer {found[1]}")
    custom = Metric("mean", "", "mean of this key of Trajectory.info over the trajectories that have it")
    return METRICS.get(key, custom if key.startswith(INFO) else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Record of one batch and its train steps.

    Raises:
        ValueError: a metric is not in METRICS.
    """

    metrics: Mapping[str, float]
    """Key -> value; `train_step` is required."""
    staleness_tokens: Mapping[int, int]
    """Staleness in optimizer steps -> tokens in the loss."""
    schedule: Sequence[Mapping[str, Any]] | None = None
    """A record per group, see `async_rl.rollout.schedule`; None writes no line to schedule.jsonl."""

    def __post_init__(self) -> None:
        unknown = sorted(key for key in self.metrics if metric_of(key) is None)
        if unknown:
            raise ValueError(f"metrics {unknown} are not in metrics.registry.METRICS; add them with their reduction")


def batch_metrics(groups: Sequence[GroupHead], *, staleness_tokens: Mapping[int, int]) -> dict[str, float]:
    """Metrics that the trajectories of a batch determine.

    Args:
        groups: all groups of the batch, without failed trajectories.
        staleness_tokens: their `staleness_histogram`.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    rewards = np.array([t.reward for t in trajectories], np.float64)
    lags, tokens = np.array([*staleness_tokens]), np.array([*staleness_tokens.values()])
    p99 = np.searchsorted(tokens.cumsum(), math.ceil(0.99 * (tokens.sum() - 1)), side="right")
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **_signal_metrics(groups),
        **_outcome_metrics(trajectories),
        "staleness/mean": float(lags @ tokens / tokens.sum()),
        "staleness/p99": float(lags[p99]),
        "staleness/max": float(lags[-1]),
        "partial/resumed_fraction": float(np.mean([t.num_aborts > 0 for t in trajectories])),
        "partial/max_segments": float(max(t.num_segments for t in trajectories)),
        "routing/bytes_per_token": sum(t.row_bytes for t in trajectories) / sum(t.length for t in trajectories),
        "routing/missing_fraction": sum(t.missing_rows for t in trajectories) / sum(t.length - 1 for t in trajectories),
    }


def _signal_metrics(groups: Sequence[GroupHead]) -> dict[str, float]:
    """Shares of groups with equal rewards of each agent, over groups of two or more trajectories; NaN without any.

    Four groups with the rewards (1, 1), (0, 0), (0, 1), (0, 0): 0.75 without signal, 0.25 all right, 0.5 all wrong.
    """
    several = [group for group in groups if len(group.trajectories) > 1]
    equal = [g for g in several if all(min(values) == max(values) for values in g.rewards_by_agent().values())]
    right = sum(sum(t.reward for t in group.trajectories) > 0 for group in equal)
    counts = {"without_signal": len(equal), "all_right": right, "all_wrong": len(equal) - right}
    return {f"reward/groups_{name}": count / (len(several) or math.nan) for name, count in counts.items()}


def _outcome_metrics(trajectories: Sequence[TrajectoryHead]) -> dict[str, float]:
    """Shares of stop reasons, and the mean of each `info` key over the trajectories that have the key."""
    infos, reasons = [t.info for t in trajectories], [t.stop_reason for t in trajectories]
    return {
        "rollout/cut_off_fraction": reasons.count(StopReason.LENGTH) / len(reasons),
        "rollout/out_of_turns_fraction": reasons.count(StopReason.TOOL_CALL) / len(reasons),
        **{f"{INFO}{key}": mean for key, mean in means_of(infos).items()},
    }


def means_of(infos: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each key over the mappings that have it."""
    keys = dict.fromkeys(key for info in infos for key in info)
    return {key: float(np.mean([info[key] for info in infos if key in info])) for key in keys}


def masking_metrics(
    sampled: NDArray[np.int64], with_gradient: Sequence[int], advantages: NDArray[np.float32]
) -> dict[str, float]:
    """Tokens that are too old for the loss: their number, and their share by sign of the advantage.

    Args:
        sampled: int64 [S], sampled tokens of each trajectory.
        with_gradient: [S], tokens in the loss of each trajectory.
        advantages: float32 [S].
    """
    masked = sampled - np.array(with_gradient, np.int64)
    parts = {"": np.ones(len(sampled), np.bool_), "_positive": advantages > 0, "_negative": advantages < 0}
    shares = {name: float(masked[of].sum() / max(1, sampled[of].sum())) for name, of in parts.items()}
    return {
        "staleness/masked_tokens": float(masked.sum()),
        **{f"staleness/masked_fraction{name}": share for name, share in shares.items()},
    }


def queue_metrics(snapshot: QueueSnapshot) -> dict[str, float]:
    """Metrics of the queue's content and ledger."""
    counts = snapshot.ledger
    total = {f"ledger/{name}": value for name, value in counts.total().items()}
    return {
        "queue/ready": snapshot.ready,
        "queue/open": snapshot.open,
        **{key: value for key, value in total.items() if key in METRICS},
        "ledger/requeued": counts.reasons.get(DropKind.REQUEUED, 0),
        "ledger/without_spread": counts.reasons.get(DropKind.NO_SPREAD, 0),
    }


def draft_metrics(*, proposed: int, accepted: int) -> dict[str, float]:
    """Metrics of draft tokens; none without drafts."""
    return {"draft/proposed": proposed, "draft/accepted_fraction": accepted / proposed} if proposed else {}


def staleness_histogram(
    groups: Sequence[GroupHead],
    *,
    update: int,
    version_updates: Mapping[int, int],
    min_update: int = 0,
    mini_batches: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Staleness in optimizer steps -> tokens in the loss, ascending.

    A group with 4 tokens of version 4 and 2 of version 5, version v = v updates, update=5: {0: 2, 1: 4}. If the group
    is in mini-batch 1: {1: 2, 2: 4}.

    Args:
        groups: all groups of the batch, without failed trajectories.
        update: optimizer updates of the weights at the start of the batch.
        version_updates: `param_version` -> optimizer updates of the weights.
        min_update: tokens sampled by weights with fewer optimizer updates are not in the loss.
        mini_batches: group id -> mini-batch, from 0; None if the batch is one optimizer step.
    """
    counts = Counter[int]()
    for group in groups:
        trained_at = update + (0 if mini_batches is None else mini_batches[group.group])
        for version, tokens in group.tokens_per_version().items():
            if version_updates[version] >= min_update:
                counts[trained_at - version_updates[version]] += tokens
    return dict(sorted(counts.items()))
