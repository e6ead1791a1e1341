"""Rules that keep the event loops running and the actors in one package."""

import ast

import pytest

from tests.architecture.test_imports import MODULES, name_of

BLOCKING = {"ray.get", "ray.wait", "ray.util.wait", "time.sleep"}
ACTORS = "async_rl/cluster/"


def aliases(tree: ast.AST) -> dict[str, str]:
    """Local name -> dotted name in its module."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """`ray.get` of the expression `ray.get`, through import aliases; empty for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return ""


def uses(tree: ast.AST, names: dict[str, str]) -> list[tuple[int, str]]:
    """(line, dotted name) of every name and attribute below `tree`."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute)]
    return [(n.lineno, dotted(n, names)) for n in nodes]


def own_nodes(function: ast.AsyncFunctionDef) -> ast.Module:
    """The body of an async function, less the plain functions in it: those may run in a thread."""

    class Plain(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return None

        def visit_Lambda(self, node):
            return ast.Constant(None)

    return Plain().visit(ast.Module(body=list(function.body), type_ignores=[]))


def blocking_calls(source: str) -> list[tuple[int, str]]:
    tree = ast.parse(source)
    names = aliases(tree)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef)]
    return [use for function in functions for use in uses(own_nodes(function), names) if use[1] in BLOCKING]


def remote_classes(source: str) -> list[tuple[int, str]]:
    tree = ast.parse(source)
    return [use for use in uses(tree, aliases(tree)) if use[1] == "ray.remote"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_coroutine_blocks_its_event_loop(path):
    assert not blocking_calls(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [p for p in MODULES if not name_of(p).startswith(ACTORS)], ids=name_of)
def test_actors_are_made_in_one_package(path):
    assert not remote_classes(path.read_text(encoding="utf-8"))


def raises_in_groups(source: str) -> list[int]:
    """Lines with a `raise` of an error in `except*`; Python 3.11.2 puts such an error into a group."""
    handlers = [h for n in ast.walk(ast.parse(source)) if isinstance(n, ast.TryStar) for h in n.handlers]
    return [n.lineno for handler in handlers for n in ast.walk(handler) if isinstance(n, ast.Raise) and n.exc]


def test_no_error_is_raised_in_the_handler_of_a_group():
    assert {name_of(path): found for path in MODULES if (found := raises_in_groups(path.read_text("utf-8")))} == {}
    assert raises_in_groups("try: ...\nexcept* OSError as e:\n    raise e.exceptions[0] from None") == [3]


def test_there_are_modules_to_look_at():
    assert {name_of(p).partition("/")[0] for p in MODULES} == {"message_queue", "agent_loop", "async_rl", "recipes"}
    assert any(remote_classes(p.read_text(encoding="utf-8")) for p in MODULES if name_of(p).startswith(ACTORS))


@pytest.mark.parametrize(
    "source",
    [
        "async def f():\n    ray.get(x)",
        "import time as t\nasync def f():\n    if x:\n        t.sleep(1)",
        "from time import sleep\nasync def f():\n    sleep(1)",
        "from ray import wait\nclass A:\n    async def f(self):\n        wait([x])",
    ],
)
def test_a_blocking_call_is_noticed(source):
    assert blocking_calls(source)


@pytest.mark.parametrize("source", ["@ray.remote\nclass A: ...", "from ray import remote as r\nA = r(B)"])
def test_an_actor_elsewhere_is_noticed(source):
    assert remote_classes(source)


def test_a_blocking_call_in_a_thread_is_fine():
    assert not blocking_calls("async def f():\n    def g():\n        time.sleep(1)\n    await to_thread(g)")
    assert not blocking_calls("async def f():\n    await asyncio.wait([x])")
