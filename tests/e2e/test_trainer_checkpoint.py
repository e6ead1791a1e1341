"""The folder of the trainer: refusals, kills, a full disk, and restarts."""

import json
import resource
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.state import checkpoint as checkpoint_module
from async_rl.trainer.state.checkpoint import TrainerCheckpointError, require_complete
from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint
from tests.parallel.ranks import ADAM
from tests.parallel.resharding import whole_tensors
from tests.parallel.support import WARNINGS, assert_same, make_batch, make_supervised_batch, start_trainer

pytestmark = [WARNINGS, pytest.mark.usefixtures("owner")]

# While the tensors are written, before the manifest, between the two renames, after them, and never.
TOUCHES = (3, 10, 20, 21, 1000)


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory):
    """A trainer after one step, and its checkpoint."""
    trainer = start_trainer(checkpoint, optimizer=ADAM)
    trainer.train(make_batch(seed=1))
    folder = tmp_path_factory.mktemp("saved") / "state"
    trainer.save(folder).result()
    return trainer, folder


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def assert_same_future(ours, theirs, folder):
    """The next two steps report the same and end in the same state."""
    for seed in (3, 4):
        assert str(ours.train(make_batch(seed=seed))) == str(theirs.train(make_batch(seed=seed)))  # nan is nan
    ours.save(folder / "ours").result()
    theirs.save(folder / "theirs").result()
    assert_same(whole_tensors(folder / "ours"), whole_tensors(folder / "theirs"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE = {
    "a bit of the tensors": (lambda d: flip(d / "__0_0.distcp"), r"__0_0\.distcp"),
    "tensors cut off": (lambda d: cut(d / "__0_0.distcp"), r"__0_0\.distcp"),
    "tensors gone": (lambda d: (d / "__0_0.distcp").unlink(), r"__0_0\.distcp"),
    "a bit of the index": (lambda d: flip(d / ".metadata"), r"\.metadata"),
    "index gone": (lambda d: (d / "common.pt").unlink(), r"common\.pt"),
    "manifest cut off": (lambda d: cut(d / "trainer.json"), r"trainer\.json"),
    "manifest gone": (lambda d: (d / "trainer.json").unlink(), r"trainer\.json"),
    "another format": (lambda d: edit(d / "trainer.json", format=99), "99"),
    "not a manifest": (lambda d: (d / "trainer.json").write_text("[]"), r"trainer\.json"),
}


@pytest.mark.parametrize(("damage", "named"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_folder_is_refused_and_changes_nothing(saved, tmp_path, damage, named):
    trainer, folder = saved
    shutil.copytree(folder, tmp_path / "state")
    damage(tmp_path / "state")
    before = [p.detach().clone() for chunk in trainer.model.chunks for p in chunk.parameters()]
    with pytest.raises(TrainerCheckpointError, match=named):
        trainer.restore(tmp_path / "state")
    after = [p for chunk in trainer.model.chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("field", "config", "settings"),
    [
        ("num_layers", {"num_hidden_layers": 3}, {}),
        ("vocab_size", {"vocab_size": 120}, {}),
        ("moe_router_topk", {"num_experts_per_tok": 3}, {}),
        ("dtype", {}, {"dtype": "bfloat16"}),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(saved, tmp_path, field, config, settings):
    model = save_checkpoint(qwen3_moe_config(**{"rope_theta": 1000.0, **config}), tmp_path / "model", seed=3)
    with pytest.raises(TrainerCheckpointError, match=field):
        start_trainer(model, **settings).restore(saved[1])


def test_steps_during_a_save_do_not_change_what_is_written(checkpoint, tmp_path, monkeypatch):
    trainer = start_trainer(checkpoint, optimizer=ADAM)
    trainer.train(make_batch(seed=1))
    trainer.save(tmp_path / "at once").result()
    may_write = threading.Event()
    write = checkpoint_module.save
    monkeypatch.setattr(checkpoint_module, "save", lambda *a, **of: may_write.wait() and write(*a, **of))
    written = trainer.save(tmp_path / "later")
    trainer.train(make_batch(seed=5))
    may_write.set()
    written.result()
    assert_same(whole_tensors(tmp_path / "at once"), whole_tensors(tmp_path / "later"))
    trainer.save(tmp_path / "after").result()
    assert not same(whole_tensors(tmp_path / "later"), whole_tensors(tmp_path / "after"))


def test_a_full_disk_leaves_the_checkpoint_that_was_there(saved, tmp_path):
    trainer, folder = saved
    shutil.copytree(folder, tmp_path / "state")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="checkpoint"):
            trainer.save(tmp_path / "state").result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    trainer.restore(tmp_path / "state")


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata"])
def test_a_save_that_loses_a_file_is_not_published(saved, tmp_path, monkeypatch, name):
    write = checkpoint_module.save

    def write_and_lose(shards, *, storage_writer, **options):
        write(shards, storage_writer=storage_writer, **options)
        (storage_writer.path / name).unlink()

    monkeypatch.setattr(checkpoint_module, "save", write_and_lose)
    with pytest.raises(OSError, match=name):
        saved[0].save(tmp_path / "state").result()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_with_files_on_another_machine_is_not_complete(saved, tmp_path):
    shutil.copytree(saved[1], tmp_path / "state")
    require_complete(tmp_path / "state")
    (tmp_path / "state" / "__0_0.distcp").unlink()
    with pytest.raises(TrainerCheckpointError, match=r"lacks __0_0\.distcp.*shared disk"):
        require_complete(tmp_path / "state")


def test_a_folder_that_cannot_be_made_is_named(saved, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/state"):
        saved[0].save(tmp_path / "file" / "state").result()


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
    ("settings", "trained"),
    [
        ({}, False),
        ({}, True),
        ({"distributed_optimizer": True}, True),
        ({"dtype": "bfloat16", "loss": DecoupledPPO(kl_coefficient=0.1)}, True),
        ({"dtype": "bfloat16", "distributed_optimizer": True}, True),
    ],
    ids=["before any step", "float32", "float32 split", "bfloat16", "bfloat16 split"],
)
def test_a_restored_trainer_continues_bit_for_bit(checkpoint, tmp_path, settings, trained):
    first, second = (start_trainer(checkpoint, optimizer=ADAM, **settings) for _ in range(2))
    if trained:
        first.train(make_batch(seed=1))
        first.train_supervised(make_supervised_batch(seed=2))
    first.save(tmp_path / "state").result()
    second.restore(tmp_path / "state")
    assert_same_future(second, first, tmp_path)


def test_updates_without_tokens_count_for_the_rate_and_not_for_adam(checkpoint, tmp_path):
    nothing = make_batch()
    nothing["informative"] = torch.zeros(6, dtype=torch.bool)
    first = start_trainer(checkpoint, optimizer=ADAM)
    for batch in (nothing, make_batch(seed=1), nothing):
        first.train(batch)
    first.save(tmp_path / "state").result()
    manifest = json.loads((tmp_path / "state" / "trainer.json").read_text())["manifest"]
    assert (manifest["updates"], manifest["steps"]) == (3, 1)
    second = start_trainer(checkpoint, optimizer=ADAM)
    second.restore(tmp_path / "state")
    assert_same_future(second, first, tmp_path)
