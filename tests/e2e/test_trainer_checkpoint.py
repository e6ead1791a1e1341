"""The folder of the trainer: what it refuses, what a kill and a full disk leave of it, and how a restart goes on."""

import json
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.state.checkpoint import TrainerCheckpointError
from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint
from tests.parallel.ranks import ADAM
from tests.parallel.resharding import whole_tensors
from tests.parallel.support import make_batch, save_tiny_moe, start_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # megatron's own float32 shares
)

# While the tensors are written, before the manifest, between the two renames, after them, and never.
TOUCHES = (3, 10, 20, 21, 1000)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_moe(tmp_path_factory.mktemp("trainer") / "model")


@pytest.fixture(scope="module", autouse=True)
def process_group(checkpoint):
    """Owns the process group of this module's trainers."""
    owner = start_trainer(checkpoint)
    yield
    owner.close()


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory):
    """A trainer after one step, and what it saved."""
    trainer = start_trainer(checkpoint, optimizer=ADAM)
    trainer.train(make_batch(seed=1))
    folder = tmp_path_factory.mktemp("saved") / "state"
    trainer.save(folder)
    return trainer, folder


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def assert_same_future(ours, theirs, folder):
    """The next two steps report the same and end in the same state."""
    for seed in (3, 4):
        assert str(ours.train(make_batch(seed=seed))) == str(theirs.train(make_batch(seed=seed)))  # nan is nan
    ours.save(folder / "ours")
    theirs.save(folder / "theirs")
    assert same(whole_tensors(folder / "ours"), whole_tensors(folder / "theirs"))


def overwrite(path, *, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path):
    middle = path.stat().st_size // 2
    overwrite(path, at=middle, data=bytes([path.read_bytes()[middle] ^ 1]))


def cut(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE = {
    "a bit of the tensors": (lambda d: flip(d / "__0_0.distcp"), r"__0_0\.distcp has changed"),
    "tensors cut off": (lambda d: cut(d / "__0_0.distcp"), r"__0_0\.distcp has changed"),
    "tensors gone": (lambda d: (d / "__0_0.distcp").unlink(), r"__0_0\.distcp cannot be read \(No such file"),
    "a bit of the index": (lambda d: flip(d / ".metadata"), r"\.metadata has changed"),
    "index gone": (lambda d: (d / "common.pt").unlink(), r"common\.pt cannot be read"),
    "manifest cut off": (lambda d: cut(d / "trainer.json"), r"trainer\.json is damaged"),
    "manifest gone": (lambda d: (d / "trainer.json").unlink(), r"has no readable trainer\.json"),
    "another format": (lambda d: edit(d / "trainer.json", format=99), r"has format 99; this version reads format 3"),
    "not a manifest": (lambda d: (d / "trainer.json").write_text("[]"), r"trainer\.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_and_changes_nothing(saved, tmp_path, damage):
    trainer, folder = saved
    shutil.copytree(folder, tmp_path / "state")
    do, message = DAMAGE[damage]
    do(tmp_path / "state")
    before = [p.detach().clone() for chunk in trainer.model.chunks for p in chunk.parameters()]
    with pytest.raises(TrainerCheckpointError, match=message):
        trainer.restore(tmp_path / "state")
    after = [p for chunk in trainer.model.chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({"num_hidden_layers": 3}, {}, "num_layers is 4 there and 3 here"),
        ({"vocab_size": 120}, {}, "vocab_size is 117 there and 120 here"),
        ({"num_experts_per_tok": 3}, {}, "moe_router_topk is 2 there and 3 here"),
        ({}, {"dtype": "bfloat16"}, "dtype is 'float32' there and 'bfloat16' here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(saved, tmp_path, config, settings, message):
    model = save_checkpoint(qwen3_moe_config(**{"rope_theta": 1000.0, **config}), tmp_path / "model", seed=3)
    with pytest.raises(TrainerCheckpointError, match=f"of another model: .*{message}"):
        start_trainer(model, **settings).restore(saved[1])


def test_a_full_disk_leaves_the_checkpoint_that_was_there(saved, tmp_path):
    trainer, folder = saved
    shutil.copytree(folder, tmp_path / "state")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="could not write its part of the checkpoint"):
            trainer.save(tmp_path / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    trainer.restore(tmp_path / "state")


def test_a_folder_that_cannot_be_made_is_named(saved, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/state"):
        saved[0].save(tmp_path / "file" / "state")


def test_a_killed_save_leaves_the_old_state_or_the_new_one(checkpoint, saved, tmp_path):
    trainer, folder = saved
    for number in TOUCHES:
        shutil.copytree(folder, tmp_path / str(number) / "state")
    command = [sys.executable, "-m", "tests.e2e.killed_trainer", str(checkpoint), str(tmp_path)]
    subprocess.run([*command, *map(str, TOUCHES)], check=True)
    old, new = whole_tensors(folder), whole_tensors(tmp_path / str(TOUCHES[-1]) / "state")
    assert not same(old, new)
    outcomes = []
    for number in TOUCHES:
        state = tmp_path / str(number) / "state"
        trainer.restore(state)
        assert [p.name for p in state.parent.iterdir()] == ["state"]
        held = whole_tensors(state)
        outcomes.append("new" if same(held, new) else "old" if same(held, old) else "neither")
    assert set(outcomes) == {"old", "new"}
    assert outcomes == sorted(outcomes, reverse=True)  # old ones first


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"distributed_optimizer": True},
        {"dtype": "bfloat16", "loss": DecoupledPPO(kl_coefficient=0.1)},
        {"dtype": "bfloat16", "distributed_optimizer": True},
    ],
    ids=["float32", "float32 split", "bfloat16", "bfloat16 split"],
)
def test_a_new_process_goes_on_bit_for_bit(checkpoint, tmp_path, settings):
    first = start_trainer(checkpoint, optimizer=ADAM, **settings)
    first.train(make_batch(seed=1))
    first.save(tmp_path / "state")
    second = start_trainer(checkpoint, optimizer=ADAM, **settings)
    second.restore(tmp_path / "state")
    assert_same_future(second, first, tmp_path)


def test_a_trainer_that_has_not_learned_yet_is_saved_too(checkpoint, tmp_path):
    first, second = (start_trainer(checkpoint, optimizer=ADAM) for _ in range(2))
    first.save(tmp_path / "state")
    second.restore(tmp_path / "state")
    third = start_trainer(checkpoint, optimizer=ADAM)
    assert_same_future(second, third, tmp_path)


def test_updates_without_anything_to_learn_count_for_the_rate_and_not_for_adam(checkpoint, tmp_path):
    nothing = make_batch()
    nothing["informative"] = torch.zeros(6, dtype=torch.bool)
    first = start_trainer(checkpoint, optimizer=ADAM)
    for batch in (nothing, make_batch(seed=1), nothing):
        first.train(batch)
    first.save(tmp_path / "state")
    manifest = json.loads((tmp_path / "state" / "trainer.json").read_text())["manifest"]
    assert (manifest["updates"], manifest["steps"]) == (3, 1)
    second = start_trainer(checkpoint, optimizer=ADAM)
    second.restore(tmp_path / "state")
    assert_same_future(second, first, tmp_path)


def test_random_numbers_go_on(saved):
    trainer, folder = saved
    draws = []
    for _ in range(2):
        trainer.restore(folder)
        draws.append(torch.rand(3))
    assert torch.equal(*draws)
