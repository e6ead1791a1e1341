"""One HTML page with the rollouts of a run, opened from disk: `viewer.html` with the data of `rollouts/`.

The data are base64 of gzip. The page unpacks columns and texts when it opens, and the tokens of a chunk of rows when a
reader asks for them:

    columns      _COLUMNS, 4 bytes per row each
    prompts      distinct texts, separated by \\0
    texts        conversations, separated by \\0; turns by \\2; a turn and its reply by \\1; after \\3 the error of a
                 failed rollout
    vocabulary   JSON, token id -> text
    chunk-N      at most CHUNK_ROWS rows: length of the JSON (uint32), JSON (segments, info), then for all their tokens
                 uint32 ids, float16 engine logprobs, float16 differences of the two trainer logprobs, float16 shares of
                 the gradient in percent, uint8 effects; then the int16 routing rows of the rows that have them

Text and error of a failed rollout are in `failed-*.jsonl`. If a recorded batch has its group, they complete its row;
otherwise it has a separate row, above the last batch before its failure.

The newest step comes first. The page is bounded: MAX_ROWS rows, MAX_TEXT characters of texts, and MAX_TOKEN_BYTES of
chunks. Older rows have no chunk; rows before them are left out, with a note.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.text import safe_text
from async_rl.files.atomic_dir import whole_file
from async_rl.files.rollouts import FOLDER, FailedRollout, read_failed, read_step, read_steps, recorded_steps
from async_rl.metrics.pages import json_script, packed_script, template
from message_queue.trajectory import POLICY

CHUNK_ROWS = 64
MAX_ROWS = 10_000
MAX_TEXT = 64_000_000  # characters
MAX_TOKEN_BYTES = 48_000_000  # of the page
_NUMBERS = ("step", "group", "trajectory", "path", "agent", "stop", "error", "prompt", "length", "staleness")
_COLUMNS = {**dict.fromkeys(_NUMBERS, "int"), "reward": "float", "advantage": "float"}
_LOGPROBS = ("behaviour_logprobs", "proximal_logprobs", "logprobs")
_TOKEN_COLUMNS = (*_LOGPROBS, "token_ids", "gradient_share", "effect", "routed_experts")
_FAILED = {"path": 0, "agent": POLICY, "reward": 0.0, "advantage": None, "stop_reason": "error", "prompt": None}
"""Values of a failed rollout that is in no batch."""
_SEPARATORS = str.maketrans("", "", "\0\1\2\3")


class _Names(dict[str, int]):
    """Distinct texts, numbered in the order of their first use."""

    def __missing__(self, text: str) -> int:
        return self.setdefault(text, len(self))


class _Page:
    """Data of a page, in the order of the rows.

    Args:
        chunks: file for the chunks.
        failed: (group, trajectory) -> the failed rollout, of trajectories in the batches.
    """

    def __init__(self, chunks: IO[str], *, failed: Mapping[tuple[int, int], FailedRollout]) -> None:
        self._chunks = chunks
        self._failed = failed
        self._token_bytes = self._text = 0
        self.rows_without_tokens = 0
        self.columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self.texts: list[str] = []
        self.first_rows: list[int] = []  # of each chunk
        self.prompts, self.stops, self.replicas, self.effects = _Names(), _Names(), _Names(), _Names()
        self.errors, self.agents = _Names(), _Names()
        self.moe_layers: list[int] = []
        self.token_ids: set[int] = set()

    @property
    def is_full(self) -> bool:
        """Whether older rows are left out."""
        return len(self.texts) >= MAX_ROWS or self._text >= MAX_TEXT

    def add_failed(self, step: int, rollouts: Sequence[FailedRollout]) -> None:
        """Add failed rollouts that are in no batch, sorted by group and trajectory."""
        for start in range(0, len(rollouts), CHUNK_ROWS):
            part = rollouts[start : start + CHUNK_ROWS]
            lists = dict.fromkeys(("turns", "segments", "info"), ())
            rows = [_FAILED | lists | {"group": r.group, "trajectory": r.trajectory} for r in part]
            own = {(r.group, r.trajectory): r for r in part}
            self._write_chunk(self._add_rows(step, rows, [0] * len(rows), own), rows=len(rows))

    def add(self, step: int, table: Any) -> None:
        """Add the rows of a step."""
        layers = (table.schema.metadata or {}).get(b"moe_layers")
        self.moe_layers = self.moe_layers if layers is None else json.loads(layers)
        for start in range(0, len(table), CHUNK_ROWS):
            part = table.slice(start, CHUNK_ROWS)
            tokens = part["token_ids"].combine_chunks()
            routing, shapes = _routing(part)
            plain = part.select([name for name in part.column_names if name not in _TOKEN_COLUMNS]).to_pylist()
            rows = [row | {"routing": shape} for row, shape in zip(plain, shapes, strict=True)]
            header = self._add_rows(step, rows, tokens.value_lengths().to_pylist(), self._failed)
            engine, proximal, current, share = (_numbers(part, name) for name in (*_LOGPROBS, "gradient_share"))
            arrays = [
                np.asarray(tokens.flatten(), np.uint32),
                *(values.astype(np.float16) for values in (engine, proximal - engine, current - engine, 100 * share)),
                self._effect_codes(part),
                routing,
            ]
            if self._write_chunk(b"".join([header, *(a.tobytes() for a in arrays)]), rows=len(rows)):
                self.token_ids.update(np.unique(arrays[0]).tolist())

    def _write_chunk(self, data: bytes, *, rows: int) -> bool:
        """Write the newest chunk unless the tokens of newer rows leave no space; whether it was written."""
        script = packed_script(f"chunk-{len(self.first_rows) - 1}", data) if self._token_bytes < MAX_TOKEN_BYTES else ""
        self._token_bytes += len(script)
        self._chunks.write(script)
        self.rows_without_tokens += 0 if script else rows
        return bool(script)

    def _add_rows(
        self,
        step: int,
        rows: Sequence[dict[str, Any]],
        lengths: Sequence[int],
        failed: Mapping[tuple[int, int], FailedRollout],
    ) -> bytes:
        """Start a chunk with rows, without their tokens; returns the length of its JSON, and the JSON."""
        self.first_rows.append(len(self.texts))
        found: list[dict[str, Any]] = []
        for row, length in zip(rows, lengths, strict=True):
            prompt, turns, segments, error = row["prompt"], row["turns"], row["segments"], ""
            own = failed.get((row["group"], row["trajectory"])) if row["stop_reason"] == "error" else None
            if own is not None:
                prompt, turns, error = own.prompt, own.turns, own.error
            values = {
                "step": step,
                "group": row["group"],
                "trajectory": row["trajectory"],
                "path": row["path"],
                "agent": self.agents[row["agent"]],
                "stop": self.stops[row["stop_reason"]],
                "error": self.errors["" if own is None else own.title] if row["stop_reason"] == "error" else -1,
                "prompt": -1 if prompt is None else self.prompts[prompt.translate(_SEPARATORS)],
                "length": length if own is None else own.tokens,
                "staleness": max((segment["staleness"] for segment in segments), default=0),
                "reward": row["reward"],
                "advantage": np.nan if row["advantage"] is None else row["advantage"],
            }
            for name, value in values.items():
                self.columns[name].append(value)
            said = (f"{t['text'].translate(_SEPARATORS)}\1{t['reply'].translate(_SEPARATORS)}" for t in turns)
            self.texts.append("\2".join(said) + (f"\3{error.translate(_SEPARATORS)}" if error else ""))
            self._text += len(self.texts[-1]) + len(prompt or "")
            for segment in segments:
                _ = self.replicas[segment["replica"]]
            found.append(
                {name: values[name] for name in ("step", "group", "trajectory", "path")}
                | {"tokens": length, "info": dict(row["info"]), "segments": [list(s.values()) for s in segments]}
                | {"routing": row.get("routing")}
            )
        header = safe_text(json.dumps(found, ensure_ascii=False)).encode()
        return len(header).to_bytes(4, "little") + header

    def _effect_codes(self, part: Any) -> NDArray[np.uint8]:
        """uint8 [n]: 1 + number of the effect; 0 unless sampled."""
        coded = part["effect"].combine_chunks().flatten().dictionary_encode()
        codes = np.array([0, *(1 + self.effects[name] for name in coded.dictionary.to_pylist())], np.uint8)
        return codes[np.asarray(coded.indices.fill_null(-1)) + 1]


def _numbers(part: Any, name: str) -> NDArray[np.float32]:
    """float32 [n] of the tokens of all rows, NaN for none."""
    return np.asarray(part[name].combine_chunks().flatten().fill_null(np.nan), np.float32)


def _routing(part: Any) -> tuple[NDArray[np.int16], list[list[int] | None]]:
    """Routing rows of all trajectories that have them, and for each trajectory (moe_layers, top_k) or None."""
    if "routed_experts" not in part.column_names:
        return np.zeros(0, np.int16), [None] * len(part)
    column = part["routed_experts"].combine_chunks()
    layers = column.type.value_type
    shape = [layers.list_size, layers.value_type.list_size]
    flat = np.asarray(column.flatten().flatten().flatten(), np.int16)
    return flat, [shape if valid else None for valid in column.is_valid().to_pylist()]


def write_page(directory: Path, path: Path, *, decode: Callable[[int], str] | None) -> list[str]:
    """Write the page of a run; returns texts about files that are left out.

    Args:
        directory: run directory.
        path: page to write.
        decode: token id -> text; None shows ids.

    Raises:
        ValueError: the run has no rollouts that can be read.
    """
    failed, in_batches, notes = _failed_rollouts(directory / FOLDER)
    recorded = recorded_steps(directory / FOLDER)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as chunks:
        page = _Page(chunks, failed=in_batches)
        for step in sorted({*recorded, *failed}, reverse=True):
            if page.is_full:
                older = sum(known <= step for known in recorded)
                notes.append(
                    f"This page has the newest {len(page.texts)} rollouts; {older} older steps are left out, and "
                    f"{directory / FOLDER} has them."
                )
                break
            page.add_failed(step, failed.get(step, []))
            if step in recorded:
                table = read_step(recorded[step])
                notes.append(table) if isinstance(table, str) else page.add(step, table)
        if not page.texts:
            raise ValueError(
                " ".join([f"{directory / FOLDER} has no rollouts (rollout.record.steps > 0 writes them).", *notes])
            )
        if page.rows_without_tokens:
            notes.append(f"The oldest {page.rows_without_tokens} rollouts have their text here, but not their tokens.")
        before, rest = template("viewer").split("<!--index-->")
        middle, after = rest.split("<!--chunks-->")
        with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
            file.write(before + _index(page, name=directory.resolve().name, notes=notes, decode=decode) + middle)
            chunks.seek(0)
            shutil.copyfileobj(chunks, file)
            file.write(after)
    return notes


def _failed_rollouts(
    folder: Path,
) -> tuple[dict[int, list[FailedRollout]], dict[tuple[int, int], FailedRollout], list[str]]:
    """Failed rollouts in no batch, by train steps done; those in a batch, by group and trajectory; notes on damage."""
    lines = list(read_failed(folder))
    found = {(r.group, r.trajectory): (step, r) for step, r in lines if not isinstance(r, str)}
    in_batches: dict[tuple[int, int], FailedRollout] = {}
    for _, table in read_steps(folder, columns=["group", "trajectory"]) if found else ():
        if not isinstance(table, str):
            keys = set(zip(table["group"].to_pylist(), table["trajectory"].to_pylist(), strict=True))
            in_batches |= {key: found[key][1] for key in keys & found.keys()}
    alone: dict[int, list[FailedRollout]] = {}
    for key in sorted(found.keys() - in_batches.keys()):
        step, rollout = found[key]
        alone.setdefault(step, []).append(rollout)
    return alone, in_batches, [text for _, text in lines if isinstance(text, str)]


def _index(page: _Page, *, name: str, notes: list[str], decode: Callable[[int], str] | None) -> str:
    """The scripts with what the page unpacks when it opens."""
    meta = {
        "name": name,
        "notes": notes,
        "rows": len(page.texts),
        "columns": list(_COLUMNS.items()),
        "chunks": page.first_rows,
        **{kind: list(getattr(page, kind)) for kind in ("agents", "stops", "replicas", "effects", "errors")},
        "moe_layers": page.moe_layers,
    }
    columns = b"".join(
        np.array(page.columns[name], np.float32 if kind == "float" else np.int32).tobytes()
        for name, kind in _COLUMNS.items()
    )
    vocabulary = {} if decode is None else {str(i): decode(i) for i in sorted(page.token_ids)}
    return "".join(
        [
            json_script("meta", meta),
            packed_script("columns", columns),
            packed_script("prompts", safe_text("\0".join(page.prompts)).encode()),
            packed_script("texts", safe_text("\0".join(page.texts)).encode()),
            packed_script("vocabulary", safe_text(json.dumps(vocabulary, ensure_ascii=False)).encode()),
        ]
    )
