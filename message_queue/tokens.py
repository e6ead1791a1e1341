"""One uninterrupted decode: the tokens, logprobs and routed experts an engine returns, and the weights that made them.

Positions are absolute in a trajectory: 0 is the first prompt token. Row p is the routing used when token p was
forwarded; it set the distribution of token p + 1. The last sampled token of a trajectory was never forwarded, so a
trajectory of T tokens has rows 0..T-2 at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from message_queue.errors import ContractError

if TYPE_CHECKING:
    from message_queue.sampling_support import SamplingSupport

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
ExpertArray = NDArray[np.uint8 | np.uint16]

_SETS_AT_ONCE = 1 << 15  # columns of so many expert sets stay in the cache


def shape_of(array: NDArray[Any]) -> str:
    """Type and shape, such as "int32[3, 2]"."""
    return f"{array.dtype}{list(array.shape)}"


class StopReason(StrEnum):
    """Why a decode ended."""

    STOP = "stop"  # end-of-turn token
    LENGTH = "length"  # token budget or context exhausted
    ABORT = "abort"  # interrupted by a request to stop or by new weights; the trajectory continues
    TOOL_CALL = "tool_call"  # stopped at the end of a tool call
    ERROR = "error"  # the engine gave up on the request


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The weights that sampled a segment."""

    version: int
    """`param_version`, +1 per publish, 0 for the initial weights."""
    digest: str
    """Content hash of the loaded weights, echoed by the engine."""

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ContractError(f"WeightVersion.version is {self.version}; versions start at 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """Meaning of a routing row. Travels once per run, never with a trajectory."""

    layers: tuple[int, ...]
    """Global numbers (0-based) of the MoE layers, ascending; dense layers are not listed."""
    num_experts: int
    """Routed experts per MoE layer."""
    top_k: int
    """Experts chosen per token."""

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ContractError(f"RoutingSpec.layers is {self.layers}; need ascending, distinct layer numbers >= 0")
        if not 1 <= self.top_k <= self.num_experts:
            raise ContractError(f"RoutingSpec.top_k is {self.top_k}; must be in 1..num_experts={self.num_experts}")

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
        """Narrowest unsigned type that holds an expert id."""
        return np.dtype(np.uint8) if self.num_experts <= 256 else np.dtype(np.uint16)

    @property
    def row_shape(self) -> tuple[int, int]:
        """(moe_layers, top_k)."""
        return len(self.layers), self.top_k


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedExperts:
    """Consecutive routing rows."""

    first_position: int
    """Absolute position of `experts[0]`."""
    experts: ExpertArray
    """uint8 or uint16 [rows, moe_layers, top_k], MoE layers in the order of `RoutingSpec.layers`."""
    unavailable: int = 0
    """Rows just before `first_position` that the engine states it cannot give."""

    def __post_init__(self) -> None:
        if self.experts.ndim != 3 or self.experts.dtype not in (np.dtype(np.uint8), np.dtype(np.uint16)):
            raise ContractError(
                f"RoutedExperts.experts is {shape_of(self.experts)}; need uint8 or uint16 [rows, moe_layers, top_k]"
            )
        if not 0 <= self.unavailable <= self.first_position:
            raise ContractError(
                f"RoutedExperts.unavailable is {self.unavailable} with first_position {self.first_position}; "
                "need 0 <= unavailable <= first_position"
            )
        if (duplicate := _find_duplicate(self.experts)) is not None:
            row, layer = duplicate
            raise ContractError(
                f"RoutedExperts.experts has a duplicate expert at position {self.first_position + row}, "
                f"MoE layer index {layer}: {self.experts[row, layer].tolist()}"
            )

    @classmethod
    def trusted(cls, *, first_position: int, experts: ExpertArray, unavailable: int = 0) -> RoutedExperts:
        """Rows that were checked before, as a part of others; not checked twice."""
        made = object.__new__(cls)
        for name, value in (("first_position", first_position), ("experts", experts), ("unavailable", unavailable)):
            object.__setattr__(made, name, value)
        return made

    @property
    def end_position(self) -> int:
        """Position after the last row."""
        return self.first_position + len(self.experts)

    def before(self, position: int) -> RoutedExperts:
        """The rows before `position`; none if `position` is not after the first."""
        kept = self.experts[: max(0, position - self.first_position)]
        return self.trusted(first_position=self.first_position, experts=kept, unavailable=self.unavailable)

    def check(self, spec: RoutingSpec) -> None:
        """Refuse rows that do not fit `spec`.

        Raises:
            ContractError: wrong layer or top-k count, another type than `spec.dtype`, or an expert id out of range.
        """
        if self.experts.shape[1:] != spec.row_shape:
            raise ContractError(
                f"RoutedExperts.experts has rows of shape {list(self.experts.shape[1:])}; "
                f"the model routes {list(spec.row_shape)} (moe_layers, top_k)"
            )
        if self.experts.dtype != spec.dtype:
            raise ContractError(
                f"RoutedExperts.experts is {self.experts.dtype}; ids of {spec.num_experts} experts are {spec.dtype}"
            )
        if self.experts.size and int(self.experts.max()) >= spec.num_experts:
            raise ContractError(
                f"RoutedExperts.experts has expert id {int(self.experts.max())}; the model has {spec.num_experts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenOutput:
    """A segment: tokens decoded without interruption under one weight version."""

    token_ids: Int32Array
    """int32 [n]."""
    logprobs: Float32Array
    """float32 [n], natural log, of the distribution that was sampled from."""
    routed_experts: RoutedExperts | None
    """Rows that this decode computed and was asked for; None if the model does not route or n is 0."""
    weights: WeightVersion
    """The weights that sampled all n tokens."""
    stop_reason: StopReason
    """Why the decode ended."""
    replica: str
    """Name of the engine replica."""
    support: SamplingSupport | None = None
    """n positions, the tokens that the sampler kept; None if it sampled from the whole vocabulary."""

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.token_ids.dtype != np.int32:
            raise ContractError(f"TokenOutput.token_ids is {shape_of(self.token_ids)}; need int32[n]")
        if self.logprobs.shape != self.token_ids.shape or self.logprobs.dtype != np.float32:
            raise ContractError(
                f"TokenOutput.logprobs is {shape_of(self.logprobs)}; need float32{list(self.token_ids.shape)}, one per "
                "token"
            )
        if (self.token_ids < 0).any():
            raise ContractError(f"TokenOutput.token_ids has the negative id {int(self.token_ids.min())}")
        bad = ~np.isfinite(self.logprobs) | (self.logprobs > 0)
        if bad.any():
            at = int(np.argmax(bad))
            raise ContractError(
                f"TokenOutput.logprobs[{at}] is {float(self.logprobs[at])}; logprobs are finite and <= 0"
            )
        if self.support is not None and len(self.support) != len(self):
            raise ContractError(
                f"TokenOutput.support has {len(self.support)} positions for {len(self)} tokens; need one per token"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    def check(self, *, vocab_size: int, routing: RoutingSpec | None, cut: bool = False) -> None:
        """Refuse a segment that does not fit the model or the request; called at the engine's edge.

        Args:
            cut: whether the request samples from a part of the vocabulary.

        Raises:
            ContractError: a token id outside the vocabulary, rows or a support that are absent, unexpected or out of
                range, or a sampled token outside its support.
        """
        if len(self) and int(self.token_ids.max()) >= vocab_size:
            raise ContractError(
                f"TokenOutput.token_ids has id {int(self.token_ids.max())}; the vocabulary has {vocab_size}"
            )
        self.check_rows(routing)
        if self.support is not None:
            if not cut:
                raise ContractError("TokenOutput.support is set, but the request samples from the whole vocabulary")
            if (empty := np.diff(self.support.offsets) == 0).any():
                raise ContractError(
                    f"TokenOutput.support has no token at sampled token {int(np.argmax(empty))} from replica "
                    f"{self.replica}"
                )
            self.support.check(self.token_ids, vocab_size=vocab_size)
        elif cut and len(self):
            raise ContractError(
                f"TokenOutput.support is None for {len(self)} tokens from replica {self.replica}; the request "
                "samples from a part of the vocabulary"
            )

    def check_rows(self, routing: RoutingSpec | None) -> None:
        """Refuse rows that are absent or unexpected, or do not fit `routing`; None if the run captures no routing.

        Raises:
            ContractError: names the replica, or the value that does not fit.
        """
        if self.routed_experts is None:
            if routing is not None and len(self):
                raise ContractError(
                    f"TokenOutput.routed_experts is None for {len(self)} tokens from replica {self.replica}; "
                    "the run captures routing"
                )
        elif routing is None:
            raise ContractError(
                f"TokenOutput.routed_experts has {len(self.routed_experts.experts)} rows from replica {self.replica}, "
                "but the run captures no routing; give it the model's RoutingSpec"
            )
        else:
            self.routed_experts.check(routing)


def _find_duplicate(experts: ExpertArray) -> tuple[int, int] | None:
    """(row, layer) of the first set of [rows, layers, top_k] that names an expert twice.

    Compares whole columns, each made contiguous: about 25 times as fast as sorting every set.
    """
    rows, layers, top_k = experts.shape
    sets = experts.reshape(rows * layers, top_k)
    for start in range(0, len(sets), _SETS_AT_ONCE):
        columns = np.ascontiguousarray(sets[start : start + _SETS_AT_ONCE].T)
        duplicate = np.zeros(columns.shape[1], np.bool_)
        for i in range(1, top_k):
            for j in range(i):
                duplicate |= columns[i] == columns[j]
        if duplicate.any():
            return divmod(start + int(np.argmax(duplicate)), layers)
    return None
