"""Writes the sample of word problems in `sample/`: `python -m recipes.math.make_sample`."""

from __future__ import annotations

import json
import random
from pathlib import Path

SAMPLE = Path(__file__).parent / "sample"
SIZES = {"train": 480, "validation": 64}
NAMES = ("Ann", "Ben", "Eva", "Jim", "Kim", "Leo", "Mia", "Tom")
ITEMS = ("apples", "books", "coins", "eggs", "pens", "shells", "stamps", "toys")


def make_rows(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Rows of each file, by its name. All questions are different."""
    rng = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < sum(SIZES.values()):
        row = rng.choice((_sum, _difference, _product, _two_steps))(rng)
        rows[row["question"]] = row
    drawn = iter(rows.values())
    return {name: [next(drawn) for _ in range(size)] for name, size in SIZES.items()}


def write_sample(folder: Path = SAMPLE) -> None:
    """Write a `.jsonl` file for each name of `make_rows`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in make_rows().items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _row(question: str, *steps: str, answer: int) -> dict[str, str]:
    return {"question": question, "answer": "\n".join((*steps, f"#### {answer}"))}


def _step(text: str, left: int, sign: str, right: int) -> tuple[str, int]:
    """A line with a calculation in the notation of GSM8K, and its result: `Ann has 3+4=<<3+4=7>>7 pens.` and 7."""
    result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    made = f"{left}{sign}{right}={result}"
    return text.format(f"{left}{sign}{right}=<<{made}>>{result}"), result


def _sum(rng: random.Random) -> dict[str, str]:
    (who, other), item, a, b = rng.sample(NAMES, 2), rng.choice(ITEMS), rng.randint(2, 7), rng.randint(2, 7)
    line, result = _step(f"{who} has {{}} {item}.", a, "+", b)
    question = f"{who} has {a} {item}. {other} gives {who} {b} more {item}. How many {item} does {who} have now?"
    return _row(question, line, answer=result)


def _difference(rng: random.Random) -> dict[str, str]:
    who, item, a, b = rng.choice(NAMES), rng.choice(ITEMS), rng.randint(6, 12), rng.randint(2, 5)
    line, result = _step(f"{who} has {{}} {item} left.", a, "-", b)
    question = f"{who} has {a} {item} and loses {b} {item}. How many {item} does {who} have left?"
    return _row(question, line, answer=result)


def _product(rng: random.Random) -> dict[str, str]:
    item, a, b = rng.choice(ITEMS), rng.randint(2, 6), rng.randint(2, 6)
    line, result = _step(f"There are {{}} {item}.", a, "*", b)
    return _row(f"There are {a} boxes with {b} {item} in each box. How many {item} are there?", line, answer=result)


def _two_steps(rng: random.Random) -> dict[str, str]:
    who, item, a, b, c = rng.choice(NAMES), rng.choice(ITEMS), rng.randint(3, 6), rng.randint(3, 6), rng.randint(2, 4)
    first, total = _step(f"{who} has {{}} {item}.", a, "+", b)
    second, result = _step(f"{who} has {{}} {item} left.", total, "-", c)
    question = f"{who} has {a} {item}, finds {b} {item} and sells {c} {item}. How many {item} does {who} have left?"
    return _row(question, first, second, answer=result)


if __name__ == "__main__":
    write_sample()
