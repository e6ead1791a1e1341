"""How the tests are spread over lanes and processes."""

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

    def __init__(self, number):
        self.nodeid = f"test[{number}]"
        self.marks = [pytest.mark.drawn(3).mark]

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, marker):
        self.marks.append(marker.mark)


def drawn(seed):
    """Numbers of the cases that `make test` runs; the first of the ten is a nightly one."""
    cases = [Case(number) for number in range(10)]
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
