"""What the bytes of a message hold, and what they would take at least."""

from __future__ import annotations

import math
from dataclasses import dataclass

from message_queue.wire.format import unseal
from message_queue.wire.packed import Packed

_PARTS = ("structure", "tokens", "logprobs", "support", "rows", "total")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSize:
    """Bytes of a message by what they hold.

    support: kept sets of the sampled tokens.
    num_tokens: tokens of its trajectories, sampled or not. num_rows: routing rows, each sent once.
    rows_floor: bytes of as many rows of independent, equally likely expert sets in any lossless code; NaN where the
        sender does not know the number of experts.
    """

    structure: int
    tokens: int
    logprobs: int
    support: int
    rows: int
    num_tokens: int
    num_rows: int
    rows_floor: float
    rank_coded: bool

    @property
    def total(self) -> int:
        return self.structure + self.tokens + self.logprobs + self.support + self.rows

    def per_token(self) -> dict[str, float]:
        """Part -> bytes per token; NaN where there is no token."""
        return {name: _share(getattr(self, name), self.num_tokens) for name in _PARTS}

    def report(self) -> str:
        """A table of the parts, and rows against tokens and floor."""
        per_token = self.per_token()
        lines = [f"{'part':<10}{'bytes':>14}{'bytes/token':>14}"]
        lines += [f"{name:<10}{getattr(self, name):>14}{per_token[name]:>14.2f}" for name in _PARTS]
        coding = "rank-coded" if self.rank_coded else "as they are"
        lines.append(
            f"{self.num_rows} rows of {self.num_tokens} tokens, {coding}: {_share(self.rows, self.num_rows):.2f} bytes "
            f"a row, floor {_share(self.rows_floor, self.num_rows):.2f} ({_share(self.rows, self.rows_floor):.3f} x)"
        )
        return "\n".join(lines)


def encoded_size(message: bytes | Packed) -> EncodedSize:
    """What the bytes of a message hold.

    Raises:
        WireError: the bytes are damaged.
    """
    packed = isinstance(message, Packed)
    head, payload = unseal(message.head if packed else message, kind=None)
    payload_bytes = message.num_bytes if packed else len(payload)
    num_tokens, sampled, num_rows, layout = head.num_tokens(), head.num_sampled(), head.num_rows(), head.row_layout
    support = 4 * head.num_supported() + head.num_support_bytes()
    floor = 0.0 if layout is None else math.nan
    if layout is not None and layout.num_experts is not None:
        floor = num_rows * layout.moe_layers * math.log2(math.comb(layout.num_experts, layout.top_k)) / 8
    return EncodedSize(
        structure=len(message.head) if packed else len(message) - payload_bytes,
        tokens=4 * num_tokens,
        logprobs=4 * sampled,
        support=support,
        rows=payload_bytes - 4 * (num_tokens + sampled) - support,
        num_tokens=num_tokens,
        num_rows=num_rows,
        rows_floor=floor,
        rank_coded=layout is not None and layout.rank_coded,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
