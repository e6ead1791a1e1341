import json

import pytest
import torch
from safetensors.torch import save_file

from async_rl.inference.checkpoint_weights import weight_files
from async_rl.weights.model_info import CheckpointError
from tests.helpers.updates import checkpoint_digest


def test_checkpoint_digest_is_that_of_the_tensors_in_any_split(tmp_path):
    tensors = {name: torch.full((3,), float(i)) for i, name in enumerate("abc")}
    whole, split = tmp_path / "whole", tmp_path / "split"
    whole.mkdir()
    split.mkdir()
    save_file(tensors, whole / "model.safetensors")
    files = {"b": "model-00001.safetensors", "a": "model-00002.safetensors", "c": "model-00002.safetensors"}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, split / file)
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file({"stray": tensors["a"]}, split / "consolidated.safetensors")
    assert checkpoint_digest(whole) == checkpoint_digest(split)
    (split / "model-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002\.safetensors"):
        weight_files(split)
    with pytest.raises(CheckpointError, match=r"\*\.safetensors"):
        weight_files(tmp_path)
