# ruff: noqa: E501 - programs of one line each
"""The reward that runs the code of an answer against the tests of its row."""

import json

import pytest

from agent_loop.code_answer import code_answer
from agent_loop.loop import Message, Prompt
from agent_loop.reward import Completion, FunctionReward, score_in_time, weighted
from agent_loop.tools.sandbox import SandboxLimits, check_sandbox
from message_queue.errors import RewardError, SandboxError
from message_queue.tokens import StopReason

try:
    check_sandbox()
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)

DOUBLE = "def double(x):\n    return 2 * x\n"
ASSERTS = ["assert double(2) == 4", "assert double(0) == 0"]
PAIRS = [{"input": "2\n3\n", "output": "5\n"}, {"input": "0\n0", "output": "0"}]
ADD = "print(int(input()) + int(input()))\n"


def fenced(code, language="python"):
    return f"```{language}\n{code}```"


async def score(text, tests, **options):
    prompt = Prompt(index=0, messages=(Message(role="user", content="?"),), target={"tests": tests})
    completion = Completion(turns=(text,), stop_reason=StopReason.STOP)
    reward = FunctionReward(weighted(code_answer(**options)))
    return (await score_in_time(reward, prompt, completion=completion, timeout_s=120)).value


@pytest.mark.parametrize(
    ("tests", "code"),
    [
        (ASSERTS, DOUBLE),  # MBPP
        ("\n".join(ASSERTS), DOUBLE),
        (f"def check(candidate):\n    {ASSERTS[1].replace('double', 'candidate')}\ncheck(double)", DOUBLE),  # HumanEval
        (json.dumps(ASSERTS), DOUBLE),
        (PAIRS, ADD),
        (json.dumps({"inputs": ["2\n3\n", ["0", "0"]], "outputs": ["5\n", ["0"]]}), ADD),  # TACO, APPS
    ],
    ids=["list", "text", "check", "json", "pairs", "columns"],
)
async def test_code_answer_is_1_if_all_tests_pass_and_0_otherwise(tests, code):
    assert await score(f"Like this:\n{fenced(code)}\nIt works.", tests) == 1
    assert await score(fenced(code.replace("2 * x", "x + 2").replace(" + int", " - int")), tests) == 0


async def test_partial_is_the_share_of_tests_that_pass():
    assert await score(fenced("def double(x):\n    return x + 2\n"), ASSERTS, partial=True) == 0.5


async def test_the_last_code_block_counts():
    assert await score(fenced("def double(x): 0\n") + "\nNo:\n" + fenced(DOUBLE, ""), ASSERTS) == 1
    assert await score(fenced(DOUBLE) + "\nNo:\n" + fenced("def double(x): 0\n"), ASSERTS) == 0


@pytest.mark.parametrize("text", ["", DOUBLE, f"```python\n{DOUBLE}", "```python\ndef double(:\n```"])
async def test_an_answer_without_complete_code_is_0(text):
    assert await score(text, ASSERTS) == 0


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)\n",
        "import os\nos._exit(0)\n",
        "import atexit, os\natexit.register(lambda: os._exit(0))\n",
        "def double(x): raise SystemExit(0)\n",
        "print('passed')\n",
        "while True: pass\n",
    ],
)
async def test_an_answer_that_ends_before_the_test_has_failed(code):
    assert await score(fenced(code), ASSERTS, limits=SandboxLimits(wall_s=2)) == 0


async def test_prints_and_the_main_block_of_an_answer_do_not_matter_for_asserts():
    code = DOUBLE + "print('double')\nif __name__ == '__main__':\n    raise ValueError\n"
    assert await score(fenced(code), ASSERTS) == 1


async def test_the_wall_time_is_for_all_tests_of_a_completion():
    slow = "import time\ndef double(x):\n    time.sleep(x)\n    return 2 * x\n"
    tests = ["assert double(0) == 0", "assert double(1000) == 2000", "assert double(0) == 0"]
    assert await score(fenced(slow), tests, partial=True, limits=SandboxLimits(wall_s=5)) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "tests", [None, 7, "", [], [7], [{"input": "2"}], {"inputs": ["1"], "outputs": []}, {"fn_name": "f", "inputs": []}]
)
async def test_tests_of_another_form_are_refused_by_name(tests):
    with pytest.raises(RewardError, match="test"):
        await score(fenced(DOUBLE), tests)


WRONG = "def double(x):\n    return x + 2\n"
EQUAL = "class Equal{base}:\n" + "".join(
    f"    def __{name}__(self, *args): return {value}\n"
    for name, value in {
        **dict.fromkeys(("eq", "le", "ge", "bool", "contains"), True),
        **dict.fromkeys(("ne", "lt", "gt"), False),
        **dict.fromkeys(("sub", "rsub", "abs", "round", "float", "hash", "len"), "0.0"),
    }.items()
)
ATTACKS = {
    "builtins.exec": "import builtins\nbuiltins.exec = lambda *a, **k: None\n",
    "builtins.compile": "import builtins\nbuiltins.compile = lambda *a, **k: 'pass'\n",
    "builtins.AssertionError": "import builtins\nclass Quiet(BaseException):\n    def __new__(cls, *a): raise SystemExit(0)\n"
    "builtins.AssertionError = Quiet\n",
    "builtins of the test": "import builtins\nbuiltins.isinstance = builtins.len = builtins.abs = lambda *a: 4\n"
    "globals()['__builtins__'] = {}\nimport json\njson.loads = json.load = lambda *a: []\n",
    "names of the test": "class Names(dict):\n    def __missing__(self, name): return lambda *a: 4\n"
    "import sys\nmain = sys.modules['__main__']\n"
    "main.Peer._apply = lambda self, op, target, *a: {'__builtins__': {'abs': lambda x: 0}, 'abs': lambda x: 0,"
    " 'set': lambda x: 4, 'double': lambda x: 4} if op == 'names' else 4\n",
    "the words of the question": "import sys\nmain = sys.modules['__main__']\nsend = main.Peer._send\n"
    "main.Peer._send = lambda self, *m: send(self, 'value', {}, (('__builtins__', 'abs'),))\n",
    "print the mark": "import gc, sys, os\n"
    "texts = {t for o in gc.get_objects() if isinstance(o, (list, tuple, dict)) for t in (o.values() if isinstance(o, dict) else o)"
    " if isinstance(t, str)}\n"
    "frame = sys._getframe()\n"
    "while frame:\n    texts |= {t for t in frame.f_locals.values() if isinstance(t, str)}\n    frame = frame.f_back\n"
    "for text in texts:\n    os.write(1, text.encode(errors='replace') + b' ')\n",
    "open files": "import os\nfor n in range(3, 256):\n    try: os.write(n, b'mark\\n(\"value\", True, ())\\n' * 10)\n    except OSError: pass\n",
    "replies in advance": "import os\nfor n in range(3, 256):\n    try: os.write(n, b'(\"value\", 4, (None,) * 2)\\n' * 99)\n    except OSError: pass\n",
    "code on the wire": "import os\nfor n in range(3, 256):\n"
    '    try: os.write(n, b\'__import__("os").write(1, b"x")\\n("ask", "call", ("\\\\0object", "yours", 0), {})\\n\')\n'
    "    except OSError: pass\n",
    "use the wire": "import sys\nmain = sys.modules['__main__']\n"
    "main.Peer.serve = lambda self, *a: [self.ask(op, main.Remote(self, n), 'f_back') for op in ('getattr', 'call') for n in (0, 1, 4)]\n",
    "memory of others": "import os\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n"
    "    try:\n        with open(f'/proc/{pid}/mem', 'r+b') as file: file.write(b'')\n        os.kill(int(pid), 9) if int(pid) not in (1, os.getpid(), os.getppid()) else 0\n"
    "    except OSError: pass\n",
    "exit": "import sys\nsys.exit(0)\n",
    "_exit later": "import os\ndef double(x): os._exit(0)\n",
    "exit in a call": "def double(x): raise SystemExit(0)\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): raise SystemExit\n",
    "thread": "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.3), os._exit(0))).start()\n"
    "def double(x): time.sleep(9)\n",
    "fork": "import os\nif os.fork():\n    os._exit(0)\n",
    "signals": "import signal, os\nfor n in (1, 2, 3, 6, 11, 14, 15): signal.signal(n, lambda *a: os._exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.1)\ndef double(x):\n    while True: pass\n",
    "files": "import os, sys, glob\nfor path in ['/program/main', *glob.glob('/tmp/*'), 'sitecustomize.py', 'json.py']:\n"
    "    try: open(path, 'w').write('import os\\nos._exit(0)\\n')\n    except OSError: pass\n",
    "modules": "import sys, types\nfor name in ('test', 'math', 'unittest', 'json', 'answer'):\n"
    "    sys.modules[name] = types.SimpleNamespace(isclose=lambda *a: True)\n",
    "a module of its own": "import types\nmath = types.ModuleType('math')\nmath.fabs = lambda x: 0.0\n",
    "an equal object": EQUAL.format(base="") + "def double(x): return Equal()\n",
    "an equal int": EQUAL.format(base="(int)") + "def double(x): return Equal(7)\n",
    "an equal text": EQUAL.format(base="(str)") + "def double(x): return Equal(7)\n",
    "a class": EQUAL.format(base="") + "class double(Equal):\n    def __init__(self, x): pass\n",
    "a metaclass": EQUAL.format(base="(type)")
    + "class double(metaclass=Equal):\n    def __new__(cls, x): return cls\n",
    "ANY": "from unittest.mock import ANY, MagicMock\ndouble = MagicMock(return_value=ANY)\n",
    "an array": "class A:\n    __array_interface__ = {'shape': (1,), 'typestr': '<i8', 'data': (0, False), 'version': 3}\n"
    "def double(x): return A()\n",
    "an array of objects": "import numpy\nclass Equal:\n    def __eq__(self, other): return True\n"
    "def double(x): return numpy.array(Equal(), dtype=object)\n",
    "callbacks": "import inspect\ndef double(x): return inspect.currentframe()\n",
    "other arguments": "def double(x): x += 2; return x\nint.__add__\n",
    "errors": "class Wrong(Exception):\n    def __str__(self): return '4'\ndef double(x): raise Wrong\n",
    "KeyboardInterrupt": "def double(x): raise KeyboardInterrupt\n",
    "too much": "import os\nfor n in range(3, 256):\n    try:\n        while True: os.write(n, b'(' * 65536)\n    except OSError: pass\n",
}
CHECKS = """
import math
passed = []
for check in (
    lambda: double(3) == 6,
    lambda: 6 == double(3),
    lambda: abs(double(4) - 8) < 1e-6,
    lambda: math.fabs(double(5) - 10) < 1e-6,
    lambda: double(6) in (12, 13),
    lambda: {double(7)} == {14},
    lambda: not double(0),
    lambda: f"{double(8)}" == "16",
    lambda: [double(1), 9] == [2, 9],
    lambda: double(9) >= 18 and double(9) <= 18,
):
    try:
        passed.append(bool(check()))
    except Exception:
        passed.append(False)
"""


async def test_the_checks_of_the_attacks_pass_for_a_right_answer():
    assert await score(fenced(DOUBLE), CHECKS + "assert all(passed)") == 1


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_an_answer_cannot_forge_its_verdict(attack):
    for code in [attack] if "double" in attack else [attack + WRONG, WRONG + attack]:
        test = CHECKS + "assert any(passed)"
        assert await score(fenced(code), test, limits=SandboxLimits(wall_s=5, memory_mb=512)) == 0


HONEST = {
    "mutation": (
        "def f(a, b, *, c): a.sort(); b[1] = 2; c.add(3)",
        "x, y, z = [2, 1], {}, set()\nassert f(x, y, c=z) is None\nassert (x, y, z) == ([1, 2], {1: 2}, {3})",
    ),
    "errors": (
        "class Empty(LookupError): pass\nclass Gone(Empty): pass\ndef f(x):\n    if x: raise Gone('no', x)\n    return 1 / x",
        "for x, kind in ((1, Gone), (2, Empty), (3, LookupError), (0, ZeroDivisionError)):\n"
        "    try: f(x)\n    except kind as error: assert not x or error.args == ('no', x)\n    else: assert False",
    ),
    "classes": (
        "class Stack(list):\n    push = list.append\n"
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __eq__(self, o): return self.x == o.x\n    def __hash__(self): return 7\n    def __len__(self): return 3\n"
        "    def __getitem__(self, i): return self.x * i\n    def __repr__(self): return f'V({self.x})'\n",
        "s = Stack()\ns.push(4)\nassert s == [4] and s.pop() == 4 and len(s) == 0 and not s and isinstance(s, Stack)\n"
        "v = V(1)\nv.x = 5\nassert v.x == 5 and v + V(2) == V(7) and v != V(6) and {v: 1}[V(5)] == 1 and len(v) == 3\n"
        "assert v[2] == 10 and repr(v) == 'V(5)' and str([v]) == '[V(5)]' and v is not V(5) and V.__name__ == 'V'",
    ),
    "functions": (
        "def f(g, xs, **named): return [g(x, **named) for x in xs]\ndef twice(g): return lambda x: g(g(x))\ndef op(op): return op",
        "assert f(lambda x, y: x + y, iter([1, 2]), y=3) == [4, 5] and twice(lambda x: x * 3)(2) == 18 and op(op=1) == 1\n"
        "def bad(x): raise KeyError(x)\ntry: f(bad, [9])\nexcept KeyError as error: assert error.args == (9,)\nelse: assert False",
    ),
    "generators": (
        "def f(n):\n    for i in range(n): yield i, i * i\n",
        "assert list(f(3)) == [(0, 0), (1, 1), (2, 4)] and next(f(1)) == (0, 0) and dict(f(2)) == {0: 0, 1: 1} and 4 not in f(2)",
    ),
    "async": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1\n",
        "import asyncio\nasync def main(): return await f(1), await asyncio.gather(f(2), f(3))\nassert asyncio.run(main()) == (2, [3, 4])",
    ),
    "values": (
        "def f(x): return x",
        "import math\nfrom collections import *\nfrom datetime import *\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "for x in (None, True, 2**20000, -1.5e300, 'a\\n\\'\\u2028\\ud800', b'\\xff', (1, (2,)), [], {}, set(), {1: {'a': [2]}}, frozenset([1]),\n"
        "          1 + 2j, range(3), Decimal('1.10'), Fraction(1, 3), date(2026, 1, 2), datetime(2026, 1, 2, 3), timedelta(1),\n"
        "          bytearray(b'a'), deque([1]), Counter('aab'), OrderedDict(a=1), defaultdict(list, a=[1]), float('inf')):\n"
        "    y = f(x)\n    assert y == x, x\n    assert type(y) is type(x) or isinstance(x, dict), x\n"
        "assert math.isnan(f(float('nan'))) and Counter(f('aab')).most_common(1) == [('a', 2)] and f(f) is f and f(len) is len",
    ),
    "arrays": (
        "import numpy as np\ndef f(x): return np.asarray(x) * 2.0\ndef g(x): return x.sum()",
        "assert f([1, 2]).shape == (2,) and np.allclose(f(np.ones((2, 3))), 2) and g(np.ones(3)) == 3 and (f([1]) == np.array([2])).all()",
    ),
    "imports": (
        "import math\nfrom typing import List\ndef f(x: List[int]): return math.pi",
        "assert math.isclose(f([]), math.pi)",
    ),
    "names": (
        "N = [1]\ndef f(): return N\nclass C:\n    k = 3",
        "assert N == [1] == f() and C.k == 3 and eval('f()') == [1]",
    ),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int' = 1\nfrom collections import namedtuple\nQ = namedtuple('Q', 'a b')",
        "assert P() == P(1) != P(2) and P(3).x == 3 and Q(1, 2) == (1, 2) and Q(1, 2).b == 2 and Q(1, 2) == Q(1, 2)\na, b = Q(3, 4)\nassert (a, b) == (3, 4)",
    ),
    "with": (
        "from contextlib import contextmanager\n@contextmanager\ndef f():\n    yield 5\n",
        "with f() as x:\n    assert x == 5",
    ),
    "output": ("import sys\ndef f(): print('x'); print('y', file=sys.stderr); return 1", "assert f() == 1"),
}


@pytest.mark.parametrize(("answer", "test"), HONEST.values(), ids=HONEST)
async def test_a_test_uses_an_honest_answer_as_if_it_were_in_its_process(answer, test):
    assert await score(fenced(f"{answer}\n"), test) == 1
    assert await score(fenced(f"{answer}\n"), f"{test}\nassert False") == 0


async def test_an_object_of_the_answer_never_sees_a_value_of_the_test():
    answer = "class A:\n    def __eq__(self, o): print('seen', o); return True\n    __add__ = __lt__ = __sub__ = __contains__ = __eq__\na = A()\n"
    for test in ("a == 5", "5 == a", "a + 5", "5 > a", "a < 5", "a - 5", "5 in [a]", "5 in a"):
        assert await score(fenced(answer), f"assert {test}") == 0, test
    assert await score(fenced(answer), "assert a == a") == 1
