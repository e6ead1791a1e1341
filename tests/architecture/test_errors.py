"""Errors are one tree, described in `message_queue.errors`."""

import ast

from message_queue import errors
from tests.architecture.test_imports import PACKAGES, ROOT

INSIDE = {  # raised and caught in one module or process, or of another library's kind
    *("DescribedError", "LeakedError", "EndpointError"),
    *("UnbuiltFeature", "CallError", "RankError", "DequantizationStopped", "RemoteError"),
    *("Deadlock", "ProcessDied", "Violation", "CellError"),
}
BUILTIN = {"Exception", "RuntimeError", "ValueError", "OSError", "AssertionError"}


def classes(*folders):
    """Name -> names of the bases, of each class of the packages."""
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    yield node.name, {ast.unparse(base) for base in node.bases}


def test_every_error_that_leaves_its_module_is_in_the_tree():
    apart = {name for name, bases in classes(*PACKAGES) if bases and bases <= BUILTIN}
    assert apart == INSIDE | {"AsyncRLError"}


def test_errors_of_queue_and_agent_loop_are_defined_in_the_module_of_the_tree():
    tree = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    below = {name for name, bases in classes("message_queue", "agent_loop") if bases & tree}
    assert below == tree - {"AsyncRLError"}


def test_the_error_model_names_every_kind_of_error():
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and kind.__base__ is errors.AsyncRLError:
            assert name in (errors.__doc__ or "")
