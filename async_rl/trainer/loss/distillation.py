"""On-policy distillation: terms of frozen teachers at the tokens that the student sampled.

The student samples, and a teacher scores the same tokens (Agarwal et al. 2024, arXiv 2306.13649; Thinking Machines
2025, "On-Policy Distillation"; AsyncOPD, arXiv 2606.24143). p is the student's distribution of a token under the
current weights, q the teacher's, c the coefficient, and S the teacher's top_k tokens and one bucket for all others:

    reverse        A + c sg(log q(t) - log p(t)) takes the place of the advantage A of the sampled token t
    forward        c sum over S of q (log q - log p) is added to the loss
    reverse_top_k  c sum over S of p (log p - log q) is added to the loss

`reverse` is the policy gradient of -KL(p || q) at one sampled token. log p(t) is computed with the weights that are
trained, not with those that sampled, as AsyncOPD recommends; the policy loss weights stale tokens as it does
with any advantage. The two others have a gradient through the student's logits. They are over whole distributions,
so that a stale token needs no importance weight; only its context was sampled by older weights.

A token without a teacher has no term, and no metric counts it. All tensors have one entry per token in the loss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from annotated_types import Gt

from agent_loop.bounds import Count, bounded
from message_queue.training_sequence import TeacherScores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

DistillationKL = Literal["reverse", "forward", "reverse_top_k"]
SUMS = {"reverse": "kl_sampled", "forward": "kl_forward", "reverse_top_k": "kl_reverse"}
SCORED = "scored"


@bounded("distillation")
class DistillationConfig:
    """The term of the teachers in the loss; see `async_rl.trainer.loss.distillation` for the equations."""

    kl: DistillationKL = "reverse"
    """`reverse`: the advantage of a sampled token gets coefficient x log(teacher / student). `forward`: KL(teacher ||
    student) over the teacher's most likely tokens and the rest. `reverse_top_k`: KL(student || teacher) over the
    same."""
    top_k: Count = 64
    """The teacher's most likely tokens in `forward` and `reverse_top_k`."""
    coefficient: Annotated[float, Gt(0)] = 1.0
    """Factor of the term."""
    rewards: bool = True
    """Whether the rewards of the task count too; False sets the advantages from rewards to 0."""

    @property
    def num_ids(self) -> int:
        """Most likely tokens that a teacher returns for each token."""
        return 0 if self.kl == "reverse" else self.top_k


def with_teacher(advantages: Tensor, current: Tensor, teacher: Tensor, *, coefficient: float) -> Tensor:
    """Advantages [n] with the term of `reverse`; unchanged where `teacher` is NaN.

    Advantage 0.5, current -2.0, teacher -1.0, coefficient 0.1: 0.6.
    """
    term = coefficient * (teacher - current.detach())
    return advantages + term.nan_to_num(nan=0.0)


def supported_kl(student: Tensor, teacher: Tensor, kl: DistillationKL) -> Tensor:
    """KL [n] in nat over the teacher's top-k tokens and the rest, differentiable by `student`.

    Teacher (0.5, 0.3; rest 0.2), student (0.25, 0.25; rest 0.5): forward 0.218, reverse_top_k 0.239.

    Args:
        student: [n, k + 1], logprobs of the tokens, the last of all others.
        teacher: [n, k], its logprobs; -inf for a token that the student does not have.
        kl: forward or reverse_top_k.
    """
    import torch

    log_p, known = student.double(), teacher > -torch.inf
    log_q = torch.cat((teacher, log_rest(teacher).unsqueeze(-1)), -1).double()
    counts = torch.cat((known, known.new_ones(len(known), 1)), -1)
    difference = torch.where(counts, log_q - log_p, 0.0)
    weight = torch.where(counts, log_q.exp(), 0.0) if kl == "forward" else -torch.where(counts, log_p.exp(), 0.0)
    return (weight * difference).sum(-1)


def log_rest(top: Tensor) -> Tensor:
    """Logprob [n] of all tokens but those of `top` [n, k].

    The rest is at least the error of k float32 logprobs, as more of their sum is not known.
    """
    import torch

    rest = 1 - top.double().exp().sum(-1)
    return rest.clamp(min=max(1, top.shape[-1]) * torch.finfo(torch.float32).eps).log().to(top.dtype)


def sum_names(config: DistillationConfig | None) -> tuple[str, ...]:
    """Names of the columns of `TeacherTerm.sums`."""
    if config is None:
        return ()
    return (SCORED, *(SUMS.values() if config.num_ids else (SUMS["reverse"],)))


def teacher_columns(scores: TeacherScores | None, *, tokens: int, top_k: int) -> dict[str, Tensor]:
    """Inputs of the loss from the scores of n tokens; None if none of the tokens has a teacher.

    Returns:
        teacher_logprobs: float32 [n], NaN without a teacher.
        teacher_ids: int64 [n, k], -1 for no token.
        teacher_top_logprobs: float32 [n, k], -inf for no token.
    """
    import torch

    found = scores or TeacherScores.absent(tokens, top_k=top_k)
    columns = {"teacher_logprobs": torch.from_numpy(found.logprobs)}
    if found.top_k:
        columns["teacher_ids"] = torch.from_numpy(found.ids).long()
        columns["teacher_top_logprobs"] = torch.from_numpy(found.top_logprobs)
    return columns


class TeacherTerm(NamedTuple):
    """The teacher's part in the loss of n tokens."""

    advantages: Tensor
    """[n], of the policy loss."""
    loss: Tensor | None
    """[n], added to the loss of each token; None with `reverse`."""
    sums: dict[str, Tensor]
    """float64 [n] each, for the metrics, 0 for a token without a teacher: whether it is scored, and each KL."""


def teacher_term(
    columns: Mapping[str, Tensor], current: Tensor, student: Tensor | None, config: DistillationConfig
) -> TeacherTerm:
    """The teacher's part in the loss.

    Args:
        columns: `teacher_columns` and the `advantages` [n].
        current: [n], logprobs under the current weights.
        student: as for `supported_kl`; None with `reverse`.
        config: the term.
    """
    teacher, advantages = columns["teacher_logprobs"], columns["advantages"]
    scored = ~teacher.isnan()
    found = {SCORED: scored, SUMS["reverse"]: current - teacher}
    if student is not None:
        for kl in ("forward", "reverse_top_k"):
            found[SUMS[kl]] = supported_kl(student, columns["teacher_top_logprobs"], kl)
    masked = {name: value.double().where(scored, 0.0) for name, value in found.items()}
    sums = {name: value.detach() for name, value in masked.items()}
    if student is None:
        return TeacherTerm(with_teacher(advantages, current, teacher, coefficient=config.coefficient), None, sums)
    return TeacherTerm(advantages, config.coefficient * masked[SUMS[config.kl]].to(advantages.dtype), sums)


def teacher_metrics(sums: Mapping[str, float], *, tokens: float) -> dict[str, float]:
    """Metrics of the term; NaN without tokens.

    Args:
        sums: `TeacherTerm.sums`, summed over the tokens in the loss.
        tokens: number of these.
    """
    scored = sums.get(SCORED, 0.0)
    shares = {f"teacher/{name}": sums[name] / scored if scored else math.nan for name in SUMS.values() if name in sums}
    return shares | {"teacher/scored_fraction": scored / tokens if tokens else math.nan}
