"""A full disk, through a real run."""

import psutil
import pytest

from tests.e2e.runs import check_records, complete, finish, lines, pids, start, wait_for_step
from tests.helpers.lanes import WHOLE_RUN

pytestmark = [WHOLE_RUN, pytest.mark.timeout(1000)]
OVERRIDES = ("rollout.groups_per_batch=2", "validation.prompts=0", "checkpoint.every=3")


def test_a_full_disk_ends_a_run_and_costs_no_group(tmp_path):
    directory, warm_starts = tmp_path / "run", tmp_path / "warm_start"
    process = start(directory, warm_starts, *OVERRIDES, "total_train_steps=500")
    wait_for_step(directory, 2, process)
    room = max(path.stat().st_size for path in directory.glob("journal/content/*.data")) + 20_000
    worker = psutil.Process(pids(directory)["worker-0"])
    worker.rlimit(psutil.RLIMIT_FSIZE, (room, room))  # no file of the process grows further
    output = finish(process, code=1)
    # content has no room, or SQLite, whose index reached the limit first, calls it an I/O error
    named = [line for line in output.splitlines()[-4:] if "journal/content" in line]
    assert any("room" in line or "disk I/O error" in line for line in named), output
    before = {line["group"]: line for line in lines(directory, "ledger.jsonl") if line.get("outcome") == "trained"}

    steps_before = len(lines(directory, "metrics.jsonl"))
    complete(directory, warm_starts, *OVERRIDES, f"total_train_steps={steps_before + 2}")
    check_records(directory, steps=steps_before + 2, staleness=1, trained=2 * steps_before + 4, dropped=0)
    after = {line["group"]: line.get("train_step") for line in lines(directory, "ledger.jsonl") if "group" in line}
    assert {g: after[g] for g in before} == {g: line["train_step"] for g, line in before.items()}
