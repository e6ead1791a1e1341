"""Training sequences: what one forward pass of the trainer takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from message_queue.rows import NOT_SAMPLED, HeldRows, Int16Array
from message_queue.support import SamplingSupport
from message_queue.tokens import Float32Array, Int32Array

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSequence:
    """The first t tokens of a trajectory over one set of rows.

    token_ids: int32 [t]. loss_mask: bool [t], tokens that were sampled over these rows.
    behaviour_logprobs: float32 [t], 0 outside the mask. param_versions: int32 [t], -1 outside the mask.
    row_versions: int32 [t], version of the weights whose forward pass gave row p; -1 where there is no row.
    routed_experts: int16 [t, moe_layers, top_k], -1 where the trainer uses its live router; None without routing.
    support: of t positions, the tokens that the sampler kept; the whole vocabulary outside the mask. None if no sampled
        token was cut.
    """

    token_ids: Int32Array
    loss_mask: BoolArray
    behaviour_logprobs: Float32Array
    param_versions: Int32Array
    row_versions: Int32Array
    routed_experts: Int16Array | None
    support: SamplingSupport | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Strand:
    """The rows that the segments from number `first_segment` on were decoded over; `start` is their first position.

    rows: None where the model does not route.
    """

    first_segment: int
    start: int
    rows: HeldRows | None


def training_sequences(
    strands: Sequence[Strand],
    *,
    token_ids: Int32Array,
    behaviour_logprobs: Float32Array,
    param_versions: Int32Array,
    support: SamplingSupport | None = None,
) -> list[TrainingSequence]:
    """One sequence per strand; the tokens from its start to that of the next are in its loss.

    The last sequence holds all tokens, the others end with the last token of their loss.

    Args:
        token_ids, behaviour_logprobs, param_versions: of the trajectory, [T] each.
        support: of T positions, the whole vocabulary where no token was sampled.
    """
    made: list[TrainingSequence] = []
    ends = [*(strand.start for strand in strands[1:]), len(token_ids)]
    for strand, end in zip(strands, ends, strict=True):
        mask = param_versions[:end] != NOT_SAMPLED
        mask[: strand.start] = False
        length = end if strand is strands[-1] else int(np.flatnonzero(mask)[-1]) + 1
        mask, rows = mask[:length], strand.rows
        made.append(
            TrainingSequence(
                token_ids=token_ids[:length],
                loss_mask=mask,
                behaviour_logprobs=np.where(mask, behaviour_logprobs[:length], np.float32(0)),
                param_versions=np.where(mask, param_versions[:length], np.int32(NOT_SAMPLED)),
                row_versions=np.full(length, NOT_SAMPLED, np.int32) if rows is None else rows.versions(length),
                routed_experts=None if rows is None else rows.experts(length),
                support=None if support is None else _since(support.part(0, length), strand.start),
            )
        )
    return made


def _since(support: SamplingSupport, start: int) -> SamplingSupport:
    """The same positions, with the whole vocabulary before `start`."""
    if not start:
        return support
    return SamplingSupport.join([SamplingSupport.whole(start), support.part(start, len(support))])
