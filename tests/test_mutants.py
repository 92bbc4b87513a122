"""Mutants: small changes of the machine and the driver, which the other tests must notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutants import REASONS, draw, read_reasons
from tools.mutation_sites import all_mutants, mutants_of

ROOT = Path(__file__).resolve().parent.parent
DEFAULTS = {"Saved": {"at": False, "epoch": True}}


def changes(text: str) -> set[tuple[str, str]]:
    return {(m.before, m.after) for m in mutants_of(text, "a.py", DEFAULTS)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "if a < b: f()",
            {
                ("a < b", "True"),
                ("a < b", "False"),
                ("a < b", "a <= b"),
                ("a < b", "a >= b"),
                ("f()", "pass"),
            },
        ),
        (
            "x = y if a and b else z",
            {
                ("a and b", "True"),
                ("a and b", "False"),
                ("a and b", "not (a and b)"),
                ("a and b", "a or b"),
                ("a and b", "a"),
                ("a and b", "b"),
            },
        ),
        ("x = [s for s in y if s in z]", {("s in z", t) for t in ("True", "False", "s not in z")}),
        ("x = not a", {("not a", "a")}),
        ("x = a is None", {("a is None", "a is not None")}),
        ("x = n + 3", {("n + 3", "n - 3"), ("3", "4"), ("3", "2")}),
        ("x = n - m", {("n - m", "n + m")}),
        ("x = s.mesh - lost", {("s.mesh - lost", f"s.mesh {op} lost") for op in "|&"}),
        ("x = min(a, b)", {("min(a, b)", "max(a, b)")}),
        ("x = isinstance(a, B | C)", {("B | C", "B"), ("B | C", "C")}),
        ("x = replace(a, b=c)", {("b=c", "nothing")}),
        ("x = Saved(at=a, epoch=b)", {("epoch=b", "nothing")}),
        (
            "self._emit(Saved, epoch=b)",
            {("epoch=b", "nothing")} | {("self._emit(Saved, epoch=b)", "pass")},
        ),
        (
            "def f(): return (nxt, effects + more)",
            {
                ("(nxt, effects + more)", "(nxt, ())"),
                ("effects + more", "effects"),
                ("effects + more", "more"),
            },
        ),
        ("def f(): return (state, (Probe(e, s),))", {("(Probe(e, s),)", "()")}),
        ("def f(): return (state, NONE)", set()),
        ("TABLE = {(A, B): rule}", {("(A, B)", "nothing")}),
        ("x = replace(x)", {("x = replace(x)", "pass")}),
        ("self.x = y", {("self.x = y", "pass")}),
        ("x = draining = True", {("True", "False")}),
        (
            "match e:\n  case A() | B(): f()\n  case C() if g: h()",
            {
                ("case A() | B()", "nothing"),
                ("case C()", "nothing"),
                ("A() | B()", "A()"),
                ("A() | B()", "B()"),
                ("f()", "pass"),
                ("h()", "pass"),
                ("g", "True"),
                ("g", "False"),
                ("g", "not g"),
            },
        ),
        ("try: x = f()\nexcept E: g()", {("except E", "raise"), ("g()", "pass")}),
    ],
)
def test_a_site_is_changed_in_every_way(text, expected):
    assert changes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        '"""Words, 3 of them."""',
        "import a",
        "Live = A | B",
        "def f(a: B | C = 3) -> D | E: ...",
        "class A:\n  a: int = 3",
        "class A:\n  def __init__(self): self.a = 3",
        "assert a < 3",
        "x = f'{a + 3}'",
        "raise E(3)",
        "if TYPE_CHECKING:\n  x = a < 3",
    ],
)
def test_what_only_declares_is_left_alone(text):
    assert changes(text) == set()


def test_every_mutant_has_a_name_of_its_own_and_is_another_program():
    mutants = all_mutants(ROOT)
    assert len(mutants) > 800 and len({m.id for m in mutants}) == len(mutants)
    for mutant in draw(mutants, "0", 50):
        assert compile(mutant.make(), mutant.path, "exec")
        assert mutant.make() == mutant.make() != (ROOT / mutant.path).read_text()


def test_a_draw_depends_on_its_seed_and_not_on_lines():
    text = "def f(a, b):\n  return a < b and b < 9 or a + 3"
    before, after = (mutants_of(t, "a.py") for t in (text, "\n\n" + text))
    keys = [[m.key for m in draw(ms, s, 4)] for ms in (before, after) for s in ("0", "1")]
    assert keys[0] == keys[2] != keys[1] == keys[3]


def test_each_reason_belongs_to_a_mutant():
    reasons = read_reasons(REASONS.read_text(encoding="utf-8"))
    stale = set(reasons) - {m.key for m in all_mutants(ROOT)}
    assert not stale and all(reasons.values())


# --- the tests kill -------------------------------------------------------------------------------


def mutants(*arguments: str) -> tuple[int, str]:
    """A process of its own: trials are forked, which a process that uses JAX must not do."""
    command = [sys.executable, str(ROOT / "tools" / "mutants.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def one(path: str, scope: str, before: str, after: str) -> str:
    (found,) = (m.id for m in all_mutants(ROOT) if m.key == (path, scope, before, after))
    return found


def test_a_grave_mutant_dies_and_one_that_changes_nothing_lives():
    grave = one("elastix/machine/table.py", "transition", "rule is None", "rule is not None")
    code, out = mutants("--only", grave, "--through", "machine")
    assert code == 0 and "killed 1 of 1" in out, out
    same = next(iter(read_reasons(REASONS.read_text(encoding="utf-8"))))
    code, out = mutants("--only", one(*same), "--through", "machine")
    assert code == 1 and "killed 0 of 1" in out and " lives\n" in out, out


def test_a_few_mutants_die_or_have_a_reason():
    code, out = mutants("--sample", "8", "--through", "seeds")
    assert "killed" in out and "NO REASON" not in out, out


@pytest.mark.soak
def test_nearly_all_mutants_die():
    """Some ten minutes."""
    code, out = mutants("--sample", "120", "--seed", "soak")
    print(out)
    assert code == 0, out
