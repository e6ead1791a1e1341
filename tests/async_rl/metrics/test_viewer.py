"""The page of a run's rollouts: what its scripts unpack is what the files hold."""

import base64
import gzip
import json
import re

import numpy as np
import pyarrow as pa
import pytest

from async_rl.files.rollouts import FOLDER, FailedRollout, FailedRollouts, RecordConfig, recorded_steps, write_step
from async_rl.metrics.viewer import CHUNK_ROWS
from async_rl.trainer.recording import _PER_TOKEN, _ROW
from async_rl.view import main

SCRIPT = re.compile(r'<script type="text/plain" id="([\w-]+)">(.*?)</script>', re.S)
TEXT = "<tool_call>x</tool_call> </script> \0 \1 ü"


def row(step, group, number, *, tokens=5, path=0, agent="policy"):
    """A row with 2 prompt tokens; the last two of the others are trained, the first is too old."""
    sampled = tokens - 2
    made = {
        "train_step": step,
        "group": group,
        "trajectory": number,
        "path": path,
        "agent": agent,
        "reward": 0.5 * number,
        "stop_reason": "error",
        "info": [("turns", 1.0)],
        "turns": [],
        "segments": [],
    }
    if tokens == 0:
        return made | {key: [] for key in ("token_ids", *_PER_TOKEN, "effect")}
    segment = {"start": 2, "tokens": sampled, "param_version": 7, "staleness": 3, "replica": "r", "stop_reason": "stop"}
    experts = [[[i, 7], [i + 1, 300]] for i in range(tokens - 1)] + [[[-1] * 2] * 2]
    return made | {
        "advantage": 0.25,
        "stop_reason": "stop",
        "prompt": f"prompt of {group}",
        "turns": [{"text": TEXT, "reply": "seen", "tool_calls": []}],
        "segments": [segment],
        "token_ids": list(range(step, step + tokens)),
        "behaviour_logprobs": [None, None, *np.linspace(-1, -2, sampled)],
        "proximal_logprobs": [None, None, None, *[-1.25] * (sampled - 1)],
        "logprobs": [None, None, None, *[-1.5] * (sampled - 1)],
        "gradient_share": [None, None, None, *[0.125] * (sampled - 1)],
        "effect": [None, None, "too_old", *["trained"] * (sampled - 1)],
        "routed_experts": None if number else experts,
    }


SCHEMA = pa.schema(
    [
        *_ROW,
        ("token_ids", pa.list_(pa.int32())),
        *((name, pa.list_(pa.float32())) for name in _PER_TOKEN),
        ("effect", pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        ("routed_experts", pa.list_(pa.list_(pa.list_(pa.int16(), 2), 2))),
    ],
    metadata={"moe_layers": "[1, 3]"},
)


def write(run, step, rows):
    write_step(run / FOLDER, pa.Table.from_pylist(rows, schema=SCHEMA), train_step=step, keep=100)


def unpacked(run):
    """Meta data of the page, its columns, its texts, and the content of its other scripts, by name."""
    page = (run / "rollouts.html").read_text()
    meta = json.loads(re.search(r'id="meta">(.*?)</script>', page, re.S)[1])
    scripts = {name: gzip.decompress(base64.b64decode(coded)) for name, coded in SCRIPT.findall(page)}
    types = [(name, "<f4" if kind == "float" else "<i4") for name, kind in meta["columns"]]
    columns = {
        name: np.frombuffer(scripts["columns"], kind, meta["rows"], 4 * meta["rows"] * i).tolist()
        for i, (name, kind) in enumerate(types)
    }
    return meta, columns, scripts.pop("texts").decode().split("\0"), scripts


@pytest.fixture
def run(tmp_path):
    write(tmp_path, 2, [row(2, 0, n) for n in range(CHUNK_ROWS + 6)])
    write(tmp_path, 4, [row(4, 1, 0), row(4, 1, 1, tokens=0), row(4, 2, 0, tokens=9)])
    return tmp_path


def test_view_writes_a_page_with_every_row_and_its_text(run, capsys):
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "rollouts.html")
    meta, columns, texts, scripts = unpacked(run)
    rows = CHUNK_ROWS + 9
    assert (meta["rows"], meta["chunks"]) == (rows, [0, 3, CHUNK_ROWS + 3])
    assert len(scripts["columns"]) == 4 * rows * len(meta["columns"])
    assert columns["step"] == [4] * 3 + [2] * (rows - 3)
    assert columns["length"][:3] == [5, 0, 9] and columns["staleness"][:3] == [3, 0, 3]
    assert [meta["stops"][i] for i in columns["stop"][:3]] == ["stop", "error", "stop"]
    assert columns["reward"][3:6] == [0.0, 0.5, 1.0] and np.isnan(columns["advantage"][1])
    prompts = scripts["prompts"].decode().split("\0")
    assert [prompts[i] if i >= 0 else None for i in columns["prompt"][:3]] == ["prompt of 1", None, "prompt of 2"]
    said = TEXT.replace("\0", "").replace("\1", "")
    assert texts[:3] == [f"{said}\1seen", "", f"{said}\1seen"] and len(texts) == rows


def test_chunks_hold_the_values_of_each_token(run):
    assert main([str(run)]) == 0
    meta, _, _, scripts = unpacked(run)
    data = scripts["chunk-0"]
    size = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + size])
    assert [entry["tokens"] for entry in header] == [5, 0, 9]
    assert header[0]["segments"] == [[2, 3, 7, 3, "r", "stop"]] and header[0]["info"] == {"turns": 1.0}
    ids = np.frombuffer(data, "<u4", 14, 4 + size)
    engine, proximal, current, share = np.frombuffer(data, "<f2", 56, 4 + size + 56).reshape(4, 14)
    effects = np.frombuffer(data, "u1", 14, 4 + size + 168)
    experts = np.frombuffer(data[4 + size + 182 :], "<i2").reshape(14, 2, 2)
    assert np.isnan(share[:3]).all() and share[3:5].tolist() == [12.5] * 2, "in percent"
    assert [entry["routing"] for entry in header] == [[2, 2], None, [2, 2]] and meta["moe_layers"] == [1, 3]
    assert experts[3].tolist() == [[3, 7], [4, 300]] and experts[4].tolist() == [[-1, -1]] * 2
    assert experts[5].tolist() == [[0, 7], [1, 300]]
    assert ids.tolist() == [*range(4, 9), *range(4, 13)]
    assert np.isnan(engine[:2]).all() and engine[2:5].tolist() == [-1, -1.5, -2]
    assert np.isnan(proximal[:3]).all() and (engine + proximal)[3:5].tolist() == [-1.25] * 2
    assert (engine + current)[3:5].tolist() == [-1.5] * 2
    named = [meta["effects"][code - 1] if code else None for code in effects[:5]]
    assert named == [None, None, "too_old", "trained", "trained"]


def failed(group, number, *, error, kind="KeyError", line=""):
    return FailedRollout(
        group=group,
        trajectory=number,
        prompt_index=0,
        admitted_version=0,
        error=error,
        error_kind=kind,
        error_line=line,
        tokens=11,
        prompt=f"prompt of {group}",
        turns=[{"text": "said", "tool_calls": [], "reply": "seen"}],
    )


def test_failed_rollouts_complete_their_rows_or_are_rows_of_their_own(run):
    records = FailedRollouts(run / FOLDER, config=RecordConfig())
    key, place = "KeyError: 'unit' (/a/own.py:7 in score)", "/a/own.py:{} in score"
    records.add(failed(1, 1, error=key, line=place.format(7)), train_step=2)  # of a group that was trained at step 4
    records.add(failed(9, 0, error=key, line=place.format(7)), train_step=2)
    records.add(failed(8, 0, error="RewardError: no unit", line=place.format(12)), train_step=2)
    records.add(failed(10, 2, error="EngineTimeout: slow", kind="EngineTimeout"), train_step=4)
    assert main([str(run)]) == 0
    meta, columns, texts, scripts = unpacked(run)
    places = list(zip(columns["step"], columns["group"], strict=True))
    assert places[:6] == [(4, 10), (4, 1), (4, 1), (4, 2), (2, 8), (2, 9)]
    errors = [meta["errors"][i] if i >= 0 else None for i in columns["error"][:6]]
    line = "KeyError, own.py:{} in score"
    assert errors == ["EngineTimeout", None, line.format(7), None, line.format(12), line.format(7)]
    assert texts[2] == "said\1seen\3KeyError: 'unit' (/a/own.py:7 in score)" == texts[5]
    assert columns["length"][2] == 11 and columns["prompt"][2] == columns["prompt"][1]
    assert len(meta["chunks"]) == len([name for name in scripts if name.startswith("chunk-")]) == 5


def test_view_leaves_out_a_damaged_file_with_a_note(run, capsys):
    path = recorded_steps(run / FOLDER)[2]
    path.write_bytes(path.read_bytes()[:-40])
    assert main([str(run)]) == 0
    assert str(path) in capsys.readouterr().err
    meta, *_ = unpacked(run)
    assert meta["rows"] == 3 and str(path) in meta["notes"][0]


def test_view_of_a_folder_without_rollouts_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "rollout.record.steps" in capsys.readouterr().err
