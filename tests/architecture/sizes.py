"""Sizes that keep the code readable, against their bounds: `python -m tests.architecture.sizes`."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from tests.architecture.test_imports import PACKAGES, ROOT

DRIVER = ("controller", "cluster")


class Size(NamedTuple):
    """A measured size, and the largest one that is accepted."""

    name: str
    value: float
    bound: float


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def classes(paths: list[Path]) -> list[ast.ClassDef]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in paths)
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def is_protocol(node: ast.ClassDef) -> bool:
    """Whether a class is a Protocol itself; `class Restorable(Trainer, Protocol)` is one."""
    return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)


CALLS = {"Controller": "__init__", "TrainerClient": "start", "ReplicaClient": "start", "Task": "__init__"}
"""Class -> its method whose parameters are counted."""


def parameters(found: list[ast.ClassDef]) -> int:
    """Largest number of parameters of a method of `CALLS`, `self` and `cls` aside."""
    methods = [
        method
        for node in found
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and CALLS.get(node.name) == method.name
    ]
    return max(len([*method.args.args[1:], *method.args.kwonlyargs]) for method in methods)


def sizes() -> list[Size]:
    product = sources(*PACKAGES)
    queue, simulator = sources("message_queue"), sources("async_rl/simulator")
    found = classes(product)
    benchmarks = sources("benchmarks")
    loose = [path for path in (ROOT / "async_rl").glob("*.py") if path.stem != "__init__"]
    return [
        Size("lines of the wheel", lines(sources("message_queue", "agent_loop", "async_rl")), 47000),
        Size("lines of the largest file of cluster", max(lines([path]) for path in sources("async_rl/cluster")), 430),
        Size("parameters of a call", parameters(found), 9),
        Size("modules of message_queue", len(queue) - 1, 15),
        Size("lines of message_queue", lines(queue), 3000),
        Size("lines of the simulator", lines(simulator), 3000),
        Size("modules loose in async_rl", len(loose), 8),
        Size("files of benchmarks", len(benchmarks), 16),
        Size("lines of benchmarks", lines(benchmarks), 4000),
        Size("Protocols", sum(map(is_protocol, found)), 17),
        Size("classes per 1,000 lines", round(1000 * len(found) / lines(product), 1), 11),
        Size("test lines per product line", round(lines(sources("tests")) / lines(product), 2), 0.75),
    ]


if __name__ == "__main__":
    for size in sizes():
        print(f"{size.name:40}{size.value:10g}{size.bound:10g}{'   over' if size.value > size.bound else ''}")  # noqa: T201
