"""Where a module's code reads its global names: by Python's rules of scope, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, slots=True)
class Read:
    """One place that reads a global name, or an attribute of one where ``attribute`` is set.

    ``hidden`` holds the names that mean something local there.
    """

    name: str
    attribute: str | None
    line: int
    start: int
    end: int
    hidden: frozenset[str]


def global_reads(statement: ast.stmt) -> list[Read]:
    """List the places in a top-level statement that read global names, in no special order.

    ``line`` counts from 1; ``start`` and ``end`` are columns in bytes. Names that a function takes
    from this package by an import of its own count as global.
    """
    return list(_reads(statement, frozenset(), frozenset()))


def _reads(node: ast.AST, hidden: frozenset[str], of_class: frozenset[str]) -> Iterator[Read]:
    """``hidden`` are names of enclosing functions, ``of_class`` of the class body around."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            arguments = node.args
            around = (*node.decorator_list, *_defaults(arguments), *_annotations(node))
            for expression in around:
                yield from _reads(expression, hidden, of_class)
            inside = hidden | _bound_in_function(node)
            for statement in node.body:
                yield from _reads(statement, inside, frozenset())
        case ast.Lambda():
            for expression in _defaults(node.args):
                yield from _reads(expression, hidden, of_class)
            yield from _reads(node.body, hidden | _bound_in_function(node), frozenset())
        case ast.ClassDef():
            for outside in (*node.decorator_list, *node.bases, *node.keywords):
                yield from _reads(outside, hidden, of_class)
            own = frozenset(bound_names(node.body))
            for statement in node.body:
                yield from _reads(statement, hidden, own)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            inside = hidden | {
                name for g in node.generators for name in bound_names([ast.Expr(g.target)])
            }
            first = node.generators[0].iter
            yield from _reads(first, hidden, of_class)
            for part in ast.iter_child_nodes(node):
                yield from _comprehended(part, first, inside)
        case ast.Attribute(value=ast.Name(id=name, ctx=ast.Load()) as base):
            if name not in hidden | of_class:
                assert base.end_col_offset is not None and node.end_col_offset is not None
                end = node.end_col_offset if node.end_lineno == base.lineno else base.end_col_offset
                yield Read(name, node.attr, base.lineno, base.col_offset, end, hidden | of_class)
        case ast.Name(id=name, ctx=ast.Load()):
            if name not in hidden | of_class:
                assert node.end_col_offset is not None
                yield Read(
                    name, None, node.lineno, node.col_offset, node.end_col_offset, hidden | of_class
                )
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _reads(child, hidden, of_class)


def _comprehended(part: ast.AST, first: ast.expr, inside: frozenset[str]) -> Iterator[Read]:
    if not isinstance(part, ast.comprehension):
        yield from _reads(part, inside, frozenset())
        return
    for child in ast.iter_child_nodes(part):
        if child is not first:
            yield from _reads(child, inside, frozenset())


def _defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)]


def _annotations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    found = [a.annotation for a in _all_arguments(function.args)]
    return [a for a in (*found, function.returns) if a is not None]


def _all_arguments(arguments: ast.arguments) -> list[ast.arg]:
    several = [arguments.vararg, arguments.kwarg]
    return [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        *(a for a in several if a is not None),
    ]


def _bound_in_function(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    names = {a.arg for a in _all_arguments(function.args)}
    body: Sequence[ast.stmt] = (
        [ast.Expr(function.body)] if isinstance(function, ast.Lambda) else function.body
    )
    declared = {name for child in _same_scope(body) for name in _declared_global(child)}
    return (names | set(bound_names(body))) - declared


def _declared_global(node: ast.AST) -> list[str]:
    return node.names if isinstance(node, ast.Global) else []


def bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Name what statements bind in the scope that they stand in."""
    for node in _same_scope(body):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.Import() | ast.ImportFrom() if not from_here(node):
                yield from (a.asname or a.name.split(".")[0] for a in node.names)
            case ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.MatchMapping(rest=str(name)):
                yield name


def from_here(node: ast.AST) -> bool:
    """Say whether an import statement takes something from this package."""
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "layerbisect"


def _same_scope(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Walk statements without entering scopes of their own."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            continue
        if isinstance(node, _COMPREHENSIONS):
            # a walrus in it binds outside
            waiting += [n.target for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
            continue
        waiting += ast.iter_child_nodes(node)
