"""The reference pages are those that the code gives, and name every key."""

import importlib.util

import pytest

from async_rl.config import RunConfig, all_keys
from async_rl.metrics.registry import METRICS
from tests.docs.pages import ROOT

PATH = ROOT / "docs" / "reference" / "generate.py"
SPEC = importlib.util.spec_from_file_location("generate_reference", PATH)
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_reference_page_is_current(name):
    page = generate.PAGES[name]()
    assert (PATH.parent / name).read_text(encoding="utf-8") == page, "run `make reference`"


def test_the_reference_has_every_config_key_and_every_metric():
    page = generate.config_page()
    inner = {key.rpartition(".")[0] for key in all_keys(RunConfig)}
    assert [key for key in all_keys(RunConfig) if key not in inner and f"| `{key}` |" not in page] == []
    assert "rollout.limits.max_tokens" in page and "loss.clip_low" in page
    assert [key for key in METRICS if f"| `{key}` |" not in generate.metrics_page()] == []


def test_the_reference_shows_the_docstring_and_the_default_of_a_field():
    assert "| `seed` | `0` | Seed of the run. |" in generate.config_page()
