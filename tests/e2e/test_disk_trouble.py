"""A disk that is full, a journal with damage at its end, a journal of another run: through a real run."""

import json

import psutil
import pytest

from tests.e2e.runs import finish, lines, start, wait_for_step

pytestmark = pytest.mark.timeout(900)
OVERRIDES = ("rollout.groups_per_batch=2", "validation.prompts=0", "checkpoint.every=3")


def newest_journal(directory):
    return max(directory.glob("journal/*.journal"))


def test_a_full_disk_and_a_damaged_end_lose_nothing_and_say_what_they_are(tmp_path):
    directory, warm_starts = tmp_path / "run", tmp_path / "warm_start"
    process = start(directory, warm_starts, *OVERRIDES, "total_train_steps=500")
    wait_for_step(directory, 2, process)
    queue = psutil.Process(json.loads((directory / "processes.json").read_text())["queue"])
    room = newest_journal(directory).stat().st_size + 20_000
    queue.rlimit(psutil.RLIMIT_FSIZE, (room, room))  # a file of its process grows no further
    output = finish(process)
    assert process.returncode == 1, output
    assert any("journal" in line and "room" in line for line in output.splitlines()[-4:]), output
    before = {line["group"]: line for line in lines(directory, "ledger.jsonl") if line.get("outcome") == "trained"}
    last = len(lines(directory, "metrics.jsonl")) + 2

    with newest_journal(directory).open("ab") as journal:
        journal.write(b"the end of a record that no one finished")
    process = start(directory, warm_starts, *OVERRIDES, "seed=1")
    output = finish(process)
    assert process.returncode == 2, output
    assert "seed 0" in output and "seed 1" in output, "it says whose journal it is"

    process = start(directory, warm_starts, *OVERRIDES, f"total_train_steps={last}")
    output = finish(process)
    assert process.returncode == 0, output
    assert "40 bytes" in output, "what was cut off is told"
    steps = lines(directory, "metrics.jsonl")
    assert [s["train_step"] for s in steps] == list(range(1, last + 1))
    assert not any(s["ledger/error"] for s in steps)
    *groups, total = lines(directory, "ledger.jsonl")
    assert (total["error"], total["trained"], total["dropped"]) == (0, 2 * last, 0)
    assert sorted(g["group"] for g in groups) == list(range(total["admitted"]))
    after = {line["group"]: line["train_step"] for line in groups}
    assert {g: after[g] for g in before} == {g: line["train_step"] for g, line in before.items()}
