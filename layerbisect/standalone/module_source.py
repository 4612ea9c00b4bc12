"""One module of this package as text: its imports, and its top-level statements one by one."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from layerbisect.standalone.global_names import Read, bound_names, from_here, global_reads

Thing = tuple[str, str]
"""A module and the name that something has in it."""


@dataclass(eq=False)
class Unit:
    """A top-level statement, or a constant with the text that describes it.

    ``first`` and ``last`` are its lines, counted from 1, with the comments above it.
    """

    statement: ast.stmt
    names: tuple[str, ...]
    first: int
    last: int
    reads: list[Read] = field(default_factory=list)
    # spans of lines that are left out
    cut: list[tuple[int, int]] = field(default_factory=list)


class Module:
    """A module's source, taken apart.

    ``ours`` maps its names for what it imports from this package to (module, name), with no name
    where it is a module itself; ``foreign`` maps names to the statements that import all else.
    ``sources`` gives the text of modules that are no files.
    Tables whose keys are all among ``entries`` keep those that are ``kept``.
    """

    def __init__(
        self,
        name: str,
        sources: Mapping[str, str],
        entries: Collection[str],
        kept: Collection[str],
    ) -> None:
        self.name = name
        source = sources[name] if name in sources else _file(name)
        self._sources = sources
        self.lines = source.encode().splitlines()
        self.tree = ast.parse(source)
        self.ours: dict[str, Thing] = {}
        self.foreign: dict[str, set[str]] = {}
        self.units: list[Unit] = []
        self._read()
        for unit in self.units:
            unit.reads = global_reads(unit.statement)
            self._prune(unit, entries, kept)

    @cached_property
    def needs(self) -> list[str]:
        """Modules of this package that it imports, in the order of their names there."""
        return list(dict.fromkeys(module for module, _ in self.ours.values()))

    def _read(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and from_here(node):
                for alias in node.names:
                    self.ours[alias.asname or alias.name] = self._ours(str(node.module), alias.name)
        body = self.tree.body[1:] if ast.get_docstring(self.tree) is not None else self.tree.body
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                self.units[-1].last = node.end_lineno or node.lineno
            elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
                self.units.append(self._unit(node))

    def _ours(self, module: str, name: str) -> Thing:
        """Tell a name in a module from a module in a folder."""
        inner = f"{module}.{name}"
        is_module = inner in self._sources or (module not in self._sources and _is_module(inner))
        return (inner, "") if is_module else (module, name)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if from_here(node) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            return
        for alias in node.names:
            bound = alias.asname or alias.name.split(".")[0]
            what = alias.name + (f" as {alias.asname}" if alias.asname else "")
            source = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            self.foreign.setdefault(bound, set()).add(f"{source}import {what}")

    def _unit(self, node: ast.stmt) -> Unit:
        decorated = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(d.lineno for d in decorated)])
        while self.lines[first - 2].startswith(b"#"):
            first -= 1
        return Unit(node, tuple(bound_names([node])), first, node.end_lineno or node.lineno)

    def _prune(self, unit: Unit, entries: Collection[str], kept: Collection[str]) -> None:
        """Leave out of a table by ``entries`` all those that are not ``kept``."""
        table = getattr(unit.statement, "value", None)
        if not isinstance(table, ast.Dict) or not table.keys:
            return
        keys = [k.value if isinstance(k, ast.Constant) else None for k in table.keys]
        if not set(keys) <= set(entries):
            return
        for at, (key, value) in enumerate(zip(keys, table.values, strict=True)):
            node = table.keys[at]
            assert node is not None
            first, last = node.lineno, value.end_lineno or value.lineno
            if key not in kept and first > unit.statement.lineno:
                unit.cut.append((first, last))
                unit.reads = [r for r in unit.reads if not first <= r.line <= last]


def _file(name: str) -> str:
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def _is_module(name: str) -> bool:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None
