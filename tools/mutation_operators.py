"""The mutation operators on expressions: what a node is changed to, one change at a time.

Conditions, comparisons, operators, effects, fields, constants and rows: each has a function below
that yields the changes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

Defaults = dict[str, dict[str, bool]]
"""For each class, its fields in order and whether they may be left out."""


@dataclass(frozen=True)
class Slot:
    """A node and where it hangs: `getattr(parent, name)`, or the `index`-th of that list."""

    node: ast.AST
    parent: ast.AST | None = None
    name: str = ""
    index: int | None = None
    scope: str = ""
    """The function around it."""

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.name, node)
        else:
            getattr(self.parent, self.name)[self.index] = node


@dataclass(frozen=True)
class Change:
    """What the node of a slot becomes, under which name, and how it is said in a line."""

    operator: str
    node: ast.AST
    at: ast.AST
    before: str
    after: str


def changes(slot: Slot, defaults: Defaults) -> Iterator[Change]:
    """Every change of one expression."""
    yield from _fields(slot, defaults)
    for operator in (_conditions, _logic, _comparisons, _arithmetic, _calls):
        yield from operator(slot)
    for operator in (_items, _constants, _effects):
        yield from operator(slot)


def change(operator: str, slot: Slot, node: ast.AST) -> Change:
    return Change(operator, node, slot.node, ast.unparse(slot.node), ast.unparse(node))


def without(node: ast.AST, index: int, *lists: str) -> ast.AST:
    """A copy of `node` in which the item of that number is missing from each list named."""
    changed = copy.copy(node)
    for name in lists:
        items = getattr(node, name)
        setattr(changed, name, [*items[:index], *items[index + 1 :]])
    return changed


def dropped(operator: str, slot: Slot, index: int, *lists: str) -> Change:
    """The change in which one item of a node is missing; the item stands for the whole."""
    item = getattr(slot.node, lists[0])[index]
    return Change(operator, without(slot.node, index, *lists), item, head(item), "nothing")


def head(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


def _conditions(slot: Slot) -> Iterator[Change]:
    """Force a condition, or turn it round."""
    tests = isinstance(slot.parent, ast.If | ast.IfExp | ast.While) and slot.name == "test"
    if not (tests or slot.name in ("ifs", "guard")) or isinstance(slot.node, ast.Constant):
        return
    yield change("force-true", slot, ast.Constant(True))
    yield change("force-false", slot, ast.Constant(False))
    one = isinstance(slot.node, ast.Compare) and len(slot.node.ops) == 1
    if not one and not isinstance(slot.node, ast.UnaryOp):  # those turn round by themselves
        yield change("negate", slot, ast.UnaryOp(ast.Not(), slot.node))


def _logic(slot: Slot) -> Iterator[Change]:
    """`and` for `or`, one operand less, no `not`, no minus."""
    node = slot.node
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield change("drop-unary", slot, node.operand)
    if not isinstance(node, ast.BoolOp):
        return
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield change("and-or", slot, ast.BoolOp(other, node.values))
    for index in range(len(node.values)):
        less = without(node, index, "values")
        yield change("drop-operand", slot, less if len(less.values) > 1 else less.values[0])


_COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}


def _comparisons(slot: Slot) -> Iterator[Change]:
    """Another side of the boundary, or the opposite."""
    node = slot.node
    if not isinstance(node, ast.Compare):
        return
    for index, op in enumerate(node.ops):
        for other in _COMPARISONS[type(op)]:
            ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
            yield change("compare", slot, ast.Compare(node.left, ops, node.comparators))


SETS = {"slices", "up", "down", "emptied", "mesh", "holders", "noticed", "answering", "staying"}
SETS |= {"survivors", "outside", "lost", "gone", "named", "overdue", "members", "involved"}
"""Names of sets: the syntax does not tell their minus from that of numbers."""


def _is_set(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_set(node.left) or _is_set(node.right)
    if isinstance(node, ast.Call):
        return _is_set(node.func)
    return isinstance(node, ast.Set | ast.SetComp) or ast.unparse(node).split(".")[-1] in SETS


def _is_type(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_type(node.left) and _is_type(node.right)
    return isinstance(node, ast.Name) and node.id[0].isupper()


def _has_effects(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Name) and n.id in ("effects", "more") for n in ast.walk(node))


def _arithmetic(slot: Slot) -> Iterator[Change]:
    """Another operator; of types and of effects, one side alone."""
    node = slot.node
    if not isinstance(node, ast.BinOp):
        return
    sums = isinstance(node.op, ast.Add) and _has_effects(node)
    if _is_type(node) or sums:
        name = "drop-effect" if sums else "drop-type"
        yield change(name, slot, node.left)
        yield change(name, slot, node.right)
        return
    for other in _others(node):
        yield change("operator", slot, ast.BinOp(node.left, other(), node.right))


def _others(node: ast.BinOp) -> tuple[type, ...]:
    match node.op:
        case ast.BitOr():
            return (ast.BitAnd, ast.Sub) if _is_set(node) else ()
        case ast.BitAnd():
            return (ast.BitOr, ast.Sub)
        case ast.Sub():
            return (ast.BitOr, ast.BitAnd) if _is_set(node) else (ast.Add,)
        case ast.Add():
            return (ast.Sub,)
        case ast.Mult() | ast.Mod():
            return (ast.FloorDiv,)
        case ast.Div() | ast.Pow() | ast.FloorDiv():
            return (ast.Mult,)
    return ()


_TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def _calls(slot: Slot) -> Iterator[Change]:
    """The twin of a function."""
    node = slot.node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _TWINS:
        twin = ast.Name(_TWINS[node.func.id])
        yield change("min-max", slot, ast.Call(twin, node.args, node.keywords))


def _fields(slot: Slot, defaults: Defaults) -> Iterator[Change]:
    """A field that keeps its old value, or its default."""
    node = slot.node
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func)
    if name == "self._emit" and node.args:
        name = ast.unparse(node.args[0])
    fields = defaults.get(name, {})
    for index, keyword in enumerate(node.keywords):
        optional = name in ("replace", "max", "min", "sorted") or fields.get(keyword.arg or "")
        if keyword.arg and optional:
            yield dropped("drop-field", slot, index, "keywords")
    optional = list(fields.values())[: len(node.args)]
    if name == ast.unparse(node.func) and optional and optional[-1]:
        yield dropped("drop-field", slot, len(node.args) - 1, "args")


def _is_step(node: ast.AST, slot: Slot) -> bool:
    """Whether a pair is (state, effects), which is what rules return."""
    returned = isinstance(slot.parent, ast.Return | ast.IfExp)
    return returned and isinstance(node, ast.Tuple) and len(node.elts) == 2


def _items(slot: Slot) -> Iterator[Change]:
    """A tuple with one element less, a dict with one row less, a slice without a bound."""
    node, parent = slot.node, slot.parent
    if isinstance(node, ast.Dict) and all(node.keys):
        for index in range(len(node.keys)):
            yield dropped("drop-row", slot, index, "keys", "values")
    if isinstance(node, ast.Slice):
        for name in ("lower", "upper"):
            if getattr(node, name):
                changed = copy.copy(node)
                setattr(changed, name, None)
                yield change("drop-bound", slot, changed)
    if not isinstance(node, ast.Tuple) or not isinstance(node.ctx, ast.Load):
        return
    if _is_step(node, slot) or isinstance(parent, ast.Dict | ast.Subscript | ast.GeneratorExp):
        return
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Tuple):
        return
    compared = isinstance(parent, ast.Compare) and not isinstance(parent.ops[0], ast.In | ast.NotIn)
    if compared or (isinstance(parent, ast.Compare) and slot.name == "left"):
        return
    for index in range(len(node.elts)):
        yield change("drop-item", slot, without(node, index, "elts"))


def _constants(slot: Slot) -> Iterator[Change]:
    """A whole number one off, or the other truth."""
    node = slot.node
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        if not isinstance(slot.parent, ast.While):
            yield change("flip", slot, ast.Constant(not node.value))
    elif isinstance(node.value, int):
        yield change("constant", slot, ast.Constant(node.value + 1))
        yield change("constant", slot, ast.Constant(node.value - 1))


def _effects(slot: Slot) -> Iterator[Change]:
    """A rule that decides, and asks for nothing."""
    node = slot.node
    if not _is_step(node, slot):
        return
    effects = node.elts[1]
    none = isinstance(effects, ast.Name) and effects.id == "NONE"
    if not none and not isinstance(effects, ast.Tuple | ast.Subscript | ast.Constant):
        nothing = ast.Tuple([node.elts[0], ast.Tuple([], ast.Load())], ast.Load())
        yield change("drop-effect", slot, nothing)
