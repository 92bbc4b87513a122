"""The mutation operators on statements, patterns and handlers."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.mutation_operators import Change, Slot, change, head, without


def statement_changes(slot: Slot) -> Iterator[Change]:
    """Every change of one node that is more than an expression."""
    yield from _statements(slot)
    yield from _patterns(slot)
    yield from _handlers(slot)


def _statements(slot: Slot) -> Iterator[Change]:
    """A statement that is left out, where what remains is valid code."""
    node = slot.node
    match node:
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Return(None):
            droppable = True
        case ast.Assign(targets=[ast.Tuple(elts)]):
            droppable = not isinstance(node.value, ast.Call) and any(map(_is_own, elts))
        case ast.Assign(targets=[target]):
            droppable = isinstance(target, ast.Subscript) or _is_own(target) or _rebinds(node)
        case _:
            droppable = False
    if droppable:
        yield Change("drop-statement", ast.Pass(), node, head(node), "pass")
    if isinstance(node, ast.Match):
        for index in range(len(node.cases)):
            case = node.cases[index]
            less = without(node, index, "cases")
            pattern = f"case {ast.unparse(case.pattern)}"
            if less.cases:
                yield Change("drop-case", less, case.pattern, pattern, "nothing")


def _is_own(target: ast.AST) -> bool:
    return isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"


def _rebinds(node: ast.Assign) -> bool:
    """Whether a name gets a new value made from its old one."""
    name = ast.unparse(node.targets[0])
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node.value))


def _handlers(slot: Slot) -> Iterator[Change]:
    """An exception that is not handled."""
    node = slot.node
    if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[0], ast.Raise):
        raises = ast.ExceptHandler(node.type, node.name, [ast.Raise()])
        kind = ast.unparse(node.type) if node.type else ""
        yield Change("reraise", raises, node, f"except {kind}", "raise")


def _patterns(slot: Slot) -> Iterator[Change]:
    """A pattern with one alternative less."""
    if isinstance(slot.node, ast.MatchOr):
        for index in range(len(slot.node.patterns)):
            less = without(slot.node, index, "patterns")
            one = less.patterns[0] if len(less.patterns) == 1 else less
            yield change("drop-pattern", slot, one)
