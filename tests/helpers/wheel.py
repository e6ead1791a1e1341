"""The wheel of the project, as a user has it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.architecture.test_imports import ROOT

CONTENT = ("message_queue", "agent_loop", "async_rl", "configs", "recipes", "pyproject.toml", "setup.py", "README.md")


def install_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of its sources; returns the folder with its content."""
    source, wheels, site = (folder / name for name in ("source", "wheels", "site"))
    source.mkdir(parents=True)
    for name in (*CONTENT, "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), "."]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def environment_of(site: Path) -> dict[str, str]:
    """Environment where Python takes the packages from an installed wheel, and not from the checkout."""
    return {**os.environ, "PYTHONPATH": str(site)}
