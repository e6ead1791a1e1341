"""How the tests are spread over lanes and processes."""

import re
import subprocess

import pytest
import yaml

from tests.architecture.test_imports import ROOT
from tests.conftest import draw


def test_tests_of_a_file_stay_in_one_process(request):
    """Else each process would start what they share."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("the tests run in one process")
    groups = {item.path: item.nodeid.partition("@")[2] for item in request.session.items}
    assert all(groups.values()), [path for path, group in groups.items() if not group][:5]


class Case:
    """One of ten cases with the mark `drawn(3)`."""

    nodeid = "test[case]"

    def __init__(self):
        self.marks = [pytest.mark.drawn(3).mark]

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, marker):
        self.marks.append(marker.mark)


def drawn(seed):
    """Numbers of the cases that `make test` runs; the first of the ten is a nightly one."""
    cases = [Case() for _ in range(10)]
    cases[0].add_marker(pytest.mark.nightly)
    draw(cases, seed=seed)
    return {number for number, case in enumerate(cases) if not case.get_closest_marker("nightly")}


def test_the_commit_chooses_the_cases_of_a_lane():
    lanes = [drawn(str(commit)) for commit in range(40)]
    assert all(len(lane) == 3 for lane in lanes)
    assert drawn("7") == drawn("7")
    assert set.union(*lanes) == set(range(1, 10))


def test_the_nightly_lanes_have_all_folders_of_tests():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    lanes = " ".join(lane["command"] for lane in jobs["nightly"]["strategy"]["matrix"]["include"])
    unit = subprocess.run(["make", "-s", "unit-tests"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {path.parent.name for path in ROOT.glob("tests/*/__init__.py")} - {"gpu"}
    assert not [name for name in folders if f"tests/{name}" not in f"{lanes} {unit}" and f"test-{name}" not in lanes]


def always_runs(path):
    """Whether `make test` runs a test of a file or folder of tests, whatever the commit."""
    files = [path] if path.suffix else [*path.rglob("test_*.py")]
    return any(not re.search(r"^pytestmark = .*WHOLE_RUN", file.read_text(), re.MULTILINE) for file in files)


def test_make_test_has_a_test_of_each_guarantee_of_the_readme():
    _, _, rest = (ROOT / "README.md").read_text().partition("## Guarantees and their tests")
    rows = [line for line in rest.partition("\n\n`")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        paths = [ROOT / name for name in re.findall(r"`((?:tests|benchmarks)/[\w/.]+)`", row)]
        assert all(path.exists() for path in paths), row
        targets = re.findall(r"`make (\w+)`", row)
        assert set(targets) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)), row
        tests = [path for path in paths if "tests" in path.parts]
        assert any(map(always_runs, tests)), f"make test may leave this out: {row}"
