"""`python -m async_rl.view DIR`: the rollouts of a run as one HTML page, `DIR/rollouts.html`, which opens from disk."""

from __future__ import annotations

if __name__ == "__main__":  # first, as the imports below take seconds
    from async_rl.files.command import end_process

    end_process("async_rl.view")

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from async_rl.files.command import prog
from async_rl.metrics.viewer import write_page


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog("view"), description=(__doc__ or "").partition("`: ")[2])
    parser.add_argument("directory", type=Path, metavar="DIR", help="output_dir of a run")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="page, default: DIR/rollouts.html")
    arguments = parser.parse_args(argv)
    directory: Path = arguments.directory
    path: Path = arguments.out or directory / "rollouts.html"
    try:
        notes = write_page(directory, path, decode=_decoder(directory / "model"))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for note in notes:
        sys.stderr.write(f"{note}\n")
    sys.stdout.write(f"{path}\n")
    return 0


def _decoder(folder: Path) -> Callable[[int], str] | None:
    """Token id -> text, by the tokenizer of the run; None if there is none."""
    if not (folder / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer  # takes seconds to import

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))
