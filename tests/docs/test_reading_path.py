"""The reading path of docs/architecture.md: its definitions exist, call each other in this order, and stay short.

`test_reference.py` compares its numbers of lines with the files.
"""

import re

from tests.docs.pages import ROOT
from tests.docs.test_reference import generate

ROWS = generate.reading_path((ROOT / "docs" / "architecture.md").read_text())
STATIONS = (  # of a token, in order
    "async_rl/controller/controller.py",
    "async_rl/rollout/prompts.py",
    "async_rl/rollout/dispatcher.py",
    "async_rl/rollout/worker.py",
    "agent_loop/decoder.py",
    "async_rl/inference/router.py",
    "async_rl/inference/replica.py",
    "message_queue/trajectory.py",
    "message_queue/heads.py",
    "message_queue/queue.py",
    "async_rl/trainer/planning.py",
    "async_rl/trainer/rank.py",
    "async_rl/trainer/router_replay.py",
    "async_rl/trainer/loss/losses.py",
    "async_rl/trainer/state/adam.py",
)
MAX_LINES, MAX_FILES = 2_500, 32  # to read


def sources(row):
    definitions = generate.definitions_of(row.file)
    assert set(row.names) <= set(definitions), f"{row.file} has no {sorted(set(row.names) - set(definitions))}"
    return [definitions[name] for name in row.names]


def test_the_path_has_each_file_once_and_passes_the_stations_in_order():
    files = [row.file for row in ROWS]
    assert len(set(files)) == len(files)
    assert [file for file in files if file in STATIONS] == list(STATIONS)


def test_each_file_of_the_path_is_called_by_one_before_it():
    read = "\n".join(path.read_text() for path in (ROOT / "async_rl" / "cluster").glob("*.py"))  # passes calls on
    for row in ROWS:
        called = [name.rpartition(".")[2] for name in row.names]
        assert row is ROWS[0] or any(re.search(rf"\b{name}\b", read) for name in called), row.file
        read += "\n".join(sources(row))


def test_the_path_stays_short():
    assert len(ROWS) <= MAX_FILES
    assert sum(len(source.splitlines()) for row in ROWS for source in sources(row)) <= MAX_LINES


def test_a_definition_that_does_not_exist_is_noticed():
    (row,) = generate.reading_path("| `message_queue/queue.py` | `TrajectoryQueue.admit` | 1 | 2 | Admits. |")
    assert (row.file, row.names) == ("message_queue/queue.py", ("TrajectoryQueue.admit",))
    assert "TrajectoryQueue.nothing" not in generate.definitions_of(row.file)
