"""Memory of each process of a run over many train steps, to tell a leak from a warm-up.

A tiny run of the calculator: no warm start, batches of two groups, a publish after each step. The table has, for each
process, the private memory (USS: pages that no other process has, so that shared memory of versions and of the object
store does not count) at a tenth of the steps and at the end, and its slope per step in the second and in the last
quarter, each fitted with least squares. A leak has equal slopes; a warm-up has a smaller one at the end.

    python benchmarks/growth.py [--steps 1000] [--every 5] [--keep samples.json] [OVERRIDE ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.support import markdown_table, say, show

ROOT = Path(__file__).resolve().parent.parent
TINY = (
    *("warm_start.steps=0", "rollout.groups_per_batch=2", "rollout.trajectories_per_group=2"),
    *("rollout.limits.max_tokens=64", "rollout.limits.max_turns=2", "validation.every=0", "validation.prompts=0"),
    *("optimizer.lr=1e-6", "optimizer.min_lr=0", "checkpoint.every=100"),
)
NAMES = (
    *("ray::ReplicaHost", "VLLM::EngineCore", "ray::TrainerHost", "ray::RolloutHost", "ray::QueueHost"),
    *("raylet", "gcs_server", "async_rl.run"),
)
MB = 1 << 20


def private_memory(root: psutil.Process) -> dict[str, int]:
    """Name of each known process below `root`, itself included -> private bytes."""
    found: dict[str, int] = {}
    for process in (root, *root.children(recursive=True)):
        try:
            title = " ".join(process.cmdline())
            name = next((name for name in NAMES if name in title), None)
            if name is not None and name not in found:
                found[name] = process.memory_full_info().uss
        except psutil.Error:
            continue
    return found


def steps_of(output: Path) -> int:
    """Train steps that the run has written."""
    file = output / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def sample(output: Path, *, steps: int, every: float, overrides: Sequence[str]) -> list[tuple[int, dict[str, int]]]:
    """Run, and look every `every` seconds: (train steps so far, private bytes of each process)."""
    command = [sys.executable, "-m", "async_rl.run", *TINY, *overrides, f"total_train_steps={steps}"]
    samples: list[tuple[int, dict[str, int]]] = []
    with subprocess.Popen([*command, f"output_dir={output}"], cwd=ROOT, stdout=subprocess.DEVNULL) as run:
        process = psutil.Process(run.pid)
        while run.poll() is None:
            time.sleep(every)
            done = steps_of(output)
            if 0 < done < steps and run.poll() is None:  # the end of a run writes its report and its model
                samples.append((done, private_memory(process)))
                if len(samples) % 20 == 1:
                    say(f"step {done}: " + ", ".join(f"{k} {v / MB:.0f} MB" for k, v in samples[-1][1].items()))
    if run.returncode:
        raise RuntimeError(f"the run ended with {run.returncode}; see {output}/logs")
    return samples


def slope(samples: Sequence[tuple[int, Mapping[str, int]]], name: str, *, first: float, last: float) -> float:
    """Bytes per step, of the samples between two shares of the steps."""
    steps = samples[-1][0]
    points = [(s, m[name]) for s, m in samples if first * steps <= s <= last * steps and name in m]
    done, held = np.array(points, np.float64).T
    return float(np.polyfit(done, held, 1)[0])


def table(samples: Sequence[tuple[int, Mapping[str, int]]]) -> str:
    """A row per process."""
    steps = samples[-1][0]
    rows: list[Sequence[str]] = []
    for name in NAMES:
        held = [(s, m[name]) for s, m in samples if name in m]
        if not held:
            continue
        early = next(m for s, m in held if s >= steps / 10)
        slopes = (slope(samples, name, first=first, last=first + 0.25) / 1024 for first in (0.25, 0.75))
        row = (name, f"{early / MB:.0f}", f"{held[-1][1] / MB:.0f}", *(f"{each:+.0f}" for each in slopes))
        rows.append(row)
    header = ("process", f"MB at step {steps // 10}", f"MB at step {steps}", "kB per step, 2nd quarter", "last quarter")
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--keep", type=Path, help="file for the samples, JSON")
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        samples = sample(Path(folder) / "run", steps=arguments.steps, every=arguments.every, overrides=overrides)
    if arguments.keep:
        arguments.keep.write_text(json.dumps(samples))
    show(table(samples))


if __name__ == "__main__":
    main()
