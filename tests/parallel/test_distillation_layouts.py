"""Two ranks in every parallel layout give the teacher's term of one rank: logprobs, metrics, gradients and weights."""

import functools

import pytest

from async_rl.trainer.loss.distillation import DistillationConfig
from async_rl.trainer.loss.losses import TIS
from async_rl.trainer.model.model import ParallelConfig
from tests.helpers.lanes import chosen_cases
from tests.parallel.ranks import ADAM, assert_equal_cases, run_case, run_on_ranks
from tests.parallel.support import MARKS, expected_step, make_batch, save_tiny_moe, start_trainer

pytestmark = MARKS
LOSS = TIS(behaviour_weight_cap=4.0)
TEACHES = {
    "reverse": DistillationConfig(kl="reverse", coefficient=0.5),
    "forward": DistillationConfig(kl="forward", top_k=8),
    "reverse-top-k": DistillationConfig(kl="reverse_top_k", top_k=8, coefficient=0.5),
}
LAYOUTS = {
    "data": {},
    "data-unpacked": {"packing": False},
    "tensor": {"parallel": ParallelConfig(tensor=2)},
    "tensor-expert": {"parallel": ParallelConfig(tensor=2, expert=2, expert_tensor=1)},
    "expert": {"parallel": ParallelConfig(expert=2)},
    "pipeline": {"parallel": ParallelConfig(pipeline=2)},
    "context": {"parallel": ParallelConfig(context=2)},
}
CASES = {f"{layout}-{kl}": (layout, kl) for layout in LAYOUTS for kl in TEACHES}


def rows_of(kl):
    return {"top_k": TEACHES[kl].num_ids}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_moe(tmp_path_factory.mktemp("tiny-moe") / "model")


@pytest.fixture(scope="module")
def alone(checkpoint):
    @functools.cache
    def made(kl):
        trainer = start_trainer(checkpoint, optimizer=ADAM, loss=LOSS, teaches=TEACHES[kl])
        result = run_case(trainer, make_batch(**rows_of(kl)))
        trainer.close()
        return result, expected_step(checkpoint, make_batch(**rows_of(kl)), LOSS)

    return made


@pytest.fixture(scope="module")
def results(request, checkpoint, tmp_path_factory):
    cases = {
        name: {"checkpoint": checkpoint, "batch": rows_of(kl), "loss": LOSS, "teaches": TEACHES[kl], **LAYOUTS[layout]}
        for name, (layout, kl) in CASES.items()
        if name in chosen_cases(request, "name")
    }
    return run_on_ranks(cases, tmp_path_factory.mktemp("ranks"), ranks=2)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", CASES)
def test_a_layout_gives_the_teachers_term_of_one_rank(name, results, alone):
    expected, reference = alone(CASES[name][1])
    assert_equal_cases(results(name), expected, reference)
    metrics = expected["metrics"][0]
    assert 0.5 < metrics["teacher/scored_fraction"] < 1, "one sequence has no teacher"
    assert metrics["teacher/kl_sampled"] != 0
