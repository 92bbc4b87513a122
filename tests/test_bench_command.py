"""`elastix bench`: its arithmetic, its table, what it keeps. No test says how fast anything is."""

from __future__ import annotations

import json
import re
import threading
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from bench import sizes
from elastix import cli
from elastix.benchmark import figures, recovery
from elastix.benchmark.figures import rows
from elastix.benchmark.history import (
    Moment,
    changes,
    cpu_of_steps,
    gaps,
    of_kind,
    percentile,
    steady_steps,
)
from elastix.benchmark.memory import Weighed
from elastix.benchmark.parts import PARTS, Task
from elastix.benchmark.report import Measured, svg, text
from elastix.benchmark.side_by_side import Turns, arrange, loop_source, seconds_of
from elastix.benchmark.store import Store
from elastix.step import Work
from tests.recipes import tiny

TINY = "tests/recipes/tiny.py"


# --- what happened, and what follows ----------------------------------------------------------


class Story:
    """Moments of a run, written down one after another; a step takes 1 s and 2 CPU seconds."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.at = self.cpu = 0.0
        self.programs = 5

    def tell(self, kind: str, step: int = 0, slices: int = 4, after: float = 0.0) -> None:
        self.at += after
        self.cpu += 2 * after
        self.moments.append(Moment(kind, self.at, step, slices, self.programs, self.cpu))

    def steps(self, first: int, last: int, slices: int = 4, seconds: float = 1.0) -> None:
        """Steps with two in flight: `first` and the next are dispatched, each next at a commit."""
        for step in (first, first + 1):
            self.tell("dispatched", step, slices)
        for step in range(first, last + 1):
            self.tell("committed", step, slices, after=seconds)
            self.tell("dispatched", step + 2, slices)


def a_loss(back_to: int = 6) -> Story:
    """Steps 1 to 6 on four slices; then one is lost, and step `back_to` is restored on three."""
    story = Story()
    story.steps(1, 6)
    story.tell("lost", after=0.25)
    story.tell("prepared", back_to, 3, after=0.5)
    story.steps(back_to + 1, 14, 3, seconds=1.5)
    return story


def test_a_loss_is_timed_from_when_it_is_known():
    (change,) = changes(a_loss().moments)
    assert change.kind == "loss" and change.slices == 3
    assert change.known == change.new == pytest.approx(0.5 + 1.5)
    assert change.pause == pytest.approx(0.25 + 0.5 + 1.5)
    assert change.abandoned == 2 and change.redone == 0 and change.programs == 0


def test_steps_done_again_are_counted_and_the_first_new_one_is_timed():
    (change,) = changes(a_loss(back_to=3).moments)
    assert change.redone == 3 and change.abandoned == 2
    assert change.known == pytest.approx(2.0) and change.new == pytest.approx(2.0 + 3 * 1.5)


def test_what_is_compiled_from_the_loss_on_is_counted():
    story = a_loss()
    cut = next(n for n, m in enumerate(story.moments) if m.kind == "prepared")
    later = [Moment(m.kind, m.at, m.step, m.slices, 7, m.cpu) for m in story.moments[cut:]]
    (change,) = changes([*story.moments[:cut], *later])
    assert change.programs == 2


@pytest.mark.parametrize(("before", "after", "kind"), [(3, 4, "regrow"), (4, 3, "leave")])
def test_a_voluntary_change_is_told_by_the_slices_and_abandons_nothing(before, after, kind):
    story = Story()
    story.tell("dispatched", 1, before)
    for step in (1, 2, 3):
        story.tell("committed", step, before, after=1.0)
        if step < 3:
            story.tell("dispatched", step + 1, before)
    story.tell("prepared", 3, after, after=0.5)
    story.steps(4, 6, after)
    (change,) = changes(story.moments)
    assert (change.kind, change.redone, change.abandoned, change.slices) == (kind, 0, 0, after)
    assert change.pause == change.known == pytest.approx(1.5)
    assert of_kind([change], "loss") == [] and len(of_kind([change], kind)) == 1


def test_a_steady_step_is_one_that_nothing_disturbs():
    story = Story()
    story.steps(1, 5)
    story.tell("snapshotted", 5)
    story.steps(6, 8, seconds=50.0)  # the first two of them follow on the snapshot
    assert steady_steps(story.moments) == {4: 1.0}
    assert steady_steps(a_loss().moments) == {3: 1.5, 4: 1.0}
    assert steady_steps([]) == {} and list(gaps(story.moments[:3])) == []


def test_cpu_seconds_are_those_of_undisturbed_steps():
    found = cpu_of_steps(a_loss(back_to=5).moments)
    assert list(found) == [3] and found[3] == pytest.approx([3.0]), "of four, too few are left"
    story = Story()
    story.steps(1, 20)
    assert cpu_of_steps(story.moments) == {4: [2.0]}


def test_a_percentile_is_a_value_that_was_measured():
    assert percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert percentile(list(range(1, 101)), 0.95) == 95
    assert percentile(list(range(1, 21)), 0.25) == 5 and percentile([7.0], 0.25) == 7.0


def test_the_first_steps_of_a_block_do_not_count():
    assert seconds_of([0, 5, 6, 7, 7.5, 9.5]) == [0.5, 2.0]


# --- the figures ------------------------------------------------------------------------------


def loss(known: float, redone: int = 0, abandoned: int = 2) -> dict:
    new = known + redone * 0.1
    times = {"known": known, "new": new, "pause": new, "programs": 0}
    return {"kind": "loss", "redone": redone, "abandoned": abandoned, "slices": 3, **times}


def regrow(pause: float, slices: int = 4) -> dict:
    times = {"known": pause, "new": pause, "pause": pause}
    return {**loss(pause, abandoned=0), **times, "kind": "regrow", "slices": slices}


def losing(part: str, **fields: object) -> dict:
    lookback, _, inflight = part.partition("-")
    again = 7 if lookback == "host" else 0
    return {
        "lookback": lookback,
        "inflight": int(inflight),
        "snapshot_every": 10,
        "period": 15,
        "steady": {"3": 0.1, "4": 0.08},
        "losses": [loss(0.15, again, int(inflight)) for _ in range(20)],
        "regrows": [regrow(0.16)] * 20,
        "leaves": [regrow(0.2, 3)] * 4,
        "while_losing": {"committed": 300, "dispatched": 340, "losses": 20},
        "params": 1000,
        "state_bytes": 12000,
        **fields,
    }


def all_parts() -> dict:
    """What a bench might have measured, in which every figure is reached."""
    return {
        **{part: losing(part) for part in ("live-2", "host-2", "host-1")},
        "live-1": losing(
            "live-1", while_losing={"committed": 300, "dispatched": 320, "losses": 20}
        ),
        "overhead": {
            "pairs": [[0.1005, 0.1], [0.0995, 0.1], [0.1001, 0.1]],
            "put": {"elastix": 2e-3, "by hand": 3e-4},
            "cpu": {"elastix": 2e-3, "by hand": 3e-4},
            "source": loop_source(),
            "inflight": 2,
        },
        "snapshots": {
            "none": [0.1, 0.1, 0.1],
            "every 10": [0.1005, 0.12, 0.1],
            "every step": [0.104, 0.103, 0.2],
        },
        "tokens-12": {
            "cpu": {"3": [0.101], "4": [0.1]},
            "tokens": 768.0,
            "useful": {"3": 1.0, "4": 1.0},
        },
        "tokens-4": {
            "cpu": {"3": [0.15], "4": [0.1]},
            "tokens": 768.0,
            "useful": {"3": 2 / 3, "4": 1.0},
        },
        "memory": {
            "one_copy": 1000,
            "live-2": {"most": 3010, "inflight": 2},
            "live-1": {"most": 2010, "inflight": 1},
            "host-2": {"most": 1010, "inflight": 2},
        },
        "vendor-off": {"losses": [3.0] * 8, "phases": {"compile": 2.5}, "steady": {"3": 0.1}},
        "vendor-on": {"losses": [1.0] * 8, "phases": {"compile": 0.5}, "steady": {"3": 0.1}},
        "restart-off": {"seconds": [20.0] * 5, "checkpoint_every": 10},
        "restart-on": {"seconds": [6.0] * 5, "checkpoint_every": 10},
    }


def measured(parts: dict, beginning: str) -> list[figures.Row]:
    found = [row for row in rows(parts) if row.figure.strip().startswith(beginning)]
    assert found, beginning
    return found


def test_every_figure_can_be_reached_and_says_what_was_measured():
    found = rows(all_parts())
    assert [row.figure for row in found if row.must and row.reached is not True] == []
    assert all(row.reached is None for row in found if not row.must)
    assert all(re.search(r"\d", row.measured) for row in found)
    (known,) = measured(all_parts(), "loss known to next commit, host, inflight 2")
    assert known.must == "<= 4.5 steps"
    assert known.measured == (
        "median 1.50, p95 1.50, worst 1.50 steps of 100.0 ms, 20 losses; "
        "8.5 to a step never done before"
    )
    (elastic,) = measured(all_parts(), "elastic loop")
    assert elastic.measured.startswith("+100 us, +0.1% of 100.0 ms")
    (paused,) = measured(all_parts(), "pause of a regrow, live, inflight 1")
    assert paused.measured.startswith("median 2.00")


BROKEN = [
    ("elastic loop", "overhead", {"pairs": [[0.1021, 0.1]] * 3}),
    ("loss known to next commit, live, inflight 2", "live-2", {"losses": [loss(0.36)] * 20}),
    (
        "loss known to next commit, live, inflight 1",
        "live-1",
        {"losses": [loss(0.26, abandoned=1)] * 20},
    ),
    ("programs compiled", "host-1", {"regrows": [{**regrow(0.1), "programs": 1}]}),
    ("steps done again, live, inflight 2", "live-2", {"losses": [loss(0.1, redone=1)]}),
    (
        "steps done again, host, inflight 1",
        "host-1",
        {"losses": [loss(0.1, redone=11, abandoned=1)]},
    ),
    ("steps done again at a regrow", "live-2", {"leaves": [{**regrow(0.1, 3), "redone": 1}]}),
    ("steps done again at a regrow", "live-2", {"regrows": [{**regrow(0.1), "abandoned": 1}]}),
    ("steps abandoned, live, inflight 1", "live-1", {"losses": [loss(0.1, abandoned=2)]}),
    ("pause of a regrow, host, inflight 2", "host-2", {"regrows": [regrow(0.25)] * 3}),
    ("slower by a host snapshot every 10", "snapshots", {"every 10": [0.102] * 3}),
    ("slower by a host snapshot every step", "snapshots", {"every step": [0.106] * 3}),
    ("tokens per CPU-s, one of four gone, R=12", "tokens-12", {"cpu": {"3": [0.104], "4": [0.1]}}),
    ("tokens per CPU-s, one of four gone, R=4", "tokens-4", {"cpu": {"3": [0.156], "4": [0.1]}}),
    (
        "committed / dispatched, live, inflight 2",
        "live-2",
        {"while_losing": {"committed": 300, "dispatched": 350, "losses": 20}},
    ),
    ("copies of the state beside it, host", "memory", {"host-2": {"most": 1100, "inflight": 2}}),
    ("elastix is faster, cache off", "vendor-off", {"losses": [1.19] * 8}),
    ("elastix is faster, cache off", "restart-off", {"seconds": [7.4] * 5}),
]


@pytest.mark.parametrize(("figure", "part", "fields"), BROKEN, ids=[b[0] for b in BROKEN])
def test_a_figure_that_is_not_reached_says_so(figure, part, fields):
    parts = all_parts()
    parts[part] |= fields
    wrong = [row for row in rows(parts) if row.reached is False]
    assert wrong and all(row.figure.strip().startswith(figure) for row in wrong)


def test_parts_that_are_missing_or_failed_are_told():
    parts = all_parts()
    del parts["vendor-off"]
    parts["tokens-12"] = {"not_possible": "global_batch=8 cannot be split"}
    parts["memory"] = {"failed": "its process ended with 1"}
    (gone,) = measured(parts, "the vendor's loop, cache off")
    assert gone.measured == "not measured" and not gone.there
    assert measured(parts, "elastix is faster, cache off")[0].measured == gone.measured
    (tokens,) = measured(parts, "tokens per CPU-s, one of four gone, R=12")
    assert tokens.reached is None and "cannot be split" in tokens.measured
    assert all(row.reached is False for row in measured(parts, "copies of the state"))
    only = rows({"live-2": losing("live-2")})
    assert [r.figure for r in only if r.there and r.must and not r.reached] == []
    told = text("about", [Measured("a.py", parts)], quick=False)
    assert "\nthe vendor's loop, cache off" not in told
    assert "; 2 that must be were not measured" in told


def test_the_table_names_the_recipe_its_size_and_its_step():
    told = text("about this machine", [Measured("a.py:small", all_parts())], quick=False)
    head, table, by_hand, notes = told.removeprefix("about this machine\n\n").split("\n\n")[:1] + [
        told.split("\n\n")[n] for n in (1, 2, -1)
    ]
    assert head.startswith(
        "a.py:small: 1,000 parameters, state of 0.0 MB; a step takes 100.0 ms on 3, 80.0 ms on 4"
    )
    assert table.splitlines()[1].split() == ["must", "reach", "reached", "measured"]
    asked = sum(bool(row.must) for row in rows(all_parts()))
    assert table.splitlines()[-1] == f"reached: {asked} of {asked}"
    assert "def hand_written" in by_hand and "nothing here was measured on TPUs" in " ".join(
        notes.split("\n  ")
    )
    quick = text("about", [Measured("a.py", all_parts())], quick=True)
    assert "the figures mean nothing" in quick and "the figures mean nothing" not in told


def test_the_picture_has_a_dot_for_each_recovery_and_stays_inside():
    drawn = ElementTree.fromstring(svg([Measured("a<b.py", all_parts()), Measured("c.py", {})]))
    width, height = map(float, drawn.get("viewBox").split()[2:])
    dots = [part for part in drawn if part.tag.endswith("circle")]
    assert len(dots) == 20 + 20 + 8 + 8 + 5 + 5
    for dot in dots:
        assert 0 < float(dot.get("cx")) < width and 0 < float(dot.get("cy")) < height
    assert "a<b.py" in {part.text for part in drawn}
    assert ElementTree.fromstring(svg([])) is not None


def test_the_hand_written_loop_is_short():
    assert len(loop_source().splitlines()) <= 20


# --- what measures ----------------------------------------------------------------------------


def test_losses_regrows_and_leaves_of_a_run_are_measured():
    found = recovery.losses(Task("live-2", TINY, 4, True, ""), tiny.recipe())
    found = json.loads(json.dumps(found))
    assert len(found["losses"]) == 4 and len(found["leaves"]) == 4
    assert len(found["regrows"]) >= 7
    assert set(found["steady"]) == {"3", "4"} and min(found["steady"].values()) > 0
    assert [x["abandoned"] for x in found["losses"]] == [2, 2, 2, 2]
    period = found["period"]
    assert found["while_losing"] == {
        "committed": 4 * period,
        "dispatched": 4 * period + 8,
        "losses": 4,
    }
    told = {row.figure: row for row in rows({"live-2": found})}
    for figure in ("steps done again, live, inflight 2", "steps abandoned, live, inflight 2"):
        assert told[figure].reached
    assert told["steps done again at a regrow, a leave"].reached
    assert told["programs compiled after a loss, regrow, leave"].reached


def test_a_buffer_is_weighed_once():
    backend = Weighed(4, 2)
    x = jax.device_put(np.ones(1000, np.float32), backend.devices[1][0])
    same = jax.device_put(x, backend.devices[1][0], may_alias=True)
    other = jax.device_put(np.ones(10, np.float32), backend.devices[2][1])
    assert backend.weigh([x, other]) == backend.weigh([x, same, other]) == 4000
    assert backend.weigh([x, jax.device_put(np.ones(5, np.int8), backend.devices[1][1])]) == 4005


def test_a_batch_is_arranged_with_padding():
    work = Work(global_batch=6, num_replicas=3, num_slices=2)
    ids = np.array([1, 2, 3, 2**40, 5, 6])
    arranged = arrange({"x": np.arange(6), "example_id": ids}, work)
    assert arranged["replica"].tolist() == [0, 1, 2, 3]
    assert arranged["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert arranged["example_id"][1].tolist() == [[3, 0], [0, 256]]


def test_threads_take_turns_until_each_has_left():
    turns, order = Turns(3), []

    def run(who: int, times: int) -> None:
        for _ in range(times):
            turns.wait(who)
            order.append(who)
            turns.next(who)
        turns.wait(who)
        turns.next(who, leaves=True)

    threads = [threading.Thread(target=run, args=(who, who + 1)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert order == [0, 1, 2, 1, 2, 2]


def test_the_three_sizes_have_the_parameters_they_are_named_for():
    counts = [make().model.num_params for make in (sizes.small, sizes.medium, sizes.large)]
    assert [round(count / 1e6, 1) for count in counts] == [0.2, 1.3, 9.9]
    assert all(make().num_replicas == 12 for make in (sizes.small, sizes.medium, sizes.large))


# --- what it keeps ----------------------------------------------------------------------------

SETTINGS = {"losses": 20, "quick": False}


def test_a_folder_keeps_parts_and_knows_what_it_is(tmp_path):
    store = Store.open(tmp_path / "a/b", SETTINGS)
    assert store.part("x.py:small", "memory") is None
    store.keep("x.py:small", "memory", {"one_copy": 1})
    again = Store.open(tmp_path / "a/b", SETTINGS)
    assert again.part("x.py:small", "memory") == {"one_copy": 1}
    assert again.part("x.py:large", "memory") is again.part("x-py/small", "memory") is None
    with pytest.raises(ValueError, match="is a bench with losses 20, not 8: name another with"):
        Store.open(tmp_path / "a/b", {**SETTINGS, "losses": 8})
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("")
    with pytest.raises(ValueError, match="holds something else than a bench"):
        Store.open(tmp_path / "full", SETTINGS)
    with pytest.raises(ValueError, match="is a file"):
        Store.open(tmp_path / "full/thesis.txt", SETTINGS)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_a_part_is_measured_and_those_of_before_are_kept(tmp_path, capfd):
    out = tmp_path / "out"
    words = ["bench", TINY, "--quick", "--out", str(out)]
    assert cli.main([*words, "--only", "overhead"]) == 0
    said = capfd.readouterr()
    assert "part 1 of 1: tests/recipes/tiny.py overhead" in said.err
    assert re.search(r"^elastic loop - hand-written loop.* 3 pairs of blocks\)$", said.out, re.M)
    report = json.loads((out / "bench.json").read_text())
    assert len(report["recipes"][0]["parts"]["overhead"]["pairs"]) == 3
    assert ElementTree.parse(out / "bench.svg") is not None and not (out / "compiled").exists()
    # An interrupted bench has some parts; with all of them, there is nothing to be measured.
    for part, found in all_parts().items():
        if part != "overhead":
            Store(out).keep(TINY, part, found)
    before = (out / "bench.json").read_bytes()
    assert cli.main(words) == 2
    assert "holds all of that already" in capfd.readouterr().err
    assert (out / "bench.json").read_bytes() == before
    (out / "parts/tests%2Frecipes%2Ftiny.py tokens-12.json").unlink()
    assert cli.main(words) == 0
    said = capfd.readouterr()
    assert "12 parts kept from before" in said.err and "part 1 of 1" in said.err
    assert "median 1.50, p95 1.50, worst 1.50 steps" in said.out
    assert re.search(r"R=12 .* not possible: global_batch=8 cannot be split", said.out)
    assert cli.main(["bench", "--from", str(out)]) == 0
    assert said.out.startswith(capfd.readouterr().out.rstrip())


@pytest.mark.soak
def test_every_part_is_measured(tmp_path, capfd):
    assert cli.main(["bench", TINY, "--quick", "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out/bench.json").read_text())
    (one,) = report["recipes"]
    assert set(one["parts"]) == set(PARTS)
    unclear = [row["figure"] for row in one["rows"] if row["must"] and row["reached"] is None]
    assert unclear == ["tokens per CPU-s, one of four gone, R=12"], "8 examples in 12 replicas"


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--quick"], "no RECIPE: name one, such as"),
        ([TINY, TINY], "is named twice"),
        ([TINY, "--only", "speed"], "--only speed: use live-2, "),
        ([TINY, "--losses", "3"], "--losses 3: use 4 to 10000"),
        ([TINY, "--losses", "x"], "--losses x: use 4 to 10000"),
        (["absent.py"], "absent.py does not exist"),
        ([f"{TINY}:unsplittable"], "global_batch=9 cannot be split"),
        ([TINY, "--from", "runs"], "measures nothing"),
        (["--from", "absent"], "is no report of a bench"),
        ([TINY, "--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(words, remedy, capsys, tmp_path):
    out = [] if "--from" in words else ["--out", str(tmp_path / "out")]
    assert cli.main(["bench", *words, *out]) == 2
    said = capsys.readouterr()
    assert said.out == "" and remedy in said.err and len(said.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_help_tells_the_parts_and_what_is_written(capsys):
    assert cli.main(["bench", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in PARTS)
    assert "bench.json" in told and "exit status" in told
    assert cli.main(["--help"]) == 0
    assert "elastix bench RECIPE" in capsys.readouterr().out
