"""Put modules of this package together as one file that needs none of it.

What is reached from an entry module is copied as it is written, comments too, a module after those
that it imports. Imports from this package go, and a name that two modules give to different things
is changed in all but one of them.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from layerbisect.standalone.global_names import Read, from_here
from layerbisect.standalone.module_source import Module, Thing, Unit

_SHORT = (ast.Assign, ast.AnnAssign)


def standalone(
    entry: str,
    sources: Mapping[str, str],
    *,
    entries: Collection[str] = (),
    kept: Collection[str] = (),
    first: str = "",
) -> str:
    """Return the source of one module that holds ``entry`` and all that it reaches.

    ``sources`` gives the text of modules that are no files. Tables whose keys are all among
    ``entries`` keep those that are ``kept``. The docstring of ``entry`` comes first, and the
    statements ``first`` before all imports.
    """
    return _Assembly(entry, sources, entries, kept).text(first)


class _Assembly:
    def __init__(
        self,
        entry: str,
        sources: Mapping[str, str],
        entries: Collection[str],
        kept: Collection[str],
    ) -> None:
        self.entry = entry
        self.modules: dict[str, Module] = {}
        self._load(entry, sources, entries, kept)
        self.used: set[int] = set()
        for unit in self.modules[entry].units:
            self._reach(self.modules[entry], unit)
        self.renamed = self._rename()

    def _load(
        self,
        name: str,
        sources: Mapping[str, str],
        entries: Collection[str],
        kept: Collection[str],
        waiting: tuple[str, ...] = (),
    ) -> None:
        """Read a module after those that it imports."""
        if name in self.modules or name in waiting:
            return
        module = Module(name, sources, entries, kept)
        for needed in module.needs:
            self._load(needed, sources, entries, kept, (*waiting, name))
        self.modules[name] = module

    def _thing(self, module: Module, read: Read) -> Thing | None:
        """Say what a read name is; None for a builtin, and for what only annotations name."""
        return self._look_up(module, read.name, read.attribute)

    def _look_up(self, module: Module, name: str, attribute: str | None) -> Thing | None:
        if any(name in unit.names for unit in module.units):
            return module.name, name
        if name in module.ours:
            home, original = module.ours[name]
            if original:
                return self._look_up(self.modules[home], original, None)
            if attribute is None:
                raise ValueError(f"{module.name} takes the module {home} for a value")
            return self._look_up(self.modules[home], attribute, None)
        return ("", name) if name in module.foreign else None

    def _reach(self, module: Module, unit: Unit) -> None:
        waiting = [(module, unit)]
        while waiting:
            module, unit = waiting.pop()
            if id(unit) in self.used:
                continue
            self.used.add(id(unit))
            for read in unit.reads:
                thing = self._thing(module, read)
                if thing is not None and thing[0]:
                    home = self.modules[thing[0]]
                    waiting += [(home, u) for u in home.units if thing[1] in u.names]

    def _units(self) -> Iterator[tuple[Module, Unit]]:
        for module in self.modules.values():
            for unit in module.units:
                if id(unit) in self.used:
                    yield module, unit

    def _rename(self) -> dict[Thing, str]:
        """Give a new name to what cannot keep its own."""
        reads = [(m, r, self._thing(m, r)) for m, u in self._units() for r in u.reads]
        taken: dict[str, Thing] = {
            thing[1]: thing for _, _, thing in reads if thing is not None and not thing[0]
        }
        hidden: dict[Thing, set[str]] = {}
        for _, read, thing in reads:
            if thing is not None:
                hidden.setdefault(thing, set()).update(read.hidden)
        every = {name for m in self.modules.values() for name in _identifiers(m.tree)}
        renamed: dict[Thing, str] = {}
        # what the entry defines is looked for under its name
        for module, unit in sorted(self._units(), key=lambda pair: pair[0].name != self.entry):
            for name in unit.names:
                thing = (module.name, name)
                # a local name would be read in its place where it was an attribute of its module
                if name not in taken and name not in hidden.get(thing, ()):
                    taken[name] = thing
                    continue
                folder, stem = module.name.split(".")[-2:]
                stem = folder if stem == name else stem
                private = "_" if name.startswith("_") else ""
                new = f"{private}{stem}_{name.lstrip('_')}"
                while new in every or new in taken:
                    new += "_"
                taken[new] = thing
                renamed[thing] = new
        return renamed

    def text(self, first: str) -> str:
        """Write all of it."""
        doc = ast.get_docstring(self.modules[self.entry].tree, clean=False) or ""
        parts = [f'"""{doc}"""', "from __future__ import annotations", first, self._imports()]
        parts = [part for part in parts if part]
        for name, module in self.modules.items():
            units = [unit for unit in module.units if id(unit) in self.used]
            if not units:
                continue
            if name != self.entry:
                parts.append("\n" + _banner(name, ast.get_docstring(module.tree)))
            for before, unit in zip([None, *units], units, strict=False):
                both_short = all(isinstance(u.statement, _SHORT) for u in (before, unit) if u)
                parts.append(("" if both_short else "\n") + self._write(module, unit))
        return "\n\n".join(parts) + "\n"

    def _imports(self) -> str:
        by_name: dict[str, set[str]] = defaultdict(set)
        for module, unit in self._units():
            for read in unit.reads:
                if self._thing(module, read) == ("", read.name):
                    by_name[read.name] |= module.foreign[read.name]
        plain: set[str] = set()
        of: dict[str, set[str]] = defaultdict(set)
        for name, statements in by_name.items():
            # import a and import a.b both bind a
            if len(statements) > 1 and not all(s.startswith(f"import {name}") for s in statements):
                raise ValueError(f"{name} is imported as {' and as '.join(sorted(statements))}")
            for statement in statements:
                source, _, what = statement.rpartition("import ")
                if source:
                    of[source].add(what)
                else:
                    plain.add(statement)
        named = [f"{source}import {', '.join(sorted(of[source]))}" for source in sorted(of)]
        return "\n".join([*sorted(plain), *named])

    def _write(self, module: Module, unit: Unit) -> str:
        changes: list[tuple[int, int, int, bytes, bytes]] = []
        for read in unit.reads:
            thing = self._thing(module, read)
            if thing is None or not thing[0]:
                continue
            new = self.renamed.get(thing, thing[1])
            through = read.name in module.ours and not module.ours[read.name][1]
            old = f"{read.name}.{read.attribute}" if through else read.name
            if new != old:
                end = read.end if through else read.start + len(old.encode())
                changes.append((read.line, read.start, end, old.encode(), new.encode()))
        for name in unit.names:
            if (module.name, name) in self.renamed:
                changes.append(_definition(module, unit, name, self.renamed[module.name, name]))
        lines = list(module.lines)
        for line, start, end, old_text, new_text in sorted(changes, reverse=True):
            text = lines[line - 1]
            if text[start:end] != old_text:
                raise ValueError(f"{module.name}:{line} does not read {old_text.decode()} there")
            lines[line - 1] = text[:start] + new_text + text[end:]
        cut = {n for first, last in unit.cut for n in range(first, last + 1)}
        cut |= {n for n in _own_imports(unit.statement)}
        kept = [lines[n - 1] for n in range(unit.first, unit.last + 1) if n not in cut]
        return b"\n".join(kept).decode()


def _definition(
    module: Module, unit: Unit, name: str, new: str
) -> tuple[int, int, int, bytes, bytes]:
    """Say where a unit defines a name, as a change to it."""
    node, old = unit.statement, name.encode()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        start = module.lines[node.lineno - 1].index(b" " + old) + 1
        return node.lineno, start, start + len(old), old, new.encode()
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and child.id == name and isinstance(child.ctx, ast.Store):
            start = child.col_offset
            return child.lineno, start, start + len(old), old, new.encode()
    raise ValueError(f"{module.name} defines no {name}")


def _own_imports(node: ast.stmt) -> Iterator[int]:
    """Lines of imports from this package inside a function."""
    for child in ast.walk(node):
        if from_here(child):
            assert isinstance(child, ast.ImportFrom) and child.end_lineno is not None
            yield from range(child.lineno, child.end_lineno + 1)


def _identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for name in ("id", "arg", "attr", "name", "asname"):
            found = getattr(node, name, None)
            if isinstance(found, str):
                yield found
    yield from dir(builtins)


def _banner(name: str, doc: str | None) -> str:
    title = "# " + f" {name} ".center(96, "-")
    lines = [f"# {line}".rstrip() for line in (doc or "").splitlines()]
    return "\n".join([title, *lines])
