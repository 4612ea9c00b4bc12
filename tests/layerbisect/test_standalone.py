"""Modules put together as one file: the same names mean the same things as apart."""

import ast
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from layerbisect.kernels.replay.implementation import OPERATORS
from layerbisect.standalone.assemble import standalone
from layerbisect.standalone.global_names import global_reads

ENTRY = '''"""What it is."""

from __future__ import annotations

import math
from layerbisect.fake import shapes
from layerbisect.fake.sizes import double as twice, SIZE

_LIMIT = 5


def area(double: int = 2) -> float:
    # the argument hides what shapes calls double
    return shapes.double(double) + shapes.area(3) + math.floor(twice(SIZE)) + _LIMIT
'''
SHAPES = '''"""Shapes.

In two paragraphs.
"""

import math

_LIMIT = 1
"""The least."""


def double(x):
    return 2 * x + _LIMIT  # of this module


def area(radius):
    from layerbisect.fake.sizes import SIZE
    import json

    double = [SIZE for SIZE in (SIZE,)]
    found = {"é": f"{_LIMIT} and {_LIMIT}"}
    return json.loads(found["é"][:1]) + radius + double[0]


def unused(x):
    return nothing(x)
'''
SIZES = """SIZE = 10


# says so
@staticmethod
def double(x):
    return x * 4


class _Unused:
    pass
"""
FAKES = {"entry": ENTRY, "layerbisect.fake.shapes": SHAPES, "layerbisect.fake.sizes": SIZES}


def run(text: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "made"}
    exec(compile(text, "made", "exec"), space)
    return space


def test_names_mean_what_they_meant_apart() -> None:
    text = standalone("entry", FAKES)
    # 2 * 2 + 1, 1 + 3 + 10, 4 * 10, 5
    assert run(text)["area"]() == 5 + 14 + 40 + 5
    assert "layerbisect" not in text.replace("# ", "").replace("- layerbisect.fake", "")


def test_only_what_is_reached_is_there_and_as_it_was_written() -> None:
    text = standalone("entry", FAKES)
    assert "unused" not in text.lower() and "nothing" not in text
    assert "# says so\n@staticmethod\n" in text
    assert '"""The least."""' in text and "# In two paragraphs." in text
    assert text.startswith(
        '"""What it is."""\n\nfrom __future__ import annotations\n\nimport math\n'
    )
    assert text.count("import math") == 1


def test_a_table_keeps_what_is_asked_for() -> None:
    entry = "from layerbisect.fake.table import TABLE\nFOUND = TABLE\n"
    table = (
        "TABLE = {\n    'one': lambda: ones(),\n    'two': lambda: twos(),\n}\n"
        "def ones():\n    return 1\ndef twos():\n    return 2\n"
    )
    sources = {"entry": entry, "layerbisect.fake.table": table}
    text = standalone("entry", sources, entries=("one", "two", "three"), kept=("two",))
    assert run(text)["FOUND"].keys() == {"two"} and "ones" not in text
    assert run(standalone("entry", sources, entries=("one",), kept=()))["FOUND"].keys() == {
        "one",
        "two",
    }


def test_one_name_for_two_packages_is_an_error() -> None:
    sources = {
        "entry": "from layerbisect.fake.a import x\nfrom a import f\ny = x, f\n",
        "layerbisect.fake.a": "from b import f\nx = f\n",
    }
    with pytest.raises(ValueError, match="f is imported as"):
        standalone("entry", sources)


@pytest.mark.parametrize(
    "code, names",
    [
        ("def f(a, *b, c=d, **e): return a, b, c, e, g", "dg"),
        ("def f():\n    global a\n    a = b\n    return a", "ab"),
        ("x = [a for a in a if b(a)]", "ab"),
        ("x = {a: b for a, b in c for d in a}", "c"),
        ("class C(B):\n    a = b\n    d = a\n    def f(self): return a", "Bba"),
        ("f = lambda a, b=c: a + d", "cd"),
        ("def f():\n    import a.b, c as d\n    return a, b, c, d", "bc"),
        ("def f():\n    def g(): return h\n    return g", "h"),
        ("def f():\n    try: pass\n    except a as b: return b\n    return (c := d), c", "ad"),
        ("def f(x):\n    match x:\n        case [a, *b] | {1: a, **b}: return a, b, c", "c"),
        ("def f():\n    return [(a := b) for b in c], a", "c"),
        ("@a\ndef f(x: b) -> c: pass", "abc"),
        (
            "def f(x):\n    with x as (a, b): del a\n    for c in x: pass\n    return a, b, c, d",
            "d",
        ),
    ],
)
def test_which_names_are_global(code: str, names: str) -> None:
    (statement,) = ast.parse(code).body
    assert {read.name for read in global_reads(statement)} == set(names)


def free_names(text: str) -> set[str]:
    """Names that are read and that nothing in the text defines."""
    tree = ast.parse(text)
    defined = set(dir(sys.modules["builtins"]))
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        else:
            defined |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return {r.name for node in tree.body for r in global_reads(node)} - defined


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_judge_of_every_operator_stands_alone(operator: str) -> None:
    sources: Mapping[str, str] = {
        "entry": "from layerbisect.kernels.replay.judge import Judge\nkept = Judge\n"
    }
    text = standalone("entry", sources, entries=OPERATORS, kept=(operator,))
    assert free_names(text) == set()
    assert "import layerbisect" not in text and "from layerbisect" not in text
    assert "numpy" not in text
