"""A run with LoRA on the real engine: mismatch at equal weights, resume in another layout, final model and export."""

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import check_records, check_rollouts, complete, k3_bound
from tests.helpers.lanes import WHOLE_RUN
from tests.parallel.resharding import whole_tensors
from tests.parallel.support import WARNINGS, assert_same

pytestmark = [WHOLE_RUN, pytest.mark.timeout(1000), WARNINGS]
LORA = ("trainer.lora.rank=4", "trainer.lora.alpha=8", "optimizer.lr=1e-2", "loss.kl_coefficient=0.01")


def test_a_lora_run_publishes_merged_weights_and_resumes_in_another_layout(tmp_path):
    from async_rl.export import main

    run, warm = tmp_path / "run", tmp_path / "warm_start"
    two = ("trainer.ranks=2", "trainer.parallel.tensor=2")
    complete(run, warm, *LORA, *two, "total_train_steps=3", "checkpoint.every=3")
    saved = whole_tensors(run / "checkpoints" / "step-000003" / "trainer")
    assert saved and all(".lora." in name for name in saved)
    first = load_file(run / "final" / "model.safetensors")

    output = complete(run, warm, "trainer.lora.rank=8", *LORA[1:], "total_train_steps=5", code=1)
    assert "trainer.lora.rank is 4 there and 8 here" in output
    complete(run, warm, *LORA, "total_train_steps=5")
    steps, groups = check_records(run, steps=5, staleness=1, k3=k3_bound(warm))
    assert all(s["mismatch/k3_probe"] is not None for s in steps)
    check_rollouts(run, steps, groups)

    (base,) = warm.iterdir()
    start_weights, final = load_file(base / "model.safetensors"), load_file(run / "final" / "model.safetensors")
    changed = {name for name, weight in final.items() if not torch.equal(weight, first[name])}
    frozen = {name for name, weight in final.items() if torch.equal(weight, start_weights[name])}
    assert changed and not changed & frozen
    assert changed | frozen == set(final)
    assert main([str(run)]) == 0
    export = run / "export" / "step-000005"
    assert_same(load_file(export / "model.safetensors"), final)
    adapters = (run / "final-adapter", export.with_name("step-000005-adapter"))
    assert_same(*(load_file(folder / "adapter_model.safetensors") for folder in adapters))
