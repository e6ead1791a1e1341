"""`python -m async_rl.view DIR`: the rollouts of a run as one HTML page that opens from disk, `DIR/rollouts.html`.

With --live, its rollouts and its report are on a local port, and open pages renew themselves while the run lives.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, as the imports below take seconds
    from async_rl.files.command import end_process

    end_process("async_rl.view")

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from async_rl.files.command import prog
from async_rl.metrics.pages import serve
from async_rl.metrics.viewer import write_page


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or serve both; returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog("view"), description=(__doc__ or "").partition("`: ")[2])
    parser.add_argument("directory", type=Path, metavar="DIR", help="output_dir of a run")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="page, default: DIR/rollouts.html")
    parser.add_argument("--live", action="store_true", help="serve report and rollouts instead, until Ctrl-C")
    parser.add_argument("--host", default="127.0.0.1", help="with --live: address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=6010, help="with --live (default: %(default)s; 0: any free one)")
    arguments = parser.parse_args(argv)
    directory: Path = arguments.directory
    path: Path = arguments.out or directory / "rollouts.html"
    try:
        if arguments.live:
            return _serve(directory, host=arguments.host, port=arguments.port)
        notes = write_page(directory, path, decode=_decoder(directory / "model"))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for note in notes:
        sys.stderr.write(f"{note}\n")
    sys.stdout.write(f"{path}\n")
    return 0


def _serve(directory: Path, *, host: str, port: int) -> int:
    """Serve the pages of a run until Ctrl-C."""
    from async_rl.metrics.report import read_run, report_page

    read_run(directory)

    def rollouts() -> str:
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder, "rollouts.html")
            write_page(directory, page, decode=_decoder(directory / "model"))
            return page.read_text(encoding="utf-8")

    pages = {"/report.html": lambda: report_page([read_run(directory)], beside=directory), "/rollouts.html": rollouts}
    with serve(directory, pages, host=host, port=port) as server, contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write("".join(f"http://{host}:{server.server_port}{path}\n" for path in pages))
        sys.stdout.flush()
        server.serve_forever()
    return 0


def _decoder(folder: Path) -> Callable[[int], str] | None:
    """Token id -> text, by the tokenizer of the run; None if there is none."""
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        fast: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda token: str(fast.decode([token], skip_special_tokens=False))
    if not (folder / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer  # takes seconds to import

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))
