"""The parity table: `python -m tests.parallel.parity_table`, or `make parity`. Exit status 1 if a cell is off.

--layout tp2 pp2 --family qwen3_moe --replay R3 --recompute full --packing packed    cells to run; all without
--support          the same cells on tokens that were sampled from parts of the vocabulary
--trees mixed      the packed cells with sequences that share prefixes, in one of the shapes of support.TREES
--critic own       the same cells of the value model, with an own trunk or with that of the policy (shared)
--json FILE        one line per cell, written at its end; cells in it within the tolerance are not repeated
--markdown FILE    the summary as a table
--work FOLDER      keeps checkpoints and references for a later call
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tests.parallel.parity import TOLERANCE, Difference, run_cells
from tests.parallel.parity_cells import FAMILIES, LAYOUTS, PACKINGS, RECOMPUTES, REPLAYS, Cell, all_cells
from tests.parallel.support import TREES

CHOICES = {
    "family": tuple(FAMILIES),
    "layout": tuple(LAYOUTS),
    "replay": REPLAYS,
    "recompute": RECOMPUTES,
    "packing": PACKINGS,
}
Results = dict[str, Difference]


def chosen_cells(options: argparse.Namespace) -> list[Cell]:
    """Cells whose every field is among those asked for."""
    cells = [c for c in all_cells() if all(getattr(c, name) in getattr(options, name) for name in CHOICES)]
    if options.trees:
        cells = [cell for cell in cells if cell.packing == "packed"]
    return [replace(cell, support=options.support, trees=options.trees, critic=options.critic) for cell in cells]


def read_results(path: Path | None) -> Results:
    """Results of earlier calls, by the name of the cell."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line.pop("cell"): Difference(**line) for line in lines}


def failed(results: Results) -> list[str]:
    """Names of the cells above the tolerance."""
    return [name for name, difference in results.items() if not difference.largest <= TOLERANCE]


def summary(results: Results, cells: Sequence[Cell]) -> str:
    """The largest differences of each layout and family as a markdown table."""
    lines = [
        "| layout | family | cells | loss | logprobs | gradients | worst gradient |",
        "|---|---|---|---|---|---|---|",
    ]
    for layout in LAYOUTS:
        for family in FAMILIES:
            names = [c.name for c in cells if (c.layout, c.family) == (layout, family) and c.name in results]
            if not names:
                continue
            found = [results[name] for name in names]
            worst = max(found, key=lambda d: d.gradients)
            figures = " | ".join(
                f"{max(getattr(d, field) for d in found):.1e}" for field in ("loss", "logprobs", "gradients")
            )
            lines.append(f"| {layout} | {family} | {len(found)} | {figures} | `{worst.worst or worst.error[-80:]}` |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    cells = chosen_cells(options)
    results = read_results(options.json)
    off = failed(results)
    todo = [cell for cell in cells if cell.name not in results or cell.name in off]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for cell, difference in run_cells(todo, folder):
            results[cell.name] = difference
            _say(_line(cell, difference))
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps({"cell": cell.name, **asdict(difference)}) + "\n")
    wanted = {cell.name: results[cell.name] for cell in cells}
    table = summary(wanted, cells)
    _say("\n" + table)
    if options.markdown:
        options.markdown.write_text(table + "\n")
    off = failed(wanted)
    largest = max((d.largest for d in wanted.values()), default=0.0)
    _say(f"\n{len(wanted)} cells, largest relative difference {largest:.2e}, tolerance {TOLERANCE:.0e}")
    for name in off:
        _say(f"OFF {name}: {wanted[name].error or wanted[name]}")
    return 1 if off or not wanted else 0


def _line(cell: Cell, found: Difference) -> str:
    if found.error:
        return f"{cell.name:52} {found.error}"
    mark = "" if found.largest <= TOLERANCE else "  OFF"
    return f"{cell.name:52} {found.loss:.1e} {found.logprobs:.1e} {found.gradients:.1e} {found.worst}{mark}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=choices)
    parser.add_argument("--support", action="store_true")
    parser.add_argument("--trees", choices=TREES, default="")
    parser.add_argument("--critic", choices=("own", "shared"), default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--work", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
