"""Peak memory and time of logprobs and entropies with their gradients, over a large vocabulary.

    all logits       torch's log_softmax over the logits of all rows, in float32
    trainer          what the trainer does (`async_rl/trainer/loss/logprobs.py`): the logits of a part of the rows
    trainer, kept    the same for tokens of which the sampler kept some (top-p, top-k, min-p)

Memory is the growth of the peak of a process of its own, beyond inputs and their gradients. Times are CPU time of
alternating rounds in one process.

    python benchmarks/logprob_memory.py [--tokens 2048] [--vocab 151936] [--hidden 64] [--dtype bfloat16] [--rounds 4]
        [--kept 16]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.trainer.loss.logprobs import KeptTokens, OutputLayer, kept_logprobs_and_entropy, logprobs_and_entropy
from benchmarks.support import markdown_table, peak_growth, show
from benchmarks.train_steps import paired_ratio, time_in_turns

Way = Callable[[], tuple[Tensor, Tensor]]


def ways(arguments: argparse.Namespace) -> tuple[dict[str, Way], list[Tensor]]:
    """What is compared, and the tensors that take gradients."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokens, vocab, dtype = arguments.tokens, arguments.vocab, getattr(torch, arguments.dtype)
    hidden = torch.randn(tokens, arguments.hidden, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocab, arguments.hidden, dtype=dtype) / arguments.hidden**0.5).requires_grad_()
    targets = torch.randint(vocab, (tokens,))
    layer = OutputLayer(weight=weight, num_ids=vocab, dtype=dtype)
    ids = (targets.unsqueeze(1) + torch.arange(arguments.kept) * (vocab // arguments.kept)) % vocab
    kept = KeptTokens.of(torch.full((tokens,), arguments.kept), ids.sort(1).values.flatten())
    assert kept is not None

    def all_logits() -> tuple[Tensor, Tensor]:
        log_probs = F.linear(hidden, weight).float().log_softmax(-1)
        return log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)

    found: dict[str, Way] = {
        "all logits": all_logits,
        "trainer": lambda: logprobs_and_entropy(hidden, targets, layer=layer),
        "trainer, kept": lambda: kept_logprobs_and_entropy(hidden, targets, kept, layer=layer),
    }
    return found, [hidden, weight]


def step(way: Way, inputs: list[Tensor]) -> None:
    """Forward and backward."""
    logprobs, entropy = way()
    (logprobs.sum() + 0.01 * entropy.sum()).backward()
    for tensor in inputs:
        tensor.grad = None


def peak_memory(name: str, arguments: argparse.Namespace) -> int:
    """Bytes by which one step increases the peak of this process beyond its inputs and their gradients."""
    found, inputs = ways(arguments)
    gradients = [torch.zeros_like(tensor) for tensor in inputs]

    def measured() -> None:
        gradients.clear()
        step(found[name], inputs)

    return peak_growth(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 2048), ("vocab", 151936), ("hidden", 64), ("rounds", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kept", type=int, default=16, help="tokens that the sampler kept at each position")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    found, inputs = ways(arguments)
    steps = {name: lambda way=way: step(way, inputs) for name, way in found.items()}
    taken = time_in_turns(steps, rounds=arguments.rounds)
    logits = arguments.tokens * arguments.vocab * 4
    rows: list[list[str]] = []
    for name in found:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            memory = process.apply(peak_memory, (name, arguments))
        ratio = paired_ratio(taken["all logits"].cpu, taken[name].cpu)
        rows.append(
            [
                name,
                f"{memory / 2**20:.0f}",
                f"{memory / logits:.2f}",
                f"{statistics.median(taken[name].cpu):.2f}",
                f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
            ]
        )
    header = ["way", "MiB at the peak", "over the logits in float32", "CPU s", "speed over all logits"]
    show(f"{arguments.tokens} tokens, {arguments.vocab} ids, {arguments.hidden} hidden, {arguments.dtype}\n")
    show(markdown_table(header, rows))


if __name__ == "__main__":
    main()
