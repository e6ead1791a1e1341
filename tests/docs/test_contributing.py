"""The recipes of CONTRIBUTING.md are followed: on a copy of the package, where only the named files change."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, module_of

LOSS = """\
import json
from pathlib import Path

from async_rl.config import load_config
from tests.parallel.support import gradients, make_batch, save_tiny_moe, start_trainer

loss = load_config({overrides}).loss
trainer = start_trainer(save_tiny_moe(Path("model")), loss=loss)
metrics = trainer.train(make_batch())
norm = max(float(gradient.abs().max()) for gradient in gradients(trainer).values())
print(json.dumps({"loss": str(loss), "metrics": metrics, "gradient": norm}))
"""
METRIC = """\
import json, sys

sys.path.insert(0, "docs/reference")
import generate
from async_rl.metrics.registry import batch_metrics
from tests.helpers.groups import head_for
from message_queue.trajectory import Admission

head = head_for(Admission(group=0, prompt=0, admitted_version=0, admitted_update=0))
metrics = batch_metrics([head], staleness_tokens={0: 1})
print(json.dumps({"page": generate.metrics_page(), "metrics": metrics}))
"""


@pytest.fixture
def copied(tmp_path):
    """A copy of the package, its presets and the generator of the reference; the rest is that of the repository."""
    for name in ("async_rl", "configs", "docs/reference"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def insert(file, before, text):
    """Insert `text` before the one line of a file that starts with `before`."""
    whole = file.read_text()
    (place,) = [match.start() for match in re.finditer(rf"(?m)^{re.escape(before)}", whole)]
    file.write_text(whole[:place] + text + whole[place:])


def run(folder, script):
    """The JSON object that a script prints in a process that imports the copy."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


OF_FILE = ["loss.name=my_algorithm.py:CappedProximal", "loss.cap=1.5"]
OF_PACKAGE = ["loss=capped_proximal", "loss.cap=1.5"]
NAME = '    name: Literal["capped_proximal"] = "capped_proximal"\n    """Name of the objective."""\n'


@pytest.mark.parametrize("overrides", [OF_FILE, OF_PACKAGE], ids=["file", "package"])
def test_the_recipe_of_a_loss_makes_one_that_trains_a_step(copied, overrides):
    code = module_of("docs/guides/loss.md", "my_algorithm.py")
    if overrides is OF_FILE:
        (copied / "my_algorithm.py").write_text(code)
    else:
        own = code[code.index("@bounded") : code.index('@bounded("advantage")')].replace("    cap:", f"{NAME}    cap:")
        losses = copied / "async_rl" / "trainer" / "loss" / "losses.py"
        insert(losses, "LossConfig = Annotated[", own)
        losses.write_text(
            losses.read_text().replace("        PPOClip\n", "        CappedProximal\n        | PPOClip\n")
        )
        (copied / "configs" / "loss" / "capped_proximal.yaml").write_text("name: capped_proximal\n")
    made = run(copied, LOSS.replace("{overrides}", repr(overrides)))
    assert made["loss"].startswith("CappedProximal(") and "cap=1.5" in made["loss"]
    assert made["metrics"]["truncate/fraction"] == 0  # one update: current equals proximal
    assert made["metrics"]["grad_norm"] > 0 and made["gradient"] > 0


def test_the_recipe_of_a_metric_adds_it_to_the_batch_and_to_the_reference(copied):
    registry = copied / "async_rl" / "metrics" / "registry.py"
    insert(
        registry, '    "reward/mean": Metric(', '    "reward/max": Metric("max", "reward", "largest of the batch"),\n'
    )
    insert(registry, '        "reward/mean": float(', '        "reward/max": float(rewards.max()),\n')
    made = run(copied, METRIC)
    assert "| `reward/max` | reward | max | largest of the batch |" in made["page"]
    assert made["metrics"]["reward/max"] == made["metrics"]["reward/mean"]
