"""The Megatron model of Qwen3-MoE: versions, layouts of the work, free rows, and refusals; families are next to it."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.trainer.batch.training_batch import BatchError
from async_rl.trainer.export import VersionWriter
from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.group import received
from async_rl.weights.model_info import CheckpointError
from async_rl.weights.overwrite import SHARED_MEMORY
from async_rl.weights.store import LocalStore
from async_rl.weights.transport import readable_by_ranks, update_files
from tests.helpers.updates import read_update
from tests.parallel.support import (
    MARKS,
    assert_same,
    assert_trains_as,
    exported,
    load_reference,
    make_batch,
    policy_terms,
    reference_step,
    start_trainer,
)

pytestmark = MARKS

LOSS = DecoupledPPO(entropy_coefficient=0.01)


@pytest.fixture(scope="module")
def trainer(checkpoint):
    """Owns the process group of this module's trainers."""
    trainer = start_trainer(checkpoint, loss=LOSS)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def reference(checkpoint):
    return load_reference(checkpoint)


@pytest.fixture(scope="module")
def expected(reference):
    """Loss and gradients of the reference on the default batch."""
    return reference_step(reference, make_batch(), policy_terms(LOSS))


def test_an_export_removes_versions_that_are_needed_no_longer(trainer, tmp_path):
    folder = tmp_path / "versions"
    for version in (1, 2):
        trainer.export(folder, version=version)
    trainer.export(folder, version=3, keep_version=2)
    assert sorted(path.name for path in folder.iterdir()) == ["weights-2", "weights-3"]
    trainer.remove_updates(folder)
    assert list(tmp_path.iterdir()) == []
    trainer.remove_updates(folder)
    assert trainer.export(folder, version=4).path.is_dir()


def test_a_trainer_overwrites_the_files_of_removed_versions(checkpoint, tmp_path):
    training = start_trainer(checkpoint)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory:
        used = {}
        for version in range(1, 5):
            update = training.export(Path(memory), version=version, keep_version=version - 1)
            assert update.weights == training.export(tmp_path, version=version).weights
            assert_same(*(dict(read_update(path / update.path.name)) for path in (Path(memory), tmp_path)))
            used[version] = [path.stat().st_ino for path in update_files(update.path)]
            training.train(make_batch())
        assert (used[3], used[4]) == (used[1], used[2])


def complete_version(training, folder, version):
    writer = VersionWriter(training._versions.source, training._groups, delta=False, host=None, direct=None)
    return writer.write(folder, version=version, keep_version=version)


def test_a_trainer_keeps_the_weights_of_versions_that_engines_receive(checkpoint, tmp_path):
    training = start_trainer(checkpoint, direct="gloo")
    expected = {}
    for version in (1, 2, 3):
        update = training.export(tmp_path, version=version, keep_version=version - 1)
        complete = complete_version(training, tmp_path, version)
        assert update.weights == complete.weights and update.buckets == complete.buckets
        expected[update] = dict(read_update(complete.path))
        training.train(make_batch())
    for update in list(expected)[1:]:
        delivery = json.loads(readable_by_ranks(update, timeout_s=30.0))
        buckets = received(delivery, rank=0, ranks=1, device=torch.device("cpu"))
        assert_same({name: tensor for bucket in buckets for name, tensor in bucket}, expected[update])
    training._versions.close()


def test_a_trainer_publishes_changes_that_a_node_turns_into_its_weights(trainer, checkpoint, tmp_path):
    """The trained weights of each version, by a trainer that publishes complete versions and by one that does not."""
    rate = OptimizerConfig(lr=1e-5, min_lr=1e-5)
    changing = start_trainer(checkpoint, loss=LOSS, optimizer=rate, delta=True)
    folder, whole, store = tmp_path / "changes", tmp_path / "whole", LocalStore(tmp_path / "node")
    for version in (1, 2, 3):
        update = changing.export(folder, version=version, keep_version=version - 1)
        complete = complete_version(changing, whole, version)
        store.fetch(update.path)
        assert update.weights == complete.weights
        assert_same(*(dict(read_update(path)) for path in (store.local(update.path), complete.path)))
        names = {path.suffix for path in update.path.glob("bucket-*")}
        assert names == {".safetensors" if version == 1 else ".delta"}
        changing.train(make_batch())


def test_fused_expert_tensors_are_read_like_single_ones(trainer, reference, checkpoint, tmp_path):
    folder = tmp_path / "fused"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    fused = {name: p.detach().contiguous() for name, p in reference.named_parameters()}
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    save_file(fused, folder / "model.safetensors")
    assert_same(exported(start_trainer(folder)), exported(trainer))


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 4096},
        {"packing": False, "recompute": "full", "micro_batch_tokens": 40},
    ],
    ids=str,
)
def test_layout_of_the_work_changes_nothing(trainer, checkpoint, expected, changes):
    assert_trains_as(start_trainer(checkpoint, loss=LOSS, **changes), make_batch(), expected)


def test_two_models_in_a_process_do_not_share_routing(trainer, checkpoint, expected):
    other = start_trainer(checkpoint, loss=LOSS)
    other.logprobs(make_batch(seed=9))
    assert_trains_as(trainer, make_batch(), expected)


@pytest.mark.parametrize("free", [slice(3, 8), slice(None)], ids=["some", "all"])
def test_rows_of_minus_one_are_routed_by_the_live_router(trainer, reference, free):
    batch = make_batch()
    batch["routed_experts"][:, free] = -1
    metrics = assert_trains_as(trainer, batch, reference_step(reference, batch, policy_terms(LOSS)))
    assert (metrics["routing/fallback_fraction"] == 1.0) == (free == slice(None))


def fault_at(batch, value):
    batch["routed_experts"][2, 5, 1] = torch.tensor(value, dtype=torch.int16)
    return batch


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (lambda b: fault_at(b, [3, 8]), "sequence 2, position 5, layer 2"),
        (lambda b: fault_at(b, [4, 4]), "sequence 2, position 5, layer 2"),
        (lambda b: b.set("routed_experts", b["routed_experts"][:, :, 1:]), r"\[1, 2, 3\]"),
        (lambda b: b.exclude("routed_experts"), "routed_experts"),
    ],
    ids=["range", "duplicate", "too few layers", "absent"],
)
def test_routing_that_does_not_fit_is_refused(trainer, broken, named):
    with pytest.raises(BatchError, match=named):
        trainer.train(broken(make_batch()))


MORE = {f"model.layers.4.{name}.weight": torch.zeros(2, 2) for name in ("eh_proj", "shared_head.norm")}
LESS = "model.layers.2.self_attn.o_proj.weight"
BIAS = "model.layers.2.self_attn.o_proj.bias"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w | MORE, "num_hidden_layers"),
        (lambda w: {k: v for k, v in w.items() if k != LESS}, LESS),
        (lambda w: w | {BIAS: torch.zeros(2)}, BIAS),
    ],
    ids=["further layers", "absent", "ignored"],
)
def test_a_checkpoint_with_other_tensors_is_refused(checkpoint, trainer, tmp_path, change, named):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(change(load_file(checkpoint / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=named):
        start_trainer(tmp_path)
