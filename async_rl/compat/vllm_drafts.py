"""Exact acceptance of draft tokens in a vLLM worker on the CPU.

vLLM's rejection sampler is wrong there: its kernel that spreads temperature, top-k and top-p over draft positions
writes to a copy, so the target's logits are divided by memory that was never set (`expand_kernel_impl`). It also knows
no min-p and returns no kept tokens.

Both drafters here propose a single token without a probability. Rejection sampling then accepts a draft d with the
target's probability p(d), and otherwise samples from p without d. This is the same as one sample of p that is compared
with d. So vLLM's usual sampler samples every position from the target, and a request keeps its samples up to the first
that is not the draft:

    drafts   7  4  9        samples  7  4  2  5        kept  7  4  2

The sample 5 belongs to a context with the rejected 9. Logprobs, kept tokens and seeded generators are those of the
usual sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """Samples of a step at all draft positions and after them, and those that its requests keep.

    Request 0 has the drafts 7 4 9 and request 1 has none; width is 4, the most samples of a request:
    tokens [[7, 4, 2, -1], [8, -1, -1, -1]], rows [[0, 1, 2, 3], [4, 4, 4, 4]], counts [3, 1], rejected [1, 0].
    """

    tokens: torch.Tensor
    """int32 [requests, width]: kept samples, then -1."""
    rows: torch.Tensor
    """int64 [requests, width]: row of each sample among all samples of the step; any row behind the last."""
    counts: torch.Tensor
    """int64 [requests]: number of kept samples, at least 1."""
    rejected: torch.Tensor
    """int64 [requests]: drafts whose K/V and routing rows no longer count."""

    @classmethod
    def of(cls, sampled: torch.Tensor, drafts: torch.Tensor, num_drafts: Sequence[int]) -> Verified:
        """Compare the samples with the drafts.

        Args:
            sampled: int [drafts + requests], the target's sample at each draft and after the last of each request.
            drafts: int [drafts], of all requests in order.
            num_drafts: number of drafts of each request.
        """
        proposed = torch.tensor(num_drafts)
        requests, width = len(num_drafts), int(proposed.max()) + 1
        at = torch.arange(width)
        is_draft = at < proposed.unsqueeze(1)
        rows = ((proposed + 1).cumsum(0) - proposed - 1).unsqueeze(1) + at.minimum(proposed.unsqueeze(1))
        expected = torch.full((requests, width), -1)
        expected[is_draft] = drafts.long()
        samples = sampled.long()[rows]
        accepted = ((samples == expected) & is_draft).long().cumprod(1).sum(1)
        kept = at <= accepted.unsqueeze(1)
        tokens = samples.where(kept, torch.tensor(-1)).to(torch.int32)
        return cls(tokens, rows, accepted + 1, proposed - accepted)

    def logprobs(self, tensors: LogprobsTensors) -> LogprobsTensors:
        """Logprobs of all samples in the layout of `tokens`: [requests * width, ...]."""
        at = self.rows.flatten()
        ids, logprobs, ranks = (part[at] for part in tensors[:3])
        return LogprobsTensors(ids, logprobs, ranks)

    @property
    def kept_rows(self) -> torch.Tensor:
        """int64 [sum of counts], rows of the kept samples, of one request after the other."""
        return self.rows[self.tokens >= 0]


def at_each_sample(metadata: SamplingMetadata, requests: torch.Tensor, min_p: Sequence[float]) -> SamplingMetadata:
    """Sampling parameters of a step, repeated for each sample of a request.

    Args:
        metadata: temperature, top-p, top-k and generators of each request.
        requests: int64 [samples], the request of each sample.
        min_p: of each request.
    """

    def repeated(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[requests]

    rows = enumerate(requests.tolist())
    return replace(
        metadata,
        temperature=repeated(metadata.temperature),
        top_p=repeated(metadata.top_p),
        top_k=repeated(metadata.top_k),
        generators={row: metadata.generators[of] for row, of in rows if of in metadata.generators},
        logitsprocs=LogitsProcessors([_MinP(torch.tensor(min_p)[requests])]),
    )


class _MinP(MinPLogitsProcessor):
    """vLLM's min-p with a value for each row of the logits. It leaves its own out if drafts are on."""

    def __init__(self, values: torch.Tensor) -> None:
        self.min_p = values.unsqueeze(1)
        self.min_p_count = int(values.count_nonzero())
