"""Records of a resumed run: each step and each group is there once."""

import json

from async_rl.metrics.recorder import ENDED_UNRECORDED, truncate_records, unrecorded_groups


def write(path, *lines, tail=""):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def group(number, outcome, step=None):
    return {"group": number, "outcome": outcome, "train_step": step}


def test_truncate_records_removes_records_after_the_checkpoint(tmp_path):
    write(tmp_path / "metrics.jsonl", *({"train_step": n} for n in range(1, 6)), tail='{"train_step": 6, "lo')
    write(tmp_path / "validation.jsonl", {"train_step": 0}, {"train_step": 4})
    ended = [group(0, "trained", 3), group(1, "dropped")]
    write(tmp_path / "ledger.jsonl", *ended, group(2, "trained", 4), group(3, "open"), {"outcome": "total"})
    truncate_records(tmp_path, train_step=3)
    assert [line["train_step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [line["train_step"] for line in read(tmp_path / "validation.jsonl")] == [0]
    assert read(tmp_path / "ledger.jsonl") == ended
    assert not list(tmp_path.glob("*.partial"))
    truncate_records(tmp_path / "nothing there", train_step=3)


def test_unrecorded_groups_names_a_group_whose_end_is_missing(tmp_path):
    write(tmp_path / "ledger.jsonl", group(0, "trained", 3), group(2, "dropped"))
    (unrecorded,) = unrecorded_groups(tmp_path, next_group=5, live={3, 4})
    assert (unrecorded["group"], unrecorded["outcome"]) == (1, "dropped")
    assert (unrecorded["kind"], unrecorded["reason"]) == (ENDED_UNRECORDED.kind, str(ENDED_UNRECORDED))
