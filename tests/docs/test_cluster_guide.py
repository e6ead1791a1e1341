"""The files that the guide for clusters shows, and the image of a node."""

import os
import re
import shutil
import subprocess
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from async_rl.config import CONFIGS, load_config, preset_names
from async_rl.controller.summary import GIB, engine_memory, rank_memory
from async_rl.inference.serving import ASSUMED_GPU_BYTES
from tests.docs.pages import ROOT, module_of
from tests.helpers.full_size import save_empty

GUIDE = "docs/guides/cluster.md"
ON_SEVERAL_NODES = ("qwen3_30b_a3b_16", "qwen3_30b_a3b_24", "qwen3_235b_a22b")
ROWS = [  # of the table of presets
    [cell.strip(" `") for cell in line.strip("|").split("|")]
    for line in (ROOT / GUIDE).read_text().splitlines()
    if re.match(r"\| `\w+` \| Qwen", line)
]


def locked(name):
    """Package -> version of a lock file."""
    lines = [line.split("==") for line in (ROOT / "requirements" / name).read_text().splitlines()]
    return {canonicalize_name(package): version for package, version in lines}


def test_the_slurm_script_starts_ray_on_all_nodes_and_passes_the_options(tmp_path):
    script = tmp_path / "run.sbatch"
    script.write_text(module_of(GUIDE, "run.sbatch"))
    for name, text in {"scontrol": "seq -f node%g 7 100000", "srun": 'printf "%s|" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7,9]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    command = ["bash", str(script), "--task", "a b.py", "engine.replicas=2"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    ray = "ray|symmetric-run|--address|node7:6379|--min-nodes|2|--|"
    assert said == f"{ray}python|-m|async_rl.run|--task|a b.py|engine.replicas=2|"


def test_the_ray_job_has_the_gpus_of_its_preset():
    job = yaml.safe_load(module_of(GUIDE, "run.yaml"))["spec"]
    preset = re.search(r"scale=(\w+)", job["entrypoint"])[0]
    config = load_config([preset, "model.checkpoint=/m", "sync.directory=/w"])
    needed = config.trainer.ranks + config.engine.replicas * config.engine.ranks
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert needed == group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])


@pytest.fixture
def full_size(tmp_path):
    """Writes the checkpoint of a published model, without content."""
    return lambda model: save_empty(model, tmp_path / model)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_memory_in_the_guide_is_that_of_the_preset(row, full_size):
    preset, model, gpus, trainer, _, of_trainer, of_engine = row
    name, _, lora = model.partition(", ")
    options = ["trainer.lora.rank=32"] if lora else []
    if preset in ON_SEVERAL_NODES:
        options.append("sync.directory=/w")
    checkpoint = full_size(name)
    config = load_config([f"scale={preset}", f"model.checkpoint={checkpoint}", *options])
    ranks = config.trainer.ranks + config.engine.replicas * config.engine.ranks
    share = min(1.0, config.cluster.gpus_per_rank)
    assert (float(gpus), int(trainer.split()[0])) == (ranks * share, config.trainer.ranks)
    for cell, held, room in (
        (of_trainer, rank_memory(config, checkpoint), share),
        (of_engine, engine_memory(config, checkpoint), config.engine.gpu_memory_utilization),
    ):
        whole = sum(held.values())
        assert cell == f"{whole / GIB:.3g}, {(room * ASSUMED_GPU_BYTES - whole) / GIB:.3g} left"


def test_the_guide_has_every_preset():
    assert {preset for preset, *_ in ROWS} == set(preset_names(CONFIGS / "scale"))


def test_the_dockerfile_copies_what_the_set_up_needs(tmp_path):
    copied = [line.split()[1:-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    names = [name for line in copied for name in line]
    admitted = (ROOT / ".dockerignore").read_text().split()
    assert {f"!{name}" for name in names} <= set(admitted)
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    command = ["make", "--dry-run", "setup", "setup-sglang", "GPU=1"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize(("lock", "extra"), [("gpu.lock", "vllm"), ("gpu.lock", "test"), ("sglang-gpu.lock", "sglang")])
def test_gpu_lock_satisfies_pyproject(lock, extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = project["dependencies"] if extra == "vllm" else []
    for text in (*own, *project["optional-dependencies"][extra]):
        requirement, versions = Requirement(text), locked(lock)
        name = canonicalize_name(requirement.name)
        assert name == "async-rl" or versions[name] in requirement.specifier, text
