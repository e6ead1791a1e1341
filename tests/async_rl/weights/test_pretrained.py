"""The writer of Hugging Face checkpoint folders: shards, index, dtype, and a folder that is complete or absent."""

import json
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from async_rl.weights.digest import digest_of
from async_rl.weights.pretrained import keep_model_files, sampled_digest, save_adapter, save_pretrained
from tests.helpers.tiny_models import qwen3_dense_config, save_checkpoint
from tests.helpers.updates import checkpoint_digest

FILES = {"config.json", "tokenizer.json", "chat_template.jinja"}


@pytest.fixture
def model(tmp_path):
    """The files of a model other than its weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "torch_dtype": "float32"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def tensors(count=5, *, dtype=torch.bfloat16):
    """`count` tensors of 16 elements, and a small one of another dtype."""
    for i in range(count):
        yield f"layer.{i}", torch.arange(16).to(dtype) + i
    yield "bias", torch.ones(2, dtype=torch.float32)


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_pretrained_writes_one_file_with_its_dtype_and_copies_all_but_weights(tmp_path, model, dtype):
    save_file({}, model / "model-00001-of-00002.safetensors")
    for name in ("pytorch_model.bin", "model.safetensors.index.json"):
        (model / name).touch()
    save_pretrained(tmp_path / "final", tensors(dtype=dtype), like=model)
    assert names(tmp_path / "final") == FILES | {"model.safetensors"}
    with safe_open(tmp_path / "final" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {name for name, _ in tensors()}
        assert file.metadata() == {"format": "pt"}
    assert checkpoint_digest(tmp_path / "final") == digest_of(tensors(dtype=dtype)).hexdigest()
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    expected = str(dtype).removeprefix("torch.")
    assert (config["dtype"], config["torch_dtype"], config["model_type"]) == (expected, expected, "tiny")


def test_save_pretrained_shards_by_size_and_indexes_every_tensor(tmp_path, model):
    save_pretrained(tmp_path / "final", tensors(), like=model, max_shard_bytes=80)
    shards = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names(tmp_path / "final") == FILES | {*shards, "model.safetensors.index.json"}
    index = json.loads((tmp_path / "final" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 32 + 8
    found = {}
    for shard in shards:
        with safe_open(tmp_path / "final" / shard, "pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        assert sum(tensor.nbytes for tensor in held.values()) <= 80
        assert [index["weight_map"][name] for name in held] == [shard] * len(held)
        found |= held
    assert (
        digest_of(found.items()).hexdigest()
        == digest_of(tensors()).hexdigest()
        == checkpoint_digest(tmp_path / "final")
    )


def test_save_pretrained_holds_no_more_tensors_than_a_shard(tmp_path, model):
    alive, most = 0, 0

    def counted():
        nonlocal alive, most
        for i in range(20):
            tensor = torch.full((16,), float(i))
            alive += 1
            most = max(most, alive)
            weakref.finalize(tensor.untyped_storage(), leave)
            yield f"layer.{i}", tensor

    def leave():
        nonlocal alive
        alive -= 1

    save_pretrained(tmp_path / "small", tensors(3), like=model, max_shard_bytes=8)
    assert len(list((tmp_path / "small").glob("*.safetensors"))) == 4, "a larger tensor has its own"
    save_pretrained(tmp_path / "final", counted(), like=model, max_shard_bytes=3 * 64)
    assert most <= 3 + 2  # a shard, the next tensor, and the one that the generator still has


@pytest.mark.parametrize("save", [save_pretrained, save_adapter])
def test_save_that_fails_leaves_the_folder_unchanged(tmp_path, model, save):
    fields = {"like": model}
    if save is save_adapter:
        fields = {"rank": 2, "alpha": 4.0, "target_modules": ("q_proj",), "start": model}

    def full_disk():
        yield "layers.0.q_proj.lora_A.weight", torch.zeros(2, 3)
        raise OSError("no space left")

    before = {}
    for folders in ({"model"}, {"model", "final"}):
        with pytest.raises(OSError, match="no space"):
            save(tmp_path / "final", full_disk(), **fields)
        assert names(tmp_path) == folders
        if not before:
            save(tmp_path / "final", [("layers.0.q_proj.lora_A.weight", torch.ones(2, 3))], **fields)
            before = {path: path.read_bytes() for path in (tmp_path / "final").iterdir()}
    assert {path: path.read_bytes() for path in (tmp_path / "final").iterdir()} == before


def test_sampled_digest_depends_on_names_and_values_and_not_on_files(tmp_path, model):
    save_pretrained(tmp_path / "one", tensors(), like=model)
    save_pretrained(tmp_path / "several", tensors(), like=model, max_shard_bytes=80)
    save_pretrained(tmp_path / "trained", ((name, tensor + 1) for name, tensor in tensors()), like=model)
    save_pretrained(tmp_path / "named", ((f"{name}.x", tensor) for name, tensor in tensors()), like=model)
    digests = [sampled_digest(tmp_path / name) for name in ("one", "several", "trained", "named")]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_keep_model_files_keeps_all_but_weights_and_adds_generation(tmp_path):
    checkpoint = save_checkpoint(qwen3_dense_config(), tmp_path / "start", seed=0)
    (checkpoint / "tokenizer.json").write_text("{}")
    keep_model_files(checkpoint, tmp_path / "run" / "model")
    assert names(tmp_path / "run" / "model") == {"config.json", "tokenizer.json", "generation_config.json"}
    generation = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    (checkpoint / "generation_config.json").write_text('{"temperature": 0.6}')
    keep_model_files(checkpoint, tmp_path / "run" / "model")
    assert json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text()) == {"temperature": 0.6}
