"""`async_rl.train` in an event loop, as a notebook has one: a task of the script, callbacks, a second call."""

import json
import os

from tests.architecture.test_imports import ROOT
from tests.e2e.runs import SMALL, check_records, lines, python
from tests.helpers.lanes import WHOLE_RUN

SCRIPT = """
import asyncio
import json
import os
import sys
from pathlib import Path

import async_rl
from tests.e2e.tasks import parity_task

config = json.loads(sys.argv[1])
events = []


def task(seed):  # other processes cannot import it
    made = parity_task(options={}, seed=seed)
    made.marked = True
    return made


def on_step(event):
    note(event)
    if event.train_step == 1:
        raise ValueError("of the callback")


def note(event):
    events.append([event.kind, event.train_step, len(event.metrics)])


async def cell(steps):
    return async_rl.train(
        task, {**config, "total_train_steps": steps}, on_step=on_step, on_publish=note, on_validation=note, on_end=note
    )


for steps in (2, 3):
    result = asyncio.run(cell(steps))
    found = [result.finished, str(result.model), result.metrics["train_step"], sorted(result.validation), events]
    print(json.dumps(found), file=sys.stderr)
    events = []
"""
CONFIG = dict(word.split("=") for word in SMALL if not word.startswith("task."))


@WHOLE_RUN
def test_a_task_of_a_script_is_trained_within_its_event_loop_and_continued(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    values = {key: json.loads(value) for key, value in CONFIG.items()}
    values |= {"output_dir": str(tmp_path / "run"), "warm_start.cache": str(tmp_path / "warm"), "name": "script"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = python("script.py", json.dumps(values), cwd=tmp_path, env=environment)
    first, second = map(json.loads, [line for line in done.stderr.splitlines() if line.startswith("[")])
    for (finished, model, step, validation, events), steps in ((first, [1, 2]), (second, [3])):
        assert finished and model == str(tmp_path / "run/final") and step == steps[-1]
        assert "validation/success" in validation
        assert [event[1] for event in events if event[0] == "step"] == steps
        assert [event[0] for event in events].count("validation") >= 1
        assert events[-1][:2] == ["end", steps[-1]] and all(event[2] > 0 for event in events)
    published = [event[1] for event in first[-1] if event[0] == "publish"]
    assert published and published == sorted(published)
    check_records(tmp_path / "run", steps=3, staleness=1)
    log = (tmp_path / "run/logs/driver.log").read_text()
    assert log.count("on_step of train step 1 failed: ValueError: of the callback") == 1
    assert (tmp_path / "run/task.pkl").is_file() and lines(tmp_path / "run", "validation.jsonl")
