"""Where the machine and the driver are mutated: every mutant of the tree, with a name.

Each site at which the code decides something is changed in every way of
`tools/mutation_operators.py`. What only declares or describes is left alone: defaults, annotations,
messages, assertions.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from tools.mutation_operators import Defaults, Slot, changes
from tools.mutation_statements import statement_changes

FILES = ("elastix/machine/*.py", "elastix/driver.py")
DECLARATIONS = ("elastix/machine/values.py", "elastix/machine/messages.py")
"""Where the classes are whose fields have defaults. The second has nothing to change."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Args:
        path: relative to the root of the repository.
        number: tells apart changes with the same operator at one place.
        scope: the function it is in; empty for none.
        before: what is changed, as `ast.unparse` writes it; `after`, what it becomes.
        make: gives the text of the changed file.
    """

    path: str
    line: int
    column: int
    operator: str
    number: int
    scope: str
    before: str
    after: str
    make: Callable[[], str] = field(repr=False, compare=False)

    @property
    def id(self) -> str:
        number = f".{self.number}" if self.number > 1 else ""
        return f"{self.path}:{self.line}:{self.column}:{self.operator}{number}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The same, whatever line it moves to."""
        return self.path, self.scope, self.before, self.after


def all_mutants(root: Path) -> list[Mutant]:
    """Every mutant of the tree at `root`, in the order of files, lines and columns."""
    paths = sorted(p for pattern in FILES for p in root.glob(pattern))
    defaults = fields_with_defaults(root)
    named = {p.relative_to(root).as_posix(): p.read_text(encoding="utf-8") for p in paths}
    named.pop(DECLARATIONS[1], None)
    return [m for path, text in named.items() for m in mutants_of(text, path, defaults)]


def fields_with_defaults(root: Path) -> Defaults:
    """The fields of the machine's values and messages."""
    found: Defaults = {}
    for path in DECLARATIONS:
        if not (root / path).exists():
            continue
        for node in ast.parse((root / path).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                fields: dict[str, bool] = {}
                for base in node.bases:
                    fields |= found.get(ast.unparse(base), {})
                for item in node.body:
                    if isinstance(item, ast.AnnAssign):
                        fields[ast.unparse(item.target)] = item.value is not None
                found[node.name] = fields
    return found


def mutants_of(text: str, path: str, defaults: Defaults | None = None) -> list[Mutant]:
    """The mutants of one source text."""
    tree = ast.parse(text)
    seen: dict[tuple[int, int, str], int] = {}
    made: set[tuple[int, int, str, str]] = set()
    found = []
    for slot in _slots(tree, Slot(tree)):
        for change in chain(changes(slot, defaults or {}), statement_changes(slot)):
            at = (change.at.lineno, change.at.col_offset)
            if (*at, change.before, change.after) in made:
                continue
            made.add((*at, change.before, change.after))
            number = seen[*at, change.operator] = seen.get((*at, change.operator), 0) + 1
            make = _maker(tree, slot, change.node)
            words = (change.operator, number, slot.scope, change.before, change.after)
            found.append(Mutant(path, *at, *words, make))
    return sorted(found, key=lambda m: (m.line, m.column, m.operator, m.number))


# --- sites -----------------------------------------------------------------------------------


def _maker(tree: ast.Module, slot: Slot, replacement: ast.AST) -> Callable[[], str]:
    def make() -> str:
        slot.put(replacement)
        try:
            return ast.unparse(tree) + "\n"
        finally:
            slot.put(slot.node)

    return make


_SKIPPED = (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Raise)
"""Left alone with all that is in them. A raise is dropped by the condition it stands under."""


def _slots(node: ast.AST, slot: Slot) -> Iterator[Slot]:
    if slot.parent is not None:
        yield slot
    scope = node.name if isinstance(node, ast.FunctionDef) else slot.scope
    for name, value in ast.iter_fields(node):
        described = name == "args" and not isinstance(node, ast.Call)
        if described or name in ("annotation", "returns", "decorator_list"):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not _declares(child, node):
                place = index if isinstance(value, list) else None
                yield from _slots(child, Slot(child, node, name, place, scope))


def _declares(node: ast.AST, parent: ast.AST) -> bool:
    """Whether it only declares or describes: nothing is decided here."""
    if isinstance(node, _SKIPPED):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.FunctionDef) and node.name == "__init__":
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(parent, ast.ClassDef) and isinstance(node, ast.Assign | ast.AnnAssign):
        return True
    if isinstance(parent, ast.Module) and isinstance(node, ast.Assign):
        alias = ast.unparse(node.targets[0])[0].isupper() and isinstance(node.value, ast.BinOp)
        return alias or isinstance(node.value, ast.Subscript | ast.List)
    return False
