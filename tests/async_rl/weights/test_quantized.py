"""Plain copies of quantized checkpoints: values, files, and refusals."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.trainer.model.families import read_shape
from async_rl.weights import quantized
from async_rl.weights.model_info import CheckpointError, is_quantized, quantization_problem
from async_rl.weights.quantized import (
    DequantizationStopped,
    dequantization_problems,
    dequantize,
    dequantize_fp8,
    dequantize_mxfp4,
    plain_folder,
    plain_sizes,
)
from tests.helpers import tiny_models

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def load(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def exact_fp8(weight, scale, block):
    """In float64, one value at a time: no product is rounded."""
    rows, columns = (torch.arange(length) // size for length, size in zip(weight.shape, block, strict=True))
    return weight.double() * scale.double()[rows][:, columns]


@pytest.fixture
def checkpoint(tmp_path):
    """A DeepSeek-V3 with a layer for multi-token prediction, in FP8 with ragged blocks."""
    folder = tiny_models.save_checkpoint(tiny_models.deepseek_v3_config(), tmp_path / "tiny", seed=1)
    tiny_models.add_prediction_layer(folder)
    (folder / "tokenizer.json").write_text("{}")
    tiny_models.quantize_fp8(folder)
    return folder


@pytest.mark.parametrize(
    ("shape", "block"), [((576, 256), (128, 128)), ((130, 70), (128, 128)), ((64, 64), (48, 32)), ((5, 3), (2, 2))]
)
def test_fp8_weights_are_rounded_once_from_the_exact_product(shape, block):
    weight = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand([-(-length // size) for length, size in zip(shape, block, strict=True)]) * 1e-3 + 1e-4
    exact = exact_fp8(weight, scale, block)
    plain = dequantize_fp8(weight, scale, block=block)
    assert plain.dtype == torch.bfloat16
    # Half a unit in the last of 8 bits of bfloat16, after a rounding to the 24 bits of float32.
    assert bool(((plain.double() - exact).abs() <= exact.abs() * (2**-8 + 2**-24)).all())
    powers = torch.exp2(torch.randint(-9, 3, scale.shape))
    assert torch.equal(dequantize_fp8(weight, powers, block=block).double(), exact_fp8(weight, powers, block))


def test_mxfp4_weights_equal_those_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, 8, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 8, 3), dtype=torch.uint8)
    assert torch.equal(dequantize_mxfp4(blocks, scales), convert_moe_packed_tensors(blocks, scales))


def test_a_plain_copy_has_every_tensor_once_and_the_other_files(checkpoint, tmp_path):
    saved, folder = load(checkpoint), tmp_path / "plain"
    counts = []
    dequantize(checkpoint, folder, progress=lambda done, total: counts.append((done, total)))
    plain = load(folder)
    scaled = {name for name in saved if f"{name}_scale_inv" in saved}
    assert scaled and any(name.startswith("model.layers.3.") for name in scaled)  # the layer for prediction
    assert any(-(-rows // 48) * 48 != rows for rows in (saved[name].shape[0] for name in scaled))
    assert plain.keys() == {name for name in saved if not name.endswith("_scale_inv")}
    for name, tensor in plain.items():
        if name in scaled:
            exact = exact_fp8(saved[name], saved[f"{name}_scale_inv"], (48, 32))
            assert torch.equal(tensor, exact.float().bfloat16()), name
        else:
            assert tensor.dtype == saved[name].dtype and torch.equal(tensor, saved[name]), name
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert (folder / "tokenizer.json").read_text() == "{}" and not is_quantized(folder)
    assert counts == [(i, len(plain)) for i in range(len(plain))]
    assert dict(plain_sizes(checkpoint)) == {name: tensor.numel() for name, tensor in plain.items()}


def test_a_plain_copy_of_gpt_oss_has_the_tensors_that_it_was_quantized_from(tmp_path):
    checkpoint = tiny_models.save_checkpoint(tiny_models.gpt_oss_config(), tmp_path / "tiny", seed=1)
    before = load(checkpoint)
    tiny_models.quantize_mxfp4(checkpoint)
    dequantize(checkpoint, tmp_path / "plain")
    plain = load(tmp_path / "plain")
    assert {name: t.shape for name, t in plain.items()} == {name: t.shape for name, t in before.items()}
    assert dict(plain_sizes(checkpoint)) == {name: tensor.numel() for name, tensor in before.items()}
    for name, tensor in plain.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            assert torch.equal(tensor, before[name]), name
            continue
        # The numbers are at most 2 apart, up to 6. That is at least half the scaled largest of the 32.
        largest = before[name].unflatten(1, (-1, 32)).abs().amax(2, keepdim=True)
        assert bool(((tensor - before[name]).unflatten(1, (-1, 32)).abs() <= largest / 3).all()), name
    read_shape(tmp_path / "plain")


def test_an_existing_plain_copy_is_reused_and_a_changed_checkpoint_has_another(checkpoint, tmp_path):
    folder = plain_folder(checkpoint, cache=tmp_path / "cache")
    assert folder.parent == tmp_path / "cache" and folder.name.startswith("tiny-")
    dequantize(checkpoint, folder)
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    dequantize(checkpoint, folder)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    assert plain_folder(checkpoint, cache=tmp_path / "cache") == folder
    weights = load_file(checkpoint / "model-2.safetensors")
    save_file({name: scale * 2 for name, scale in weights.items()}, checkpoint / "model-2.safetensors")
    assert plain_folder(checkpoint, cache=tmp_path / "cache") != folder


def test_a_stopped_dequantization_leaves_nothing_and_a_second_process_at_the_same_is_refused(checkpoint, tmp_path):
    stopped, folder = threading.Event(), tmp_path / "cache" / "plain"
    with pytest.raises(DequantizationStopped):
        dequantize(checkpoint, folder, stopped=stopped, progress=lambda done, _: stopped.set() if done == 5 else None)
    assert [path.name for path in folder.parent.iterdir()] == [".plain.lock"]

    def second(done, _total):
        if done == 1:
            with pytest.raises(CheckpointError, match=r"another process.*model\.cache"):
                dequantize(checkpoint, folder)

    dequantize(checkpoint, folder, progress=second)
    assert folder.is_dir()


def without_scale(folder):
    scales = load_file(folder / "model-2.safetensors")
    scales.popitem()
    save_file(scales, folder / "model-2.safetensors")


def with_derived_blocks(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["weight_block_size"] = [40, 32]
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(("damage", "named"), [(without_scale, "without scales"), (with_derived_blocks, r"\[40, 32\]")])
def test_tensors_and_scales_that_do_not_fit_are_refused_from_the_headers(checkpoint, tmp_path, damage, named):
    assert list(dequantization_problems(checkpoint, folder=tmp_path / "plain")) == []
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=named) as error:
        dequantize(checkpoint, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
    (problem,) = dequantization_problems(checkpoint, folder=tmp_path / "plain")
    assert str(error.value) in problem


def test_a_disk_without_space_is_refused_by_field(checkpoint, tmp_path, monkeypatch):
    needed = sum(size for _, size in plain_sizes(checkpoint)) * 2
    monkeypatch.setattr(quantized.shutil, "disk_usage", lambda _: type("Usage", (), {"free": needed // 2}))
    (problem,) = dequantization_problems(checkpoint, folder=tmp_path / "cache" / "plain")
    assert problem.startswith(f"model.cache is {tmp_path / 'cache'}")
    (tmp_path / "cache" / "plain").mkdir(parents=True)
    assert list(dequantization_problems(checkpoint, folder=tmp_path / "cache" / "plain")) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("quant_method", name) for name in ("gptq", "awq", "compressed-tensors", None)),
        *(("weight_block_size", size) for size in (None, [128], [128, 0])),
        *(("fmt", "e5m2"), ("activation_scheme", "static")),
    ],
)
def test_other_quantizations_are_named(field, value):
    whole = "quantization_config"
    name = whole if field == "quant_method" else f"{whole}.{field}"
    found = quantization_problem({whole: {**FP8, field: value}})
    assert found is not None and found[:2] == (name, value)
    for config in ({whole: FP8}, {whole: {"quant_method": "mxfp4"}}, {}):
        assert quantization_problem(config) is None
