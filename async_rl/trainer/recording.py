"""Rollouts of a batch with the values that the trainer used, written to disk by a thread of rank 0.

One row per trajectory, and one for each other path with its own sampled tokens (`Trajectory.fork`). Columns:

    train_step, mini_batch          of the batch: its last step; optimizer step of the batch, from 0
    group, trajectory, prompt_index id of the group, number in the group, index of the prompt
    path, agent                     number of the path in the trajectory, 0 is the root; agent whose turns it has
    admitted_version                weights when the group was admitted
    reward, info, stop_reason       of the rollout; info: parts of the reward and counts of the agent loop
    advantage                       null for a rollout that failed, or an agent that is not trained
    prompt, turns                   text, tool calls and the reply after each turn; text includes control tokens
    segments                        start, tokens, param_version, staleness, replica, stop_reason
    token_ids                       the T tokens of the path; those that it shares with a row above count as not sampled
    behaviour_logprobs              of the engine; this and the next four have T entries, null unless sampled
    proximal_logprobs, logprobs     of the trainer before the batch, and when the token was trained
    gradient_share                  share of the token in the gradient of its optimizer step, see below
    effect                          `trained`; the filters that changed its weight, as `clip` or `clip+mask`;
                                    `too_old` (staleness.policy=mask); `no_spread` (the rewards of the agent were equal
                                    in the group); `untrained` (the agent is not trained)
    routed_experts                  [T, moe_layers, top_k], the experts that the engine chose for each token, or -1 if
                                    the engine gave none for it (always for the last token); null for trajectories that
                                    exceed rollout.record.routing_bytes. No column if the run captures no routing. The
                                    key `moe_layers` of the schema's metadata has the numbers of the layers

A rollout that failed has no tokens; `failed-*.jsonl` has its text. `logprobs` and `gradient_share` are null for tokens
that were not trained.

gradient_share of token i is |dL / d logprob_i| / sum over j of |dL / d logprob_j|. L is the loss of the optimizer
step, policy and KL term, and j runs over all tokens of the step, recorded or not. A clipped or masked token has 0. The
entropy term is left out, because it depends on the whole distribution and not on the logprob of the token. Two tokens
with equal shares may still move the weights by different amounts: the derivative of the logprob by the weights is not
included. Example: token_mean over 4 tokens with advantages (1, 1, -1, -1), ratios (1, 1.2, 1, 0.5) and the last one
clipped: the derivatives are (-0.25, -0.3, 0.25, 0) and the shares (0.3125, 0.375, 0.3125, 0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from async_rl.files.rollouts import RecordConfig, tool_calls_of, write_step
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.forward_backward import ForwardBackward
from async_rl.trainer.step import FILTERS, MicroBatches, MicroBatchResults
from message_queue.errors import AsyncRLError
from message_queue.tokens import Int32Array
from message_queue.training_sequence import SampledRun, TrainingSequence

TRAINED = ["+".join(name for i, name in enumerate(FILTERS) if code >> i & 1) for code in range(1 << len(FILTERS))]
EFFECTS = ["trained", *TRAINED[1:], "too_old", "no_spread", "untrained"]
TOO_OLD, NO_SPREAD, UNTRAINED = range(len(EFFECTS) - 3, len(EFFECTS))
VALUES = ("proximal_logprobs", "logprobs", "gradient_share", "filters")
SequenceValues = Mapping[int, NDArray[np.float64]]
"""Number of a sequence -> float64 [4, n], VALUES of its n tokens in the loss; only sequences with a forward pass."""

_CALL = pa.struct([("name", pa.string()), ("arguments", pa.string()), ("error", pa.string())])
_TURN = pa.struct([("text", pa.string()), ("tool_calls", pa.list_(_CALL)), ("reply", pa.string())])
_SEGMENT = pa.struct(
    [
        ("start", pa.int32()),
        ("tokens", pa.int32()),
        ("param_version", pa.int64()),
        ("staleness", pa.int32()),
        ("replica", pa.string()),
        ("stop_reason", pa.string()),
    ]
)
_ROW = pa.schema(
    [
        ("train_step", pa.int64()),
        ("mini_batch", pa.int32()),
        ("group", pa.int64()),
        ("trajectory", pa.int32()),
        ("path", pa.int32()),
        ("agent", pa.string()),
        ("prompt_index", pa.int64()),
        ("admitted_version", pa.int64()),
        ("reward", pa.float64()),
        ("info", pa.map_(pa.string(), pa.float64())),
        ("stop_reason", pa.string()),
        ("advantage", pa.float32()),
        ("prompt", pa.string()),
        ("turns", pa.list_(_TURN)),
        ("segments", pa.list_(_SEGMENT)),
    ]
)
_PER_TOKEN = ("behaviour_logprobs", "proximal_logprobs", "logprobs", "gradient_share")
_ROUTING_ITEM = 2  # bytes of an expert id in the files


class RecordingError(AsyncRLError):
    """Rollouts cannot be written to disk; the message names the folder and the way out."""


def recorded_values(
    batch: TrainingBatch, planned: Sequence[MicroBatches], *, passes: ForwardBackward
) -> SequenceValues:
    """Values of the tokens in the loss of the recorded groups, from all ranks. Collective.

    Args:
        batch: batch with recorded groups.
        planned: the micro-batches of its updates on this rank, after the train step.
        passes: forward and backward passes of this rank.
    """
    wanted = np.isin(batch.index[:, 0], list(batch.recorded.heads))
    values: dict[int, NDArray[np.float64]] = {}
    for micro_batches in planned:
        update = micro_batches.update
        counted = [_columns(results) for results in micro_batches.results] if passes.counts_tokens else []
        of_update = np.stack(
            [passes.of_update(micro_batches, [each[i] for each in counted]).numpy() for i in range(len(VALUES))]
        )
        shares = of_update[VALUES.index("gradient_share")]
        shares /= shares.sum().clip(min=np.finfo(np.float64).tiny)
        for number in (number for number in update.sequences if wanted[number]):
            first = update.first_loss_token[number]
            values[number] = of_update[:, first : first + batch.num_loss_tokens[number]]
    return values


def _columns(results: MicroBatchResults) -> Tensor:
    """float64 [4, n], VALUES before the division. Without a proximal pass the proximal policy is the current one."""
    of_token = results.token_results
    proximal = results.columns.get("proximal_logprobs", of_token["current"])
    columns = (proximal, of_token["current"], of_token["gradient"].abs(), of_token["filters"])
    return torch.stack([column.to("cpu", torch.float64) for column in columns])


class RolloutRecorder:
    """Writes the rollouts of one step at a time, in a thread.

    Args:
        directory: folder of the files.
        config: bounds on the files.
        tokenizer: the model's tokenizer; only `decode` is used.
    """

    def __init__(self, directory: Path, *, config: RecordConfig, tokenizer: Any) -> None:
        self._directory = directory
        self._config = config
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recording")
        self._writing: Future[None] | None = None

    def write(self, batch: TrainingBatch, values: SequenceValues, *, moe_layers: Sequence[int] = ()) -> None:
        """Start to write the recorded groups of a batch, when the earlier ones are on the disk.

        Args:
            batch: with the content of its recorded groups.
            values: see `recorded_values`.
            moe_layers: global numbers of the MoE layers, from 0.

        Raises:
            RecordingError: the earlier step could not be written.
        """
        self.flush()
        heads = batch.recorded.heads
        contents = [content if group in heads else () for group, content in enumerate(batch.contents)]
        self._writing = self._thread.submit(self._write, replace(batch, contents=contents), values, moe_layers)

    def flush(self) -> None:
        """Return once all steps are on the disk.

        Raises:
            RecordingError: one could not be written.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, batch: TrainingBatch, values: SequenceValues, moe_layers: Sequence[int]) -> None:
        train_step = batch.recorded.train_step
        table = rollout_table(
            batch,
            values,
            tokenizer=self._tokenizer,
            moe_layers=moe_layers,
            routing_bytes=self._config.routing_bytes,
        )
        try:
            write_step(self._directory, table, train_step=train_step, keep=self._config.steps)
        except OSError as error:
            raise RecordingError(
                f"the rollouts of train step {train_step} cannot be written to {self._directory} "
                f"({error.strerror or error}); make room, or set rollout.record.steps=0"
            ) from error


def rollout_table(
    batch: TrainingBatch,
    values: SequenceValues,
    *,
    tokenizer: Any,
    moe_layers: Sequence[int] = (),
    routing_bytes: int = 0,
) -> Any:
    """The pyarrow table of a batch; the columns are described at the top of this module.

    Args:
        batch: with the content of its recorded groups.
        values: see `recorded_values`.
        tokenizer: the model's tokenizer; only `decode` is used.
        moe_layers: global numbers of the MoE layers, from 0.
        routing_bytes: see `RecordConfig`.
    """
    rows, tokens, last = list[dict[str, Any]](), list[dict[str, NDArray[Any]]](), list[TrainingSequence | None]()
    for group, head in sorted(batch.recorded.heads.items()):
        for number, trajectory in enumerate(head.trajectories):
            for path, of_path in _by_path(batch, group, number).items():
                tokens.append(_tokens(batch, values, of_path))
                last.append(of_path[-1].sequence if of_path else None)
                row = {
                    "train_step": batch.recorded.train_step,
                    "group": head.group,
                    "trajectory": number,
                    "path": path,
                    "prompt_index": head.prompt,
                    "admitted_version": head.admitted_version,
                    "reward": trajectory.reward,
                    "info": list(trajectory.info.items()),
                    "stop_reason": str(trajectory.stop_reason),
                }
                rows.append(row | _of_training(batch, group, of_path, tokens[-1]["token_ids"], tokenizer))
    table = pa.Table.from_pylist(rows, schema=_ROW)
    offsets = pa.array(np.cumsum([0, *(len(of_path["token_ids"]) for of_path in tokens)]), pa.int32())
    for name in ("token_ids", *_PER_TOKEN, "effect"):
        flat = np.concatenate([of_path[name] for of_path in tokens])
        if name == "effect":
            column = pa.DictionaryArray.from_arrays(pa.array(flat, mask=flat < 0), pa.array(EFFECTS))
        else:
            column = pa.array(flat, mask=np.isnan(flat))
        table = table.append_column(name, pa.ListArray.from_arrays(offsets, column))
    routing = _routing_column(last, bytes_left=routing_bytes)
    if routing is None:
        return table
    layers = {"moe_layers": json.dumps(list(moe_layers))}
    return table.append_column("routed_experts", routing).replace_schema_metadata(layers)


class _Recorded(NamedTuple):
    """A sequence of a recorded trajectory."""

    agent: str
    """Its agent."""
    sequence: TrainingSequence
    """Its content."""
    number: int | None
    """Number in the batch; None if its agent is not trained."""


def _by_path(batch: TrainingBatch, group: int, trajectory: int) -> dict[int, list[_Recorded]]:
    """Path -> its sequences among those of a trajectory; path 0 without any for a failed rollout."""
    own = np.flatnonzero((batch.index[:, :2] == (group, trajectory)).all(axis=1)).tolist()
    numbers = {int(batch.index[number, 2]): number for number in own}
    heads = batch.recorded.heads[group].trajectories[trajectory].sequences
    found: dict[int, list[_Recorded]] = {}
    for at, sequence in enumerate(batch.content(group)[trajectory]):
        found.setdefault(sequence.path, []).append(_Recorded(heads[at].agent, sequence, numbers.get(at)))
    return found or {0: []}


def _routing_column(sequences: Sequence[TrainingSequence | None], *, bytes_left: int) -> Any:
    """Column of the routing rows of each trajectory, null for those that exceed the bound; None if there are no rows.

    Args:
        sequences: last training sequence of each path, with all its tokens; None for a failed rollout.
        bytes_left: bound on the rows of all trajectories.
    """
    shape = next((s.rows.shape[1:] for s in sequences if s is not None and s.rows is not None), None)
    if shape is None or not bytes_left:
        return None
    rows, lengths, missing = list[NDArray[np.int16]](), list[int](), list[bool]()
    for sequence in sequences:
        size = 0 if sequence is None else len(sequence) * shape[0] * shape[1] * _ROUTING_ITEM
        routed = sequence.routed_experts if sequence is not None and size <= bytes_left else None
        missing.append(routed is None)
        lengths.append(0 if routed is None else len(routed))
        if routed is not None:
            rows.append(routed)
            bytes_left -= size
    flat = np.concatenate([np.zeros((0, *shape), np.int16), *rows]).reshape(-1)
    experts = pa.FixedSizeListArray.from_arrays(pa.array(flat), shape[1])
    layers = pa.FixedSizeListArray.from_arrays(experts, shape[0])
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    return pa.ListArray.from_arrays(offsets, layers, mask=pa.array(missing))


def _tokens(batch: TrainingBatch, values: SequenceValues, of_path: Sequence[_Recorded]) -> dict[str, NDArray[Any]]:
    """Columns [T] of a path: NaN for no number, -1 for no effect. A failed rollout has no sequences and no tokens."""
    token_ids = of_path[-1].sequence.token_ids if of_path else np.zeros(0, np.int32)
    numbers = np.full((len(_PER_TOKEN), len(token_ids)), np.nan, np.float32)
    effect = np.full(len(token_ids), -1, np.int8)
    for _agent, sequence, number in of_path:
        sampled = np.concatenate([np.arange(0), *(np.arange(r.start, r.start + r.tokens) for r in sequence.runs)])
        numbers[0, sampled] = sequence.logprobs
        if number is None:
            effect[sampled] = UNTRAINED
            continue
        trained = batch.loss_tokens(number).positions
        effect[sampled] = TOO_OLD
        effect[trained] = NO_SPREAD
        if number in values:
            numbers[1:, trained], effect[trained] = values[number][:-1], values[number][-1]
    return {"token_ids": token_ids, **dict(zip(_PER_TOKEN, numbers, strict=True)), "effect": effect}


def _of_training(
    batch: TrainingBatch, group: int, of_path: Sequence[_Recorded], token_ids: Int32Array, tokenizer: Any
) -> dict[str, Any]:
    """Cells of a path that its sequences determine; none for a failed rollout."""
    if not of_path:
        return {"turns": [], "segments": []}
    agent, _, number = of_path[0]
    mini_batch = int(batch.mini_batch[batch.index[:, 0] == group][0])
    segments = [segment for each in of_path for segment in each.sequence.runs]
    now = batch.current_update + mini_batch
    prompt, turns = _turns(token_ids, segments, tokenizer)
    return {
        "agent": agent,
        "mini_batch": mini_batch,
        "advantage": None if number is None else float(batch.advantages[number]),
        "prompt": prompt,
        "turns": turns,
        "segments": [
            {
                "start": segment.start,
                "tokens": segment.tokens,
                "param_version": segment.version,
                "staleness": now - batch.version_updates[segment.version],
                "replica": segment.replica,
                "stop_reason": str(segment.stop_reason),
            }
            for segment in segments
        ],
    }


def _turns(token_ids: Int32Array, segments: Sequence[SampledRun], tokenizer: Any) -> tuple[str, list[dict[str, Any]]]:
    """Text of the prompt, and the turns. Segments that touch are of one turn.

    7 tokens with the segments (3, 1), (4, 1) and (6, 1): the prompt is 0 to 2, the turns are 3 to 4 and 6, and the
    reply to the first is 5.
    """
    bounds: list[tuple[int, int]] = []
    for segment in segments:
        end = segment.start + segment.tokens
        if bounds and bounds[-1][1] == segment.start:
            bounds[-1] = (bounds[-1][0], end)
        else:
            bounds.append((segment.start, end))

    def text(start: int, end: int) -> str:
        return str(tokenizer.decode(token_ids[start:end].tolist(), skip_special_tokens=False))

    before, turns = text(0, bounds[0][0] if bounds else len(token_ids)), list[dict[str, Any]]()
    prompt, ends = before, [*(start for start, _ in bounds[1:]), len(token_ids)]
    for bound, following in zip(bounds, ends, strict=False):
        said, reply = text(*bound), text(bound[1], following)
        turns.append({"text": said, "tool_calls": tool_calls_of(said, before=before), "reply": reply})
        before = reply
    return prompt, turns
