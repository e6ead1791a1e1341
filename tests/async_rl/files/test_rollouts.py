"""Files of rollouts: bounded, complete or absent, and readable next to damaged ones."""

from dataclasses import replace

import pyarrow as pa
import pytest

from async_rl.files.rollouts import (
    FailedRollout,
    FailedRollouts,
    RecordConfig,
    read_failed,
    read_steps,
    recorded_steps,
    tool_calls_of,
    truncate_steps,
    write_step,
)


def write(directory, *steps, value=0, keep=100):
    for step in steps:
        write_step(directory, pa.table({"reward": [step + value]}), train_step=step, keep=keep)


def rewards(directory):
    return {step: table["reward"].to_pylist() for step, table in read_steps(directory)}


def test_files_of_the_newest_steps_stay_and_a_rewritten_step_is_replaced(tmp_path):
    write(tmp_path / "rollouts", 2, 4, 6, 8, keep=3)
    write(tmp_path / "rollouts", 6, value=100, keep=3)
    assert rewards(tmp_path / "rollouts") == {4: [4], 6: [106], 8: [8]}
    assert rewards(tmp_path / "missing") == {}


def test_truncation_removes_later_steps_and_incomplete_files(tmp_path):
    write(tmp_path, 1, 2, 3)
    (tmp_path / "step-000004.parquet.partial").write_bytes(b"half")
    truncate_steps(tmp_path, train_step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001.parquet", "step-000002.parquet"]
    truncate_steps(tmp_path / "missing", train_step=2)


def test_a_write_that_is_cut_short_leaves_the_earlier_file(tmp_path, monkeypatch):
    write(tmp_path, 1)

    def full(_table, path, **_options):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, 1, 2, value=100)
    assert rewards(tmp_path) == {1: [1]}


@pytest.mark.parametrize("damage", [b"", b"PAR1 and nothing else", None])
def test_damaged_file_is_named_and_the_others_are_read(tmp_path, damage):
    write(tmp_path, 1, 2, 3)
    path = recorded_steps(tmp_path)[2]
    path.write_bytes(path.read_bytes()[:-30] if damage is None else damage)
    first, second, third = read_steps(tmp_path)
    assert (first[0], second[0], third[0]) == (1, 2, 3) and third[1]["reward"].to_pylist() == [3]
    assert isinstance(second[1], str) and str(path) in second[1]


def failed(group):
    return FailedRollout(
        group=group,
        trajectory=1,
        prompt_index=group + 10,
        admitted_version=3,
        error="ValueError: no \u2028 number (/a/b.py:12 in exact)",
        error_kind="ValueError",
        error_line="/a/b.py:12 in exact",
        tokens=7,
        prompt="1+1",
        turns=[{"text": "2", "tool_calls": [], "reply": ""}],
    )


def test_failed_rollouts_are_bounded_by_step_and_number_of_files(tmp_path):
    config = RecordConfig(steps=2, trajectories=3)
    for start in (0, 2):  # the second as after a restart
        records = FailedRollouts(tmp_path, config=config)
        for group in range(start, start + 2):
            records.add(failed(group), train_step=1)
    assert list(read_failed(tmp_path)) == [(1, failed(group)) for group in range(3)]
    for step in (2, 3):
        records.add(failed(step), train_step=step)
    assert list(read_failed(tmp_path)) == [(2, failed(2)), (3, failed(3))]
    FailedRollouts(tmp_path / "none", config=RecordConfig(steps=0)).add(failed(1), train_step=1)
    assert not (tmp_path / "none").exists() and not list(read_failed(tmp_path / "none"))


def test_a_failed_rollout_with_text_that_utf8_cannot_hold_is_written(tmp_path):
    said = r'<tool_call>{"name": "\udc00", "arguments": {"text": "smile \ud83d\ude00 \ud83d"}}</tool_call>'
    turns = [{"text": said, "tool_calls": tool_calls_of(said), "reply": "a\x00b"}]
    FailedRollouts(tmp_path, config=RecordConfig()).add(replace(failed(1), error="\ud83d", turns=turns), train_step=1)
    ((_, found),) = read_failed(tmp_path)
    assert found.error == "\ufffd" and found.turns == turns
    assert turns[0]["tool_calls"] == [{"name": "\ufffd", "arguments": '{"text": "smile 😀 \ufffd"}', "error": None}]


def test_a_damaged_line_of_a_failed_rollout_is_named_and_the_others_are_read(tmp_path):
    records = FailedRollouts(tmp_path, config=RecordConfig())
    for group in range(2):
        records.add(failed(group), train_step=0)
    (path,) = tmp_path.iterdir()
    first, second, _ = path.read_text().split("\n")
    path.write_text(f"{first[:40]}\n{second}\n")
    (_, note), (_, rollout) = read_failed(tmp_path)
    assert f"{path} line 1" in note and rollout == failed(1)


@pytest.mark.parametrize(("field", "value"), [("steps", -1), ("trajectories", 0), ("routing_bytes", -1)])
def test_bound_out_of_range_is_refused(field, value):
    with pytest.raises(ValueError, match=f"rollout.record.{field}"):
        RecordConfig(**{field: value})
