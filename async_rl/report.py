"""`python -m async_rl.report DIR...`: curves and last values of runs, as `report.html` and `report.png`."""

from __future__ import annotations

if __name__ == "__main__":  # first, as the imports below take seconds
    from async_rl.files.command import end_process

    end_process("async_rl.report")

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from async_rl.files.atomic_dir import whole_file
from async_rl.files.command import prog
from async_rl.metrics.curves import draw_curves
from async_rl.metrics.report import read_run, write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog("report"), description=(__doc__ or "").partition("`: ")[2])
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="output_dir of a run")
    parser.add_argument("--out", type=Path, default=None, help="folder to write to, default: the first DIR")
    arguments = parser.parse_args(argv)
    try:
        runs = [read_run(directory) for directory in arguments.directories]
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    out: Path = arguments.out or arguments.directories[0]
    out.mkdir(parents=True, exist_ok=True)
    write_report(runs, out / "report.html")
    with whole_file(out / "report.png") as file:
        draw_curves(runs).savefig(file, dpi=110, format="png")
    sys.stdout.write(f"{out / 'report.html'}\n{out / 'report.png'}\n")
    return 0
