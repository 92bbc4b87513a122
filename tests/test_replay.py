"""Replay: a log must be decided again as it was recorded, and whatever was altered is noticed."""

from __future__ import annotations

import json
import random
import re
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastix import Lose, Return, SimulatedBackend, machine, train
from elastix.event_log import VERSION, EventLog, decode, encode, encode_row
from elastix.explain import changes, describe, explain
from elastix.jsonl import RowReader
from elastix.machine import (
    TABLE,
    DataFailed,
    Dispatched,
    Done,
    Effect,
    Event,
    Finishing,
    Policy,
    Prepared,
    ProgramFailed,
    ProtocolError,
    RestoreFailed,
    Restoring,
    RunStep,
    SlicesLost,
    SnapshotMissing,
    Snapshotted,
    Source,
    Started,
    Starting,
    State,
    Tier,
    Training,
    is_stale,
    transition,
)
from elastix.recoveries import Recoveries
from elastix.replay import Decision, Position, compare, decide, replay
from elastix.replay_command import replay_main
from elastix.testing import random_schedule, simulate
from tests.recipes import tiny

HISTORIES = 150


CLASSES = {c.__name__: c for c in map(vars(machine).get, machine.__all__) if is_dataclass(c)}


@cache
def hints(kind: type) -> dict[str, Any]:
    return {
        name: hint
        for name, hint in typing.get_type_hints(kind, localns=CLASSES).items()
        if name in {f.name for f in fields(kind)}
    }


class Step(NamedTuple):
    """One transition of a history."""

    before: State
    event: Event
    after: State
    effects: tuple[Effect, ...]


class History(NamedTuple):
    """One process: what happened to a machine, from its beginning to its end."""

    policy: Policy
    steps: list[Step]

    def rows(self, first: int = 0) -> list[Any]:
        """As they are read from a log."""
        return [self.row(n, first) for n in range(len(self.steps))]

    def row(self, n: int, first: int = 0) -> Any:
        """The row of one step, in a log whose earlier processes wrote `first` rows."""
        pid = 100 + first
        row = encode_row(first + n, *self.steps[n][1:], self.policy, pid)
        return json.loads(json.dumps(row))


@cache
def walk(seed: int) -> History:
    """The first process of a simulated run, with its faults, as the real driver lived it."""
    result = simulate(random_schedule(seed, 4))
    assert result.violation is None
    steps, before = [], Starting()
    for event, after, effects in result.processes[0]:
        steps.append(Step(before, event, after, effects))
        before = after
    return History(result.schedule.policy, steps)


def struck(row: tuple[type, type], chance: random.Random) -> History:
    """A history that comes to this row of the table, with anything that its event may say."""
    for seed in range(3 * HISTORIES):
        policy, steps = walk(seed)
        ends = [n for n, step in enumerate(steps, 1) if type(step.after) is row[0]]
        for end in chance.sample(ends, min(3, len(ends))):
            state = steps[end - 1].after
            event = replace(anything(row[1], chance), at=99.0, epoch=state.ledger.epoch)
            event = answering(state, event)
            try:
                answer = transition(state, event, policy)
            except ProtocolError:
                continue  # it makes no sense there
            return History(policy, [*steps[:end], Step(state, event, *answer)])
    raise AssertionError(f"no history comes to {row}")


def answering(state: Any, event: Event) -> Event:
    """The event, as an answer to what the state waits for, where it must be one."""
    match state, event:
        case Restoring(), SnapshotMissing() | RestoreFailed():
            return replace(event, source=state.source)
        case Restoring(), Prepared():
            return replace(event, step=state.source.step)
        case Finishing(), Snapshotted():
            return replace(event, step=state.train_state.step, holders=state.mesh)
        case Training(copying=int()), Snapshotted():
            return replace(event, step=state.copying, holders=state.mesh)
        case Training(asked=RunStep()), Dispatched() | DataFailed():
            return replace(event, step=state.asked.step)
    return event


def anything(kind: Any, chance: random.Random) -> Any:
    """A random value of an annotation."""
    if typing.get_origin(kind) is frozenset:
        return frozenset(chance.sample(range(4), chance.randint(0, 3)))
    if is_dataclass(kind):
        return kind(**{name: anything(hint, chance) for name, hint in hints(kind).items()})
    if issubclass(kind, Enum):
        return chance.choice(list(kind))
    plain = {int: chance.randint(0, 7), float: chance.random(), bool: chance.random() < 0.5}
    return {**plain, str: chance.choice(["", "no such file", "two\nlines"])}[kind]


@cache
def histories() -> list[History]:
    """Random ones, and one more for each row of the table: what is rare is among them."""
    rows = enumerate(row for row in TABLE if row[0] is not Starting)
    return [walk(seed) for seed in range(HISTORIES)] + [
        struck(r, random.Random(n)) for n, r in rows
    ]


@cache
def long() -> list[History]:
    """Those that came to a good end after a dozen rows or more."""
    walks = histories()[:HISTORIES]
    return [h for h in walks if len(h.steps) > 12 and isinstance(h.steps[-1].after, Done)]


def some(count: int) -> list[History]:
    """So many of them, the rare ones included."""
    return histories()[:: len(histories()) // count]


def test_the_histories_go_everywhere():
    steps = [step for history in histories() for step in history.steps]
    hit = {(type(s.before), type(s.event)) for s in steps if not is_stale(s.before, s.event)}
    assert set(TABLE) - hit == set()
    assert sum(is_stale(s.before, s.event) for s in steps) > 0
    assert len(steps) > 3000


# --- the inverse of encode ------------------------------------------------------------------------


def values(kind: Any, name: str = "") -> st.SearchStrategy:
    """Any value that the annotation allows."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return st.one_of(*map(values, arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is frozenset:
        return st.frozensets(values(arguments[0]), max_size=4)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if kind is Policy:
        return policies()
    if is_dataclass(kind):
        return st.builds(kind, **{f: values(hint) for f, hint in hints(kind).items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    plain = {
        int: st.integers(),
        str: st.text('ab\n"\xe9\0', max_size=5),
        bool: st.booleans(),
        NoneType: st.none(),
    }
    return {**plain, float: st.floats(allow_nan=False)}[kind]


def policies() -> st.SearchStrategy:
    """Those that are not refused."""
    drawn = {name: values(hint) for name, hint in hints(Policy).items()}
    drawn |= {name: st.integers(1, 99) for name, hint in hints(Policy).items() if hint is int}
    drawn |= {n: st.floats(0.1, 1e9) for n, hint in hints(Policy).items() if hint is float}
    return st.builds(Policy, **(drawn | {"max_slices": st.none() | st.integers(99, 999)}))


def typed(value: Any) -> Any:
    """Equal only for equal values of equal types: to Python, a tier equals its name."""
    if is_dataclass(value):
        return type(value), *(typed(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, tuple | frozenset):
        return type(value), *map(typed, sorted(value) if isinstance(value, frozenset) else value)
    return type(value), value


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_decode_is_the_inverse_of_encode(name):
    @settings(max_examples=6)
    @given(values(CLASSES[name]))
    def check(value):
        written = json.loads(json.dumps(encode(value)))
        assert typed(decode(written)) == typed(value)
        for field in written:
            with pytest.raises(ValueError, match="no|is missing|not"):
                decode({n: v for n, v in written.items() if n != field})
        with pytest.raises(ValueError, match="^x: is too much"):
            decode({**written, "x": 1})

    check()


SEED = encode(Source(Tier.SEED, 0))
LOSS = encode(SlicesLost(at=1.0, slices=frozenset({1, 2})))


@pytest.mark.parametrize(
    ("written", "expected", "line"),
    [
        ({**LOSS, "type": "Path"}, object, 'type: "Path" is not a value of the machine'),
        ({**LOSS, "type": ["Path"]}, object, 'type: ["Path"] is not a value of the machine'),
        (SEED, Event, 'type: "Source" is not Event'),
        ({**LOSS, "slices": [2, 1]}, Event, "slices: [2, 1] is not sorted, each once, as a set is"),
        ({**LOSS, "slices": [1, 1]}, Event, "slices: [1, 1] is not sorted"),
        ({**LOSS, "slices": [1, 2.0]}, Event, "slices[1]: 2.0 is not an int"),
        ({**LOSS, "slices": [1, True]}, Event, "slices[1]: true is not an int"),
        ({**LOSS, "slices": {}}, Event, "slices: {} is not a list"),
        ({**LOSS, "at": "1"}, Event, 'at: "1" is not a number'),
        ({**LOSS, "at": True}, Event, "at: true is not a number"),
        ({**LOSS, "at": 10**400}, Event, "at: 1000"),
        ({**SEED, "tier": "tape"}, object, 'tier: "tape" is not one of live, host, disk, seed'),
        ({**encode(Policy()), "lookback": 1}, object, "lookback: 1 is not one of live, host"),
        ({**encode(Policy()), "inflight": 0}, object, "policy.inflight=0: use 1 or more"),
        ({**encode(Policy()), "max_slices": "4"}, object, 'max_slices: "4" is not an int or null'),
        ([SEED, 3], tuple[Source, ...], "[1]: 3 is not Source"),
        ([{**SEED, "step": "\n"}], tuple[Source, ...], r'[0].step: "\n" is not an int'),
    ],
)
def test_what_encode_never_writes_is_refused_with_its_place(written, expected, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}") as error:
        decode(written, expected)
    assert "\n" not in str(error.value)


def test_a_float_may_have_been_written_as_an_int():
    event = decode({**LOSS, "at": 3})
    assert event.at == 3.0 and type(event.at) is float
    started = replace(walk(0).steps[0].event, at=3, up=frozenset({0}))
    policy = Policy(min_slices=2, patience=4)
    state, effects = transition(Starting(), started, policy)
    (row,) = History(policy, [Step(Starting(), started, state, effects)]).rows()
    assert type(row["state"]["until"]) is int
    assert replay([row]).difference is None


# --- the same decisions ---------------------------------------------------------------------------


def test_every_history_is_decided_again_as_it_was_recorded():
    for history in histories():
        seen: list[Decision] = []
        result = replay(history.rows(), seen.append)
        assert result.difference is None, result.difference
        assert result.rows == len(seen) == len(history.steps)
        assert [Step(d.before, d.event, d.after, d.effects) for d in seen] == history.steps
        (process,) = result.processes
        assert process.end == history.steps[-1].after and process.rows == result.rows


def test_each_process_of_a_log_begins_anew():
    one, two, three = long()[:3]
    killed = History(one.policy, one.steps[:7])
    rows = [*killed.rows(), *two.rows(7), *three.rows(7 + len(two.steps))]
    result = replay(rows)
    assert result.difference is None
    assert [p.rows for p in result.processes] == [7, len(two.steps), len(three.steps)]
    assert [p.pid for p in result.processes] == [100, 107, 107 + len(two.steps)]
    assert result.processes[0].end == one.steps[6].after
    headless = replay([*killed.rows(), *two.rows(6)[1:]])
    assert headless.difference and headless.rows == 7


def hasty(state, event, policy):
    """A machine that reports the last step as done before it is on disk."""
    after, effects = transition(state, event, policy)
    if isinstance(after, Finishing):
        return Done(after.why, after.train_state, after.iterator_state), ()
    return after, effects


def silent(state, event, policy):
    """A machine that forgets the last of its effects when a step was committed."""
    after, effects = transition(state, event, policy)
    return after, effects[:-1] if len(effects) > 1 else effects


@pytest.mark.parametrize(("rules", "path"), [(hasty, "state.type"), (silent, "effects[")])
def test_another_machine_than_the_one_that_wrote_the_log_is_noticed(rules, path):
    found = 0
    for seed in range(40):
        history = retold(walk(seed), rules)
        steps = enumerate(history.steps)
        wrong = [n for n, s in steps if transition(s.before, s.event, history.policy) != s[2:]]
        difference = replay(history.rows()).difference
        assert [difference.seq] == wrong[:1] if difference else not wrong
        found += difference is not None
        assert not difference or difference.path.startswith(path)
    assert found > 10


def retold(history: History, rules) -> History:
    """The same events, as if this machine had written down what followed."""
    policy = history.policy
    made = [Step(s.before, s.event, *rules(s.before, s.event, policy)) for s in history.steps]
    return History(policy, made)


# --- whatever is altered is noticed ---------------------------------------------------------------

FOR_THE_READER = {
    ("SlicesLost", "cause"),
    ("Prepared", "restore_seconds"),
    ("Prepared", "compile_seconds"),
    ("Prepared", "compiles"),
    ("ProgramFailed", "trace"),
}
"""Fields that no rule looks at."""
DECISIVE = {
    *(("Started", name) for name in ("num_steps", "slices", "up", "sources", "durable")),
    *((kind, "step") for kind in ("Dispatched", "Committed", "Snapshotted", "Saved", "SaveFailed")),
    *(("Probed", name) for name in ("up", "emptied", "down")),
    *(("SlicesLost", "slices"), ("Snapshotted", "holders"), ("Committed", "finite")),
    *(("SnapshotMissing", "source"), ("RestoreFailed", "source"), ("ProgramFailed", "reason")),
}


def altered(value: Any) -> Iterator[Any]:
    """Values like this one, and other."""
    if is_dataclass(value):
        for field in fields(value):
            for other in altered(getattr(value, field.name)):
                yield replace(value, **{field.name: other})
    elif isinstance(value, frozenset):
        yield from (value ^ {slice_id} for slice_id in (0, 1, 9))
    elif isinstance(value, tuple):
        yield from (value[1:], value + value[:1]) if value else ()
        yield from ((other, *value[1:]) for first in value[:1] for other in altered(first))
    elif isinstance(value, Enum):
        yield from (other for other in type(value) if other is not value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value - 1)
    elif isinstance(value, str):
        yield value + "x"


def decided(step: Step, event: Event, policy: Policy) -> bool:
    """Whether the machine answers this event as it did the step's own."""
    try:
        return transition(step.before, event, policy) == (step.after, step.effects)
    except Exception:
        return False


def difference_at(position: Position, row: Any):
    decision = decide(position, row)
    return compare(decision, row) if isinstance(decision, Decision) else decision


def places(count: int) -> Iterator[tuple[History, int, Position]]:
    """(history, n, the replay's position before its row n): so many for each row of the table."""
    seen: Counter = Counter()
    for history in reversed(histories()):
        for n, step in enumerate(history.steps):
            row = type(step.before), type(step.event)
            seen[row] += 1
            if seen[row] <= count:
                yield history, n, Position(n, step.before, history.policy)


def alterations(event: Event) -> Iterator[tuple[str, Event]]:
    for name in hints(type(event)):
        for other in altered(getattr(event, name)):
            yield name, replace(event, **{name: other})


def test_an_altered_event_is_caught_at_its_row_or_changes_no_decision():
    caught = set()
    for history, n, position in places(16):
        step, row = history.steps[n], history.row(n)
        for name, event in alterations(step.event):
            both = name in ("at", "epoch")  # they stand in the row once more
            now = {**row, "event": {**row["event"], **encode(event)}}
            found = difference_at(position, now)
            same = decided(step, event, history.policy)
            assert (found is None) == (same and not both), (event, found)
            assert not found or found.seq == n
            if both:
                found = difference_at(position, {**now, name: getattr(event, name)})
                assert (found is None) == same
            caught |= {(type(event).__name__, name)} if found else set()
    assert caught >= DECISIVE and not caught & FOR_THE_READER


def test_an_altered_policy_is_caught_where_it_first_decides_otherwise():
    caught = set()
    for history in some(12):
        rows = history.rows()
        for name in hints(Policy):
            for other in altered(getattr(history.policy, name)):
                try:
                    policy = replace(history.policy, **{name: other})
                except ValueError:
                    continue
                event = {**rows[0]["event"], "policy": encode(policy)}
                found = replay([{**rows[0], "event": event}, *rows[1:]]).difference
                steps = enumerate(history.steps)
                wrong = next((n for n, s in steps if not decided(s, s.event, policy)), None)
                assert (found.seq if found else None) == wrong
                caught |= {name} if found else set()
    assert caught >= {"inflight", "snapshot_every", "checkpoint_every", "min_slices", "patience"}


def damaged(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, the JSON with the value there altered, taken away or added)."""
    if isinstance(value, dict):
        for name, inner in value.items():
            where = f"{path}.{name}" if path else name
            yield where, {n: v for n, v in value.items() if n != name}
            for place, other in damaged(inner, where):
                yield place, {**value, name: other}
        yield f"{path}.x" if path else "x", {**value, "x": None}
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield f"{path}[{len(value)}]", [*value, value[0]]
        for n, inner in enumerate(value):
            for place, other in damaged(inner, f"{path}[{n}]"):
                yield place, [*value[:n], other, *value[n + 1 :]]
    elif isinstance(value, list):
        yield from ((path, [*value, 9]), (path, {"x": 1}), (path, None))
    elif isinstance(value, bool):
        yield from ((path, not value), (path, int(value)))
    elif isinstance(value, int):
        yield from ((path, value + 1), (path, bool(value)), (path, float(value)))
    else:
        yield from ((path, 77), (path, f"{value}x"))


def test_whatever_is_altered_in_a_state_or_an_effect_is_found_where_it_is():
    for history, n, position in places(2):
        row = history.row(n)
        decision = decide(position, row)
        for column in ("state", "effects"):
            for path, value in damaged(row[column], column):
                found = compare(decision, {**row, column: value})
                assert found and (found.seq, found.path) == (n, path)


@pytest.mark.parametrize("n", [0, 5])
def test_whatever_is_altered_in_a_row_is_found(n):
    rows = long()[0].rows()
    for path, row in damaged({k: v for k, v in rows[n].items() if k != "v"}, ""):
        found = replay([*rows[:n], {"v": VERSION, **row}, *rows[n + 1 :]]).difference
        assert found if "." not in path else True
        if path in ("seq", "at", "epoch", "x", "event", "state", "effects"):
            assert (found.seq, found.path) == (n, path)
    missing = replay([*rows[:n], *rows[n + 1 :]]).difference
    assert missing and missing.seq == n


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"step": 1, "loss": 2.0}, "row 0 (line 1) is not of an event log: give events.jsonl"),
        ([1], "row 0 (line 1) is not of an event log"),
        ({"v": True}, "row 0 (line 1) is not of an event log"),
        ({"v": 9}, "row 0 (line 1) is of version 9 of the event log, and this elastix knows ver"),
    ],
)
def test_what_is_no_event_log_of_this_version_is_refused(row, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}"):
        replay([row])


# --- in words -------------------------------------------------------------------------------------


def test_every_decision_and_every_state_can_be_told():
    for history in some(60):
        seen: list[Decision] = []
        replay(history.rows(), seen.append)
        told = [explain(decision) for decision in seen]
        for step, text in zip(history.steps, told, strict=True):
            stale = is_stale(step.before, step.event)
            rule = TABLE.get((type(step.before), type(step.event)))
            assert stale or f"rule            {rule.__name__}\n" in text
            assert ("is dropped" in text) == stale
            assert ("changed         nothing" in text) == (step.before == step.after)
        traced = any(isinstance(step.event, ProgramFailed | DataFailed) for step in history.steps)
        text = "".join(map(describe, seen)) + "".join(told)
        assert traced or not re.search(r"frozenset|[a-z]\(", text), "a value, and not words"


def test_sources_are_told_newest_first_and_how_far_dispatch_is_ahead():
    seen: list[Decision] = []
    for history in some(40):
        replay(history.rows(), seen.append)
    several = 0
    for decision in seen:
        if isinstance(state := decision.after, Training):
            ahead = (
                f"({state.dispatched - state.committed} of {decision.policy.inflight} in flight)"
            )
            assert f"  dispatched      {state.dispatched} {ahead}\n" in describe(decision)
        text = describe(decision).partition("    sources ")[2].partition("    epoch ")[0]
        steps = [int(line.split()[2]) for line in text.splitlines() if " step " in line]
        assert steps == sorted(steps, reverse=True)
        several += len(set(steps)) > 1
    assert several > 50


def test_the_changes_are_those_and_no_other():
    for step in (step for history in some(60) for step in history.steps):
        found = {change.path for change in changes(step.before, step.after)}
        if type(step.before) is type(step.after):
            rebuilt = step.before
            if any(path.startswith("ledger.") for path in found):
                new = {p[7:]: getattr(step.after.ledger, p[7:]) for p in found if "ledger." in p}
                rebuilt = replace(rebuilt, ledger=replace(rebuilt.ledger, **new))
            new = {p: getattr(step.after, p) for p in found if "ledger." not in p}
            assert replace(rebuilt, **new) == step.after


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A real run that loses slice 0 and takes it back."""
    path = tmp_path_factory.mktemp("run")
    faults = (Lose(0, step=4), Return(0, step=6))
    recipe = replace(tiny.recipe(), num_steps=9)
    summary = train(recipe, backend=SimulatedBackend(2, 1, faults), run_dir=path)
    assert summary.outcome == "done"
    return path


@pytest.fixture
def elastix(capsys):
    """Runs `elastix replay`; returns (status, out, err)."""

    def call(*arguments):
        return replay_main([str(a) for a in arguments]), *capsys.readouterr()

    return call


@pytest.fixture
def log(tmp_path):
    """A log that a killed process and a whole one wrote."""
    for pid, (history, count) in enumerate(((long()[0], 6), (long()[1], None))):
        file = EventLog(tmp_path / "events.jsonl", history.policy, pid)
        for step in history.steps[:count]:
            file.append(*step[1:])
        file.close()
    return tmp_path / "events.jsonl"


def test_a_real_run_is_decided_again_as_it_was_recorded(elastix, run_dir):
    rows = list(RowReader(run_dir / "events.jsonl"))
    for row in rows:
        event = {n: v for n, v in row["event"].items() if n not in ("policy", "pid")}
        assert encode(decode(event, Event)) == event
        assert encode(decode(row["state"], State)) == row["state"]
        assert encode(decode(row["effects"], tuple[Effect, ...])) == row["effects"]
    for what in (run_dir, run_dir / "events.jsonl"):
        status, out, err = elastix(what)
        assert (status, err) == (0, "")
        assert out.startswith(f"the same decisions: {len(rows)} rows, 1 process, ")
        assert out.endswith("; ended done at step 9\n") and out.count("\n") == 1
    told = json.loads(elastix(run_dir, "--json")[1])
    wrote = json.loads((run_dir / "summary.json").read_text())
    assert told["recoveries"] == len(wrote["recoveries"]) > 0 and told["same"]


def test_a_difference_is_one_line_and_exit_status_1(elastix, log):
    lines = log.read_text().splitlines()
    row = json.loads(lines[3])
    row["state"]["ledger"]["num_steps"] += 1
    steps = row["state"]["ledger"]["num_steps"]
    log.write_text("\n".join([*lines[:3], json.dumps(row), *lines[4:], ""]))
    line = f"row 3 (line 4): state.ledger.num_steps: recorded {steps}, made {steps - 1}"
    assert elastix(log) == (1, "", f"elastix: {line}\n")
    status, out, _ = elastix(log, "--json")
    told = json.loads(out)
    assert status == 1 and told["rows"] == 3 and told["difference"]["seq"] == 3
    assert elastix(log, "--until", 2)[0] == 0


def test_a_torn_last_line_is_tolerated_said_and_left_alone(elastix, log):
    whole = log.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in (1, 2, len(lines[-1]) // 2, len(lines[-1]) - 1):
        log.write_bytes(whole[:-cut])
        status, out, err = elastix(log)
        assert (status, err) == (0, "") and out.startswith("the last line is torn")
        assert f"the same decisions: {len(lines) - 1} rows, 2 processes" in out
        assert "was killed, or is still running" in out.splitlines()[-1]
        assert log.read_bytes() == whole[:-cut]
    assert json.loads(elastix(log, "--json")[1])["torn"]
    log.write_bytes(b"".join(lines[:-1]))
    assert "torn" not in elastix(log)[1]


def recoveries(steps: list[Step]) -> int:
    found = Recoveries()
    return sum(found.update(s.before, s.event, s.after) is not None for s in steps)


def test_a_recovery_that_a_killed_process_began_is_not_counted(elastix, tmp_path):
    two = next(h for h in long() if recoveries(h.steps) == 0)
    one, lost = next(
        (history, n)
        for history in long()
        for n, step in enumerate(history.steps, 1)
        if isinstance(step.event, SlicesLost) and isinstance(step.after, Restoring)
        if recoveries(history.steps[:n] + two.steps) > recoveries(history.steps[:n])
    )
    one = History(one.policy, one.steps[:lost])
    rows = [*one.rows(), *two.rows(lost)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, _ = elastix(tmp_path, "--json")
    told = json.loads(out)
    assert status == 0 and [p["end"] for p in told["processes"]] == ["Restoring", "Done"]
    assert told["recoveries"] == recoveries(one.steps)


def test_until_prints_the_state_there(elastix, run_dir):
    rows = list(RowReader(run_dir / "events.jsonl"))
    n = next(r["seq"] for r in rows if r["event"]["type"] == "SlicesLost") + 1
    status, out, _ = elastix(run_dir, "--until", n)
    state = rows[n]["state"]
    assert status == 0 and state["type"] == "Training" and len(state["mesh"]) == 1
    ahead = state["dispatched"] - state["committed"]
    for line in (
        f"after row {n} at ",
        "Training: Steps run on `mesh`",
        '  policy          warm "off", snapshot_every 5, checkpoint_every 10, probe_every 0.01 s\n',
        "  mesh            1\n",
        f"  committed       {state['committed']}\n",
        f"  dispatched      {state['dispatched']} ({ahead} of 2 in flight)\n",
        "    up              1 (not up: 0)\n",
        "    sources         seed step 0\n",
        "    losses          1 without a committed step, of 10\n",
        f"rows, 1 process, 2 epochs, 0 recoveries; stopped after row {n} in Training at step 0\n",
    ):
        assert line in out or line.replace("rows", f"{n + 1} rows") in out, line
    last = rows[-1]["seq"]
    assert elastix(run_dir, "--until", last)[0] == 0
    status, _, err = elastix(run_dir, "--until", last + 1)
    assert (status, err) == (
        2,
        f"elastix: --until {last + 1}: the last row is {last}, use {last} or less\n",
    )


def test_explain_says_which_rule_fired_and_why(elastix, run_dir):
    rows = list(RowReader(run_dir / "events.jsonl"))
    n = next(r["seq"] for r in rows if r["event"]["type"] == "Snapshotted")
    _, out, _ = elastix(run_dir, "--until", n, "--explain")
    step = rows[n]["event"]["step"]
    assert out.startswith(f"row {n} ") and out.count("\nrow ") == 0
    assert "Training + Snapshotted -> Training\n" in out
    assert "rule            publish\n" in out
    assert f"  event           Snapshotted step {step}, holders " in out
    assert "                A newer snapshot exists" in out
    assert f"ledger.sources: + host step {step} of epoch " in out
    assert "effects         none\n" in out and rows[n]["effects"] == []
    begun = next(r["seq"] for r in rows if "Snapshot" in [e["type"] for e in r["effects"]])
    _, out, _ = elastix(run_dir, "--until", begun, "--explain")
    assert f"effects         Snapshot epoch {rows[n]['epoch']}, step {step}\n" in out
    _, out, _ = elastix(run_dir, "--explain")
    assert out.count("\nrow ") == len(rows) - 1
    *told, summary = map(json.loads, elastix(run_dir, "--explain", "--json")[1].splitlines())
    assert [t["row"] for t in told] == list(range(len(rows))) and summary["same"]
    assert told[n]["rule"] == "publish" and told[n]["effects"] == rows[n]["effects"]
    assert told[begun]["changed"]["copying"] == {"from": None, "to": step}
    assert told[n]["changed"]["copying"] == {"from": step, "to": None}


def test_bad_input_is_one_line_with_the_remedy_and_exit_status_2(elastix, tmp_path, log):
    lines = log.read_text().splitlines(keepends=True)
    other, empty = tmp_path / "other.jsonl", tmp_path / "empty"
    empty.mkdir()

    def refused(*arguments):
        status, out, err = elastix(*arguments)
        assert status == 2 and out == "" and err.count("\n") == 1
        return err.removeprefix("elastix: ").rstrip()

    assert "does not exist: give a run directory or its events.jsonl" in refused(other)
    assert refused(empty).endswith("holds no events.jsonl: give the directory of a run")
    other.write_text("")
    assert "is empty: the run ended before its first event" in refused(other)
    other.write_text(lines[0][:-1])
    assert "holds one torn line and no row" in refused(other)
    other.write_text('{"step": 1}\n')
    assert "is not of an event log: give events.jsonl" in refused(other)
    other.write_bytes(b"\x00\xff\x93NUMPY\n")
    assert "line 1 is damaged" in refused(other)
    other.write_text("[" * 10**5 + "\n")
    assert "line 1 is damaged" in refused(other)
    other.write_text("".join([*lines[:4], lines[4][:-9] + "\n", *lines[5:]]))
    assert refused(other).endswith(
        "line 5 is damaged: only the lines before it can be read: replay them with --until 3"
    )
    assert elastix(other, "--until", 3)[0] == 0
    for wrong in ("-1", "x", "1.5"):
        assert f"{wrong!r} is no row: use 0 or more" in refused(log, "--until", wrong)
    assert "the following arguments are required: RUN_DIR" in refused()
    assert "unrecognized arguments: --unti" in refused(log, "--unti", "3")


def test_help_has_examples(elastix):
    status, out, err = elastix("--help")
    assert (status, err) == (0, "") and "exit status:" in out
    assert sum(line.startswith("  elastix replay runs/") for line in out.splitlines()) == 2


def test_started_carries_the_policy_and_the_process(log):
    rows = list(RowReader(log))
    begun = [row["event"] for row in rows if row["event"]["type"] == "Started"]
    assert [event["pid"] for event in begun] == [0, 1]
    assert [decode(event["policy"]) for event in begun] == [h.policy for h in long()[:2]]
    for name in ("policy", "pid"):
        event = {n: v for n, v in begun[0].items() if n != name}
        found = replay([{**rows[0], "event": event}, *islice(rows, 1, None)]).difference
        assert (found.seq, found.path) == (0, f"event.{name}") and "is missing" in str(found)
    assert isinstance(
        decode({n: v for n, v in begun[0].items() if n not in ("policy", "pid")}), Started
    )
