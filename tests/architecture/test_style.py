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


def uses(tree: ast.AST, names: dict[str, str]) -> list[str]:
    """Dotted names of every name and attribute below `tree`."""
    return [dotted(n, names) for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute)]


def own_nodes(function: ast.AsyncFunctionDef) -> ast.Module:
    """The body of an async function, less the plain functions in it: those may run in a thread."""

    class Plain(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return None

        def visit_Lambda(self, node):
            return ast.Constant(None)

    return Plain().visit(ast.Module(body=list(function.body), type_ignores=[]))


def broken(source: str) -> set[str]:
    """Rules that a module breaks."""
    tree = ast.parse(source)
    names, found = aliases(tree), set()
    functions = [own_nodes(n) for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef)]
    if any(use in BLOCKING for function in functions for use in uses(function, names)):
        found.add("a coroutine blocks its event loop")
    if "ray.remote" in uses(tree, names):
        found.add("it makes an actor")
    handlers = [h for n in ast.walk(tree) if isinstance(n, ast.TryStar) for h in n.handlers]
    if any(isinstance(n, ast.Raise) and n.exc for handler in handlers for n in ast.walk(handler)):
        found.add("it raises in except*")  # Python 3.11.2 puts such an error into a group
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_keeps_the_rules(path):
    allowed = {"it makes an actor"} if name_of(path).startswith(ACTORS) else set()
    assert broken(path.read_text(encoding="utf-8")) <= allowed


@pytest.mark.parametrize(
    "source",
    [
        "async def f():\n    ray.get(x)",
        "import time as t\nasync def f():\n    if x:\n        t.sleep(1)",
        "from ray import wait\nclass A:\n    async def f(self):\n        wait([x])",
        "@ray.remote\nclass A: ...",
        "from ray import remote as r\nA = r(B)",
        "try: ...\nexcept* OSError as e:\n    raise e.exceptions[0] from None",
    ],
)
def test_a_broken_rule_is_noticed(source):
    assert broken(source)


def test_a_blocking_call_in_a_thread_is_fine():
    assert not broken("async def f():\n    def g():\n        time.sleep(1)\n    await to_thread(g)")
