"""One HTML page with the rollouts of a run, which opens from disk: `viewer.html` with the data of `rollouts/`.

The data are base64 of gzip. The page unpacks columns and texts when it opens, and the tokens of a chunk of rows when a
reader asks for them:

    columns      _COLUMNS, 4 bytes per row each
    prompts      distinct texts, separated by \\0
    texts        conversations, separated by \\0; turns by \\2; a turn and its reply by \\1
    vocabulary   JSON, token id -> text
    chunk-N      at most CHUNK_ROWS rows: length of the JSON (uint32), JSON (segments, info), then for all their tokens
                 uint32 ids, float16 engine logprobs, float16 differences of the two trainer logprobs, uint8 effects
"""

from __future__ import annotations

import base64
import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from async_rl.files.rollouts import FOLDER, read_steps

CHUNK_ROWS = 64
_COLUMNS = {
    "step": "int",
    "group": "int",
    "trajectory": "int",
    "stop": "int",
    "prompt": "int",
    "length": "int",
    "staleness": "int",
    "reward": "float",
    "advantage": "float",
}
_PAGE = Path(__file__).with_suffix(".html")
_SEPARATORS = str.maketrans("", "", "\0\1\2")


@dataclass(slots=True, eq=False)
class _Names:
    """Distinct texts, numbered in the order of their first use."""

    numbers: dict[str, int] = field(default_factory=dict[str, int])

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


class _Page:
    """Data of a page, in the order of the rows. chunks: file to which the chunks are written."""

    def __init__(self, chunks: IO[str]) -> None:
        self._chunks = chunks
        self.columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self.texts: list[str] = []
        self.first_rows: list[int] = []  # of each chunk
        self.prompts, self.stops, self.replicas, self.effects = _Names(), _Names(), _Names(), _Names()
        self.token_ids: set[int] = set()

    def add(self, step: int, table: Any) -> None:
        """Add the rows of a step."""
        for start in range(0, len(table), CHUNK_ROWS):
            part = table.slice(start, CHUNK_ROWS)
            self.first_rows.append(len(self.texts))
            tokens = part["token_ids"].combine_chunks()
            header = self._add_rows(
                step, part.drop_columns(_TOKEN_COLUMNS).to_pylist(), tokens.value_lengths().to_pylist()
            )
            arrays = [np.asarray(tokens.flatten(), np.uint32), *self._logprobs(part), self._effect_codes(part)]
            self.token_ids.update(np.unique(arrays[0]).tolist())
            data = b"".join([len(header).to_bytes(4, "little"), header, *(array.tobytes() for array in arrays)])
            self._chunks.write(_script(f"chunk-{len(self.first_rows) - 1}", data))

    def _add_rows(self, step: int, rows: list[dict[str, Any]], lengths: Sequence[int]) -> bytes:
        """Add rows without their tokens; returns the JSON of their chunk."""
        found: list[dict[str, Any]] = []
        for row, length in zip(rows, lengths, strict=True):
            prompt, segments = row["prompt"], row["segments"]
            values = {
                "step": step,
                "group": row["group"],
                "trajectory": row["trajectory"],
                "stop": self.stops.number(row["stop_reason"]),
                "prompt": -1 if prompt is None else self.prompts.number(prompt.translate(_SEPARATORS)),
                "length": length,
                "staleness": max((segment["staleness"] for segment in segments), default=0),
                "reward": row["reward"],
                "advantage": np.nan if row["advantage"] is None else row["advantage"],
            }
            for name, value in values.items():
                self.columns[name].append(value)
            said = (f"{t['text'].translate(_SEPARATORS)}\1{t['reply'].translate(_SEPARATORS)}" for t in row["turns"])
            self.texts.append("\2".join(said))
            for segment in segments:
                self.replicas.number(segment["replica"])
            found.append(
                {name: values[name] for name in ("step", "group", "trajectory")}
                | {"tokens": length, "info": dict(row["info"]), "segments": [list(s.values()) for s in segments]}
            )
        return json.dumps(found, ensure_ascii=False).encode()

    def _logprobs(self, part: Any) -> list[NDArray[np.float16]]:
        """float16 [n] each: of the engine, and the differences of the trainer's to it; NaN for none."""
        engine, proximal, current = (
            np.asarray(part[name].combine_chunks().flatten().fill_null(np.nan), np.float32)
            for name in ("behaviour_logprobs", "proximal_logprobs", "logprobs")
        )
        return [values.astype(np.float16) for values in (engine, proximal - engine, current - engine)]

    def _effect_codes(self, part: Any) -> NDArray[np.uint8]:
        """uint8 [n]: 1 + number of the effect; 0 unless sampled."""
        coded = part["effect"].combine_chunks().flatten().dictionary_encode()
        codes = np.array([0, *(1 + self.effects.number(name) for name in coded.dictionary.to_pylist())], np.uint8)
        return codes[np.asarray(coded.indices.fill_null(-1)) + 1]


_TOKEN_COLUMNS = ["token_ids", "behaviour_logprobs", "proximal_logprobs", "logprobs", "effect"]


def write_page(directory: Path, path: Path, *, decode: Callable[[int], str] | None) -> list[str]:
    """Write the page of a run; returns texts about files that are left out.

    Args:
        directory: of the run.
        path: of the page.
        decode: token id -> text; None shows ids.

    Raises:
        ValueError: the run has no rollouts that can be read.
    """
    notes: list[str] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as chunks:
        page = _Page(chunks)
        for step, table in read_steps(directory / FOLDER):
            if isinstance(table, str):
                notes.append(table)
            else:
                page.add(step, table)
        if not page.texts:
            raise ValueError(
                " ".join([f"{directory / FOLDER} has no rollouts (rollout.record.steps > 0 writes them).", *notes])
            )
        before, rest = _PAGE.read_text(encoding="utf-8").split("<!--index-->")
        middle, after = rest.split("<!--chunks-->")
        with path.open("w", encoding="utf-8") as file:
            file.write(before + _index(page, name=directory.resolve().name, notes=notes, decode=decode) + middle)
            chunks.seek(0)
            shutil.copyfileobj(chunks, file)
            file.write(after)
    return notes


def _index(page: _Page, *, name: str, notes: list[str], decode: Callable[[int], str] | None) -> str:
    """The scripts with what the page unpacks when it opens."""
    meta = {
        "name": name,
        "notes": notes,
        "rows": len(page.texts),
        "columns": list(_COLUMNS.items()),
        "chunks": page.first_rows,
        "stops": list(page.stops.numbers),
        "replicas": list(page.replicas.numbers),
        "effects": list(page.effects.numbers),
    }
    columns = b"".join(
        np.array(page.columns[name], np.float32 if kind == "float" else np.int32).tobytes()
        for name, kind in _COLUMNS.items()
    )
    vocabulary = {} if decode is None else {str(i): decode(i) for i in sorted(page.token_ids)}
    written = json.dumps(meta, ensure_ascii=False).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    return "".join(
        [
            f'<script type="application/json" id="meta">{written}</script>\n',
            _script("columns", columns),
            _script("prompts", "\0".join(page.prompts.numbers).encode()),
            _script("texts", "\0".join(page.texts).encode()),
            _script("vocabulary", json.dumps(vocabulary, ensure_ascii=False).encode()),
        ]
    )


def _script(name: str, data: bytes) -> str:
    coded = base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{coded}</script>\n'
