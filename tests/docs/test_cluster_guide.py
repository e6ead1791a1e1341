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

from async_rl.config import load_config
from async_rl.controller.summary import rank_bytes
from tests.docs.pages import ROOT, module_of

GUIDE = "docs/guides/cluster.md"
PARAMETERS = {"qwen3_30b_a3b": (1_541_093_376, 28_991_029_248), "qwen3_235b_a22b": (7_997_238_784, 227_096_395_776)}
LAYERS = {"qwen3_30b_a3b": 48, "qwen3_235b_a22b": 94}


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


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_memory_in_the_guide_is_that_of_the_preset(name):
    config = load_config([f"scale={name}", "model.checkpoint=/m", "sync.directory=/w"])
    dense, experts = PARAMETERS[name]
    trainer = rank_bytes(
        config.trainer, cpu_offload=config.optimizer.cpu_offload, dense=dense, experts=experts, layers=LAYERS[name]
    )
    engine = 2 * (dense + experts) / config.engine.ranks
    gpus = config.trainer.ranks + config.engine.replicas * config.engine.ranks
    (row,) = [line for line in (ROOT / GUIDE).read_text().splitlines() if line.startswith(f"| `{name}`")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert [cells[1], *cells[-2:]] == [f"{gpus}", f"{trainer / 1e9:.1f}", f"{engine / 1e9:.1f}"]


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
