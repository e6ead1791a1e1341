"""Packages of the wheel: `configs` and `recipes` of the checkout are installed below `async_rl`."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["message_queue*", "agent_loop*", "async_rl*"]),
        "async_rl.configs",
        *(f"async_rl.{name}" for name in find_packages(include=["recipes*"])),
    ],
    package_dir={"async_rl.configs": "configs", "async_rl.recipes": "recipes"},
)
