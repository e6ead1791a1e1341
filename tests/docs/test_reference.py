"""The generated pages are those that the code and the tests give; the reference names every key."""

import importlib.util
import subprocess
import sys

import pytest

from async_rl.config import RunConfig
from async_rl.files.config_classes import all_keys
from async_rl.metrics.registry import METRICS
from tests.docs.pages import ROOT

PATH = ROOT / "docs" / "reference" / "generate.py"
_SPEC = importlib.util.spec_from_file_location("docs_generate", PATH)
generate = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_reference_page_is_current(name):
    page = generate.PAGES[name]()
    assert (PATH.parent / name).read_text(encoding="utf-8") == page, "run `make reference`"


def test_the_reference_has_every_config_key_and_every_metric():
    page = generate.config_page()
    keys = [key.replace("teachers.NAME.engine.", "engine.") for key in all_keys(RunConfig)]  # of the same class
    inner = {key.rpartition(".")[0] for key in keys}
    assert [key for key in keys if key not in inner and f"| `{key}` |" not in page] == []
    assert "rollout.limits.max_tokens" in page and "loss.clip_low" in page
    assert [key for key in METRICS if f"| `{key}` |" not in generate.metrics_page()] == []


def test_the_page_of_capabilities_is_current():
    code = "import sys; sys.path.insert(0, 'docs'); import capabilities; sys.stdout.write(capabilities.page())"
    command = [sys.executable, "-c", code]  # a process collects tests once
    page = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    current = (ROOT / "docs" / "capabilities.md").read_text(encoding="utf-8")
    assert current == page.rstrip("\n") + "\n", "run `python docs/capabilities.py`"
