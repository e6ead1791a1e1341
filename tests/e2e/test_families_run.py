"""Short runs of other model families than that of the calculator: the real engine, and a trainer of several ranks."""

import pytest
import torch
from safetensors.torch import load_file

from recipes.calculator.tokenizer import build_tokenizer
from tests.e2e.runs import SMALL, begin, check_records, check_rollouts, finish
from tests.helpers.lanes import WHOLE_RUN
from tests.parallel.parity import make_checkpoint

pytestmark = [WHOLE_RUN, pytest.mark.timeout(900)]
SERVED = (  # a checkpoint in the place of the model that the task builds
    "model=from_task",
    "warm_start.steps=0",
    "validation.prompts=0",
)


@pytest.mark.parametrize(("family", "split"), [("gpt_oss", "tensor"), ("qwen3_5", "context")])
def test_a_family_is_trained_on_two_ranks_and_its_updates_reach_the_engine(tmp_path, family, split):
    model, run = make_checkpoint(family, tmp_path / "model"), tmp_path / "run"
    build_tokenizer().save_pretrained(model)
    layout = ("trainer.ranks=2", f"trainer.parallel.{split}=2", "trainer.router_replay=R3")
    process = begin(run, *SMALL, *SERVED, *layout, f"+model.checkpoint={model}", "total_train_steps=2")
    finish(process, timeout_s=600)
    steps, groups = check_records(run, steps=2, staleness=1)
    check_rollouts(run, steps, groups)
    assert all(0 <= step["mismatch/k3_probe"] <= 1e-12 for step in steps)
    before, after = load_file(model / "model.safetensors"), load_file(run / "final" / "model.safetensors")
    assert before.keys() == after.keys()
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {name for name in before if name.startswith("model.visual.")}
