"""PURE: the decisions of the machine in words: which rule fired, what it changed, and a state."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from elastix.event_log import encode, join
from elastix.machine import (
    Effect,
    Event,
    Ledger,
    Live,
    Policy,
    Saving,
    Slices,
    Source,
    Stable,
    Starting,
    TrainStateName,
)
from elastix.replay import Decision


class _Absent:
    """Stands for a field that a type of state does not have."""

    def __str__(self) -> str:
        return "-"


ABSENT = _Absent()
_WIDTH = 80
"""Of explanations, beside their labels."""
_MOST = 240
"""Characters of an event's own text that are shown: a trace is long."""


@dataclasses.dataclass(frozen=True)
class Change:
    """One field of the state, as its path, that is not what it was."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if isinstance(self.before, tuple) and isinstance(self.after, tuple):
            gone = [f"- {words(x)}" for x in self.before if x not in self.after]
            new = [f"+ {words(x)}" for x in self.after if x not in self.before]
            return f"{self.path}: {'; '.join(gone + new) or 'in another order'}"
        return f"{self.path}: {words(self.before)} -> {words(self.after)}"

    def to_json(self) -> dict[str, Any]:
        """`from` and `to`, one of which is left out where there is no such field."""
        both = {"from": self.before, "to": self.after}
        return {name: encode(value) for name, value in both.items() if value is not ABSENT}


# --- one decision ---------------------------------------------------------------------------------


def explain(decision: Decision) -> str:
    """Which rule fired, why, what changed in the state and which effects followed; some lines."""
    event = decision.event
    before, after = type(decision.before).__name__, type(decision.after).__name__
    unchanged = "nothing" if decision.before == decision.after else "the state, and no field of it"
    parts = [
        ("event", [_said(event), *textwrap.wrap(sentence(event), _WIDTH)]),
        ("rule", rule_lines(decision)),
        ("changed", [str(c) for c in changes(decision.before, decision.after)] or [unchanged]),
        ("effects", [words(effect) for effect in decision.effects] or ["none"]),
    ]
    head = f"row {decision.seq}  {_seconds(event.at)}  process {decision.process}"
    lines = [f"{head}  {before} + {type(event).__name__} -> {after}"]
    return "\n".join(lines + [line for label, texts in parts for line in _labelled(label, texts)])


def explanation(decision: Decision) -> dict[str, Any]:
    """The same as JSON."""
    found = changes(decision.before, decision.after)
    return {
        "row": decision.seq,
        "process": decision.process,
        "at": decision.event.at,
        "state": type(decision.before).__name__,
        "event": type(decision.event).__name__,
        "rule": decision.rule.__name__ if decision.rule else None,
        "why": " ".join(rule_lines(decision)[decision.rule is not None :]),
        "next_state": type(decision.after).__name__,
        "changed": {change.path: change.to_json() for change in found},
        "effects": encode(decision.effects),
    }


def rule_lines(decision: Decision) -> list[str]:
    """The name of the rule that fired and what it is for, or why none did."""
    rule = decision.rule
    if rule is None:
        assert isinstance(decision.before, Live), "nothing is stale before and after a run"
        now = decision.before.ledger.epoch
        return [f"none: a stale answer, of epoch {decision.event.epoch} in epoch {now}, is dropped"]
    return [rule.__name__, *textwrap.wrap(paragraph(rule), _WIDTH)]


def changes(before: Any, after: Any, path: str = "") -> list[Change]:
    """The fields that differ, ledger included, in the order in which the types declare them."""
    names = {f.name: None for value in (after, before) for f in dataclasses.fields(value)}
    found = []
    for name in names:
        one, other = getattr(before, name, ABSENT), getattr(after, name, ABSENT)
        if isinstance(one, Ledger) and isinstance(other, Ledger):
            found += changes(one, other, join(path, name))
        elif isinstance(other, Ledger):
            found += changes(Starting(), other, join(path, name))  # which knows nothing
        elif one != other and not isinstance(one, Ledger):
            found.append(Change(join(path, name), one, other))
    return found


# --- one state ------------------------------------------------------------------------------------


def describe(decision: Decision) -> str:
    """The state after a decision, field by field, readable; some lines."""
    state, policy = decision.after, decision.policy
    event = f"{type(decision.event).__name__} in {type(decision.before).__name__}"
    at = f"{_seconds(decision.event.at)}, process {decision.process} (pid {decision.pid})"
    lines = [
        f"after row {decision.seq} at {at}: {event}",
        f"{type(state).__name__}: {sentence(state)}",
    ]
    lines += _labelled("policy", [_fields(_chosen(policy)) or "all defaults"])
    for name, value in _own_fields(state):
        lines += _labelled(name, _lines_of(name, value, state, policy))
    ledger = getattr(state, "ledger", None)
    if ledger:
        lines.append("  ledger")
        for name, value in _own_fields(ledger):
            lines += ["  " + x for x in _labelled(name, _lines_of(name, value, ledger, policy))]
    return "\n".join(lines)


def _chosen(policy: Policy) -> dict[str, Any]:
    """What is not as by default."""
    values = ((f, getattr(policy, f.name)) for f in dataclasses.fields(policy))
    return {field.name: value for field, value in values if value != field.default}


def _own_fields(value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        if field.name != "ledger":
            yield field.name, getattr(value, field.name)


def _lines_of(name: str, value: Any, owner: Any, policy: Policy) -> list[str]:
    """One field's value, with the limit it runs against where there is one."""
    match name, value:
        case "dispatched", int():
            return [f"{value} ({value - owner.committed} of {policy.inflight} in flight)"]
        case "up", frozenset():
            return [f"{words(value)} (not up: {words(owner.slices - value)})"]
        case "losses", int():
            return [f"{value} without a committed step, of {policy.max_losses}"]
        case "below_since", float():
            limit = _seconds(value + policy.deadline)
            return [f"{_seconds(value)} (below min_slices {policy.min_slices}; fails at {limit})"]
        case "sources", tuple():
            newest_first = sorted(value, key=lambda s: s.preference, reverse=True)
            return [words(source) for source in newest_first] or ["none"]
        case _, tuple():
            return [words(item) for item in value] or ["none"]
    return [words(value)]


# --- words ----------------------------------------------------------------------------------------


def words(value: Any) -> str:
    """A value of the machine as a person would say it, on one line."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case float():
            return _seconds(value)
        case frozenset():
            return " ".join(map(str, sorted(value))) or "none"
        case tuple():
            return "; ".join(map(words, value)) or "none"
        case Source():
            made = f" of epoch {value.epoch}" if value.holders else ""
            return f"{value.tier} step {value.step}{made}{_on(value.holders)}"
        case TrainStateName():
            return f"step {value.step} of epoch {value.epoch}{_on(value.holders)}"
        case Saving():
            return f"step {value.step} from slice {value.holder} (epoch {value.epoch})"
        case Stable():
            return (
                f"slice {value.slice_id}: up in {value.probes} probes since {_seconds(value.since)}"
            )
        case Effect():
            return _said(value)
        case str():
            return _one_line(value)
    return _said(value) if dataclasses.is_dataclass(value) else str(value)


def paragraph(thing: Any) -> str:
    """The first paragraph of a docstring, or nothing if there is none."""
    return " ".join(((getattr(thing, "__doc__", "") or "").strip().partition("\n\n")[0]).split())


def sentence(thing: Any) -> str:
    """The first sentence of a docstring."""
    return re.split(r"(?<=\.) ", paragraph(thing))[0]


def _said(value: Any) -> str:
    """A type and its fields; when and in which epoch is told elsewhere for an event."""
    told = ("at", "epoch") if isinstance(value, Event) else ()
    given = {name: getattr(value, name) for name, _ in _own_fields(value) if name not in told}
    return f"{type(value).__name__} {_fields(given)}".rstrip()


def _fields(given: dict[str, Any]) -> str:
    return ", ".join(f"{name} {words(value)}" for name, value in given.items())


def _on(holders: Slices) -> str:
    return f" on {words(holders)}" if holders else ""


def _seconds(value: float) -> str:
    whole, _, rest = f"{value:.3f}".partition(".")
    return f"{whole}.{rest}".rstrip("0").rstrip(".") + " s" if rest else f"{whole} s"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line}"' if len(line) <= _MOST else f'"{line[:_MOST]}..."'


def _labelled(label: str, texts: list[str]) -> Iterator[str]:
    """The label stands before the first line alone."""
    labels = [label, *[""] * len(texts)]
    return (f"  {name:<15} {text}" for name, text in zip(labels, texts, strict=False))
