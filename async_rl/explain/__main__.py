"""`python -m async_rl.explain DIR`: what limited the throughput of a run, and which override helps most.

DIR is the directory of a run that has ended or still runs.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, as the imports below take seconds
    from async_rl.files.command import end_process

    end_process("async_rl.explain.__main__")

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from async_rl.explain.division import CAUSES
from async_rl.explain.explanation import Explanation, explain
from async_rl.files.command import prog
from async_rl.plan.planner import WASTED, wasted
from async_rl.plan.records import RecordsError

LEAST_SHARE = 0.005  # of a cause that is printed
PERIODS = 4
NUM_OVERRIDES = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Print the explanation; returns the exit code: 0, or 2 if the directory cannot be explained."""
    parser = argparse.ArgumentParser(prog=prog("explain"), description=(__doc__ or "").partition("`: ")[2])
    parser.add_argument("directory", type=Path, metavar="DIR", help="output_dir of a run")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        explanation = explain(arguments.directory)
    except RecordsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    text = json.dumps(explanation.values(), indent=2) if arguments.json else "\n".join(lines(explanation))
    sys.stdout.write(f"{text}\n")
    return 0


def lines(explanation: Explanation) -> Iterator[str]:
    """Text for a terminal."""
    seconds, whole = explanation.seconds, sum(explanation.seconds.values())
    yield (
        f"train steps {explanation.steps[0].step} to {explanation.steps[-1].step}: "
        f"{explanation.steps_per_hour:.1f} steps per hour, limited by: {CAUSES[explanation.limit].text}"
    )
    yield from ("", "share of the wall clock, and what could be saved of it at most")
    yield from (
        f"{value / whole:7.1%} {explanation.savings[cause] / whole:7.1%}  {cause:11}{CAUSES[cause].text}"
        for cause, value in seconds.items()
        if value / whole >= LEAST_SHARE
    )
    if explanation.trainer:
        kinds = (f"{kind} {value / whole:.1%}" for kind, value in explanation.trainer.items())
        yield f"first trainer rank: {', '.join(kinds)}"
    if explanation.tflops is not None:
        share = "" if explanation.mfu is None else f", {explanation.mfu:.1%} of its peak (MFU)"
        yield f"while it trains, a rank computes {explanation.tflops:.3g} TFLOP/s{share}"
    if explanation.compression is not None:
        yield f"shared prefixes: it computes one of {explanation.compression:.2f} tokens (trainer.prefix_sharing)"
    yield from ("", "over the run")
    for first, last, parts in explanation.periods(PERIODS):
        largest = sorted(parts, key=lambda cause: -parts[cause])[:3]
        of_period = sum(parts.values())
        text = ", ".join(f"{cause} {parts[cause] / of_period:.0%}" for cause in largest)
        yield f"  steps {first} to {last}: {text}"
    if (stale := explanation.staleness) is not None:
        yield from ("", "mean staleness of the trained tokens, in optimizer steps")
        yield f"{stale.before_queue:7.2f}  before the queue: from sampling to the end of the group"
        yield f"{stale.in_queue:7.2f}  in the queue: until the batch was taken"
        yield f"{stale.in_training:7.2f}  in training: later optimizer steps of the batch"
    for title, waits in (
        ("groups that the trainer waited for longest", explanation.waited_for),
        ("groups that were longest in the queue", explanation.in_queue),
    ):
        if waits:
            yield from ("", title)
            yield from (f"{w.seconds:7.1f} s  group {w.group}, step {w.step}: {w.reason}" for w in waits)
    signal = explanation.signal
    if signal["without_signal"] >= WASTED:
        yield from ("", wasted(signal["without_signal"], right=signal["all_right"], wrong=signal["all_wrong"]))
    yield from _overrides(explanation)
    yield from (f"\nnot known: {note}" for note in explanation.notes)


def _overrides(explanation: Explanation) -> Iterator[str]:
    yield from ("", "predicted steps per hour with an override")
    for each in explanation.predictions[:NUM_OVERRIDES]:
        by = "" if each.by == "simulation" else ", from its share of the wall clock"
        price = f" ({each.override.price})" if each.override.price else ""
        rate = explanation.steps_per_hour * (1 + each.gain)
        yield f"{rate:7.1f}  {each.gain:+.0%}  {each.override.text}{price}{by}"
    if not explanation.predictions:
        yield "  none is known for these causes"
    if explanation.simulated_step_s is not None:
        measured, simulated = 3600 / explanation.steps_per_hour, explanation.simulated_step_s
        yield f"A step of the run took {measured:.2f} s; with its rates, the simulation takes {simulated:.2f} s."
