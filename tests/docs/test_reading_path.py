"""The reading path of docs/architecture.md: its definitions exist, call each other in this order, and stay short.

`test_reference.py` compares its numbers of lines with the files.
"""

import re

from tests.docs.pages import ROOT
from tests.docs.test_reference import generate

ROWS = generate.reading_path((ROOT / "docs" / "architecture.md").read_text())
MAX_LINES, MAX_FILES = 2_500, 32  # to read


def sources(row):
    definitions = generate.definitions_of(row.file)
    assert set(row.names) <= set(definitions), f"{row.file} has no {sorted(set(row.names) - set(definitions))}"
    return [definitions[name] for name in row.names]


def test_each_file_of_the_path_is_called_by_one_before_it():
    read = "\n".join(path.read_text() for path in (ROOT / "async_rl" / "cluster").glob("*.py"))  # passes calls on
    for row in ROWS:
        called = [name.rpartition(".")[2] for name in row.names]
        assert row is ROWS[0] or any(re.search(rf"\b{name}\b", read) for name in called), row.file
        read += "\n".join(sources(row))


def test_the_path_stays_short_and_has_each_file_once():
    assert len({row.file for row in ROWS}) == len(ROWS) <= MAX_FILES
    assert sum(len(source.splitlines()) for row in ROWS for source in sources(row)) <= MAX_LINES
