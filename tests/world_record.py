"""What is on record of a world: rows of steps and evaluations, and which of them are not true."""

from __future__ import annotations

from tests.world_values import WRONG, World


def recorded(w: World, step: int, wrong: bool) -> World | None:
    """The row of a committed step: written at its first commit, and the same at every other. None
    if it is another than the one on record."""
    if step > w.rows:
        assert step == w.rows + 1, f"the row of step {w.rows + 1} is missing"
        return w._replace(rows=step, untrue=w.untrue | wrong << step)
    return w if bool(w.untrue >> step & 1) == wrong else None


def evaluated(w: World, step: int, wrong: bool) -> World:
    """The row of an evaluation: once, whatever is done again."""
    if w.evaluations >> step:
        return w
    return w._replace(evaluations=w.evaluations | 1 << step, misjudged=w.misjudged | wrong << step)


def retracted(w: World, trusted: int) -> World:
    """Rows of steps after `trusted` are taken back; those before are true."""
    kept = (2 << trusted) - 1
    assert not (w.untrue | w.misjudged) & kept, "what wrong bits gave stays on record"
    return w._replace(
        rows=min(w.rows, trusted), evaluations=w.evaluations & kept, untrue=0, misjudged=0
    )


def forgiven(w: World, how: int, odd: int) -> World:
    """All slices agree. If it is on wrong bits, those count as right from now on: nobody can tell
    them any more."""
    if not how & WRONG and not odd:
        return w
    device = tuple((*d[:2], d[2] & ~WRONG, d[3], 0) for d in w.device)
    return w._replace(device=device, untrue=0, misjudged=0)


def states(w: World) -> tuple[tuple[int, int, int, int, int], ...]:
    """Every train state that was not freed, and the one a host snapshot is being made of."""
    return (*w.device, w.copying) if w.copying else w.device


def unjudged(w: World) -> World:
    """Where every wrong state is gone, and no snapshot has found one, nobody can tell any more that
    an evaluation was of one: the slice may have died before."""
    if not w.misjudged or any(d[4] or d[2] & WRONG for d in states(w)):
        return w
    return w._replace(misjudged=0)
