"""JSON lines: one JSON value per line, lines separated by newline characters."""

from __future__ import annotations

from pathlib import Path


def read_lines(path: Path, *, errors: str = "strict", last_bytes: int | None = None) -> list[str]:
    """Lines of a UTF-8 file, with or without a byte order mark.

    Args:
        last_bytes: only the lines that begin within so many bytes of the end; None for all.

    Only a newline character ends a line. `str.splitlines` also cuts at characters that a JSON string may hold, such as
    U+2028 and U+0085. A carriage return before the newline stays in the line; JSON reads it as white space.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is not UTF-8 and `errors` is "strict".
    """
    if last_bytes is not None and (skipped := path.stat().st_size - last_bytes) > 0:
        with path.open("rb") as binary:
            binary.seek(skipped - 1)
            binary.readline()  # the end of a line
            return [line.decode("utf-8", errors) for line in binary]
    with path.open(encoding="utf-8-sig", errors=errors, newline="\n") as file:
        return list(file)
