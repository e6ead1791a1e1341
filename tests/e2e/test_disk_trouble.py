"""A full disk, a damaged journal and the journal of another run, through a real run."""

import json
import sqlite3

import psutil
import pytest

from tests.e2e.runs import finish, lines, start, wait_for_step

pytestmark = pytest.mark.timeout(900)
OVERRIDES = ("rollout.groups_per_batch=2", "validation.prompts=0", "checkpoint.every=3")


def test_full_disk_and_damaged_journal_cost_no_group(tmp_path):
    directory, warm_starts = tmp_path / "run", tmp_path / "warm_start"
    process = start(directory, warm_starts, *OVERRIDES, "total_train_steps=500")
    wait_for_step(directory, 2, process)
    room = max(path.stat().st_size for path in directory.glob("journal/content/*.data")) + 20_000
    worker = json.loads((directory / "processes.json").read_text())["worker-0"]
    psutil.Process(worker).rlimit(psutil.RLIMIT_FSIZE, (room, room))  # no file of the process grows further
    output = finish(process)
    assert process.returncode == 1, output
    assert any("journal/content" in line and "room" in line for line in output.splitlines()[-4:]), output
    before = {line["group"]: line for line in lines(directory, "ledger.jsonl") if line.get("outcome") == "trained"}
    last = len(lines(directory, "metrics.jsonl")) + 2

    with sqlite3.connect(directory / "journal/events.sqlite") as journal:
        journal.execute("UPDATE head SET checksum = checksum + 1 WHERE id = 1")
    journal.close()
    process = start(directory, warm_starts, *OVERRIDES, "seed=1")
    output = finish(process)
    assert process.returncode == 2, output
    assert "seed 0" in output and "seed 1" in output, "both runs are named"

    process = start(directory, warm_starts, *OVERRIDES, f"total_train_steps={last}")
    output = finish(process)
    assert process.returncode == 0, output
    assert "row 1 of table head is damaged" in " ".join(output.split())
    steps = lines(directory, "metrics.jsonl")
    assert [s["train_step"] for s in steps] == list(range(1, last + 1))
    assert not any(s["ledger/error"] for s in steps)
    *groups, total = lines(directory, "ledger.jsonl")
    assert (total["error"], total["trained"], total["dropped"]) == (0, 2 * last, 0)
    assert sorted(g["group"] for g in groups) == list(range(total["admitted"]))
    after = {line["group"]: line["train_step"] for line in groups}
    assert {g: after[g] for g in before} == {g: line["train_step"] for g, line in before.items()}
