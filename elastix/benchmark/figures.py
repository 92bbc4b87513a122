"""The figures of a bench, from what its parts measured: arithmetic, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from elastix.benchmark.history import percentile

Found = dict[str, Any]
"""What a part measured, or why it did not: {"not_possible": ...} or {"failed": ...}."""

LOOKBACKS = ("live-2", "live-1", "host-2", "host-1")
FASTER_THAN_VENDOR, FASTER_THAN_RESTART = 8, 50
STEP_MICROSECONDS, STEP_SHARE = 100, 0.01
REGROW_STEPS = 3
SNAPSHOT_SHARES = {"every 10": 0.01, "every step": 0.05}
TOKEN_SHARE = 0.97
NOT_MEASURED = "not measured"
SMALL_ARRAYS = 0.05
"""Of a copy of the state: batches, results and canaries are held as well."""


@dataclass(frozen=True)
class Row:
    """One figure: what it is, what it must reach, what was measured, and whether that is reached;
    None where nothing must be, or nothing was measured."""

    figure: str
    must: str
    measured: str
    reached: bool | None = None

    @property
    def there(self) -> bool:
        """Whether a part measured it, or tried to."""
        return self.measured != NOT_MEASURED


Compute = Callable[..., tuple[str, bool | None]]
"""(what was measured, in words; whether it is reached)"""


def rows(parts: dict[str, Found]) -> list[Row]:
    """Every figure of a recipe. A part that is not there is said to be not measured."""
    make = partial(_row, parts)
    return [
        make("elastic loop - hand-written loop, a step", "<= 100 us or 1%", overhead, "overhead"),
        make("  to place a batch", "", by_both("put"), "overhead"),
        make("  CPU time of the loop's thread, a step", "", by_both("cpu"), "overhead"),
        *(make(*_recovery(part), part) for part in LOOKBACKS),
        make("programs compiled after a loss, regrow, leave", "0", programs, *LOOKBACKS),
        *(make(f"steps done again, {_words(p)}", _again(p), again, p) for p in LOOKBACKS),
        make("steps done again at a regrow, a leave", "0", voluntary, *LOOKBACKS),
        *(make(f"steps abandoned, {_words(p)}", f"<= {p[-1]}", abandoned, p) for p in LOOKBACKS),
        *(make(f"pause of a regrow, {_words(p)}", "<= 3 steps", pause, p) for p in LOOKBACKS),
        *(
            make(
                f"slower by a host snapshot {every}", f"<= {most:.0%}", slowdown(every), "snapshots"
            )
            for every, most in SNAPSHOT_SHARES.items()
        ),
        make("tokens per CPU-s, one of four gone, R=12", ">= 0.97", tokens, "tokens-12"),
        make("tokens per CPU-s, one of four gone, R=4", ">= 0.97 x share", tokens, "tokens-4"),
        *(
            make(f"committed / dispatched, {_words(p)}", f">= {_kept(p):.3f}", kept, p)
            for p in ("live-2", "live-1")
        ),
        *(
            make(
                f"copies of the state beside it, {_words(p)}", f"<= {_copies(p)}", held(p), "memory"
            )
            for p in ("live-2", "live-1", "host-2")
        ),
        make("the vendor's loop, cache off", "", vendor, "vendor-off"),
        make("the vendor's loop, cache on", "", vendor, "vendor-on"),
        make("  elastix is faster, cache off", ">= 8 times", faster(8), "live-2", "vendor-off"),
        make("  elastix is faster, cache on", "", faster(None), "live-2", "vendor-on"),
        make("killed and restarted, cache off", "", restart, "restart-off"),
        make("killed and restarted, cache on", "", restart, "restart-on"),
        make("  elastix is faster, cache off", ">= 50 times", faster(50), "live-2", "restart-off"),
        make("  elastix is faster, cache on", "", faster(None), "live-2", "restart-on"),
    ]


def _row(parts: dict[str, Found], figure: str, must: str, compute: Compute, *needed: str) -> Row:
    there = [parts[name] for name in needed if name in parts]
    for found in there:
        for why in ("failed", "not_possible"):
            if why in found:
                reached = False if why == "failed" and must else None
                return Row(figure, must, f"{why.replace('_', ' ')}: {found[why]}", reached)
    # What is made of several parts is made of those there are, but a comparison needs both.
    if not there or (len(needed) == 2 and len(there) < 2):
        return Row(figure, must, NOT_MEASURED)
    measured, reached = compute(*there)
    return Row(figure, must, measured, reached if must else None)


def _words(part: str) -> str:
    lookback, _, inflight = part.partition("-")
    return f"{lookback}, inflight {inflight}"


# --- the elastic loop -------------------------------------------------------------------------


def overhead(found: Found) -> tuple[str, bool | None]:
    """Medians of the differences between neighbouring blocks."""
    differences = [one - other for one, other in found["pairs"]]
    step = median(other for _, other in found["pairs"])
    middle = median(differences)
    low, high = (percentile(differences, share) * 1e6 for share in (0.25, 0.75))
    told = (
        f"{middle * 1e6:+.0f} us, {middle / step:+.1%} of {_seconds(step)} "
        f"(quartiles {low:+.0f} to {high:+.0f} us, {len(differences)} pairs of blocks)"
    )
    return told, middle * 1e6 <= STEP_MICROSECONDS or middle / step <= STEP_SHARE


def by_both(what: str) -> Compute:
    """Something that elastix and the loop by hand both do, which load of the machine does not
    make longer as it does a step."""

    def compute(found: Found) -> tuple[str, bool | None]:
        ours, by_hand = (found[what][name] * 1e6 for name in ("elastix", "by hand"))
        return f"{ours:.0f} us; by hand {by_hand:.0f} us", None

    return compute


def slowdown(every: str) -> Compute:
    """By how much snapshots make steps longer: the median over rounds."""

    def compute(found: Found) -> tuple[str, bool | None]:
        ratios = [b / a - 1 for a, b in zip(found["none"], found[every], strict=True)]
        low, high = (percentile(ratios, share) for share in (0.25, 0.75))
        told = f"{median(ratios):+.1%} (quartiles {low:+.1%} to {high:+.1%}, {len(ratios)} rounds)"
        return told, median(ratios) <= SNAPSHOT_SHARES[every]

    return compute


# --- recovery ---------------------------------------------------------------------------------


def _recovery(part: str) -> tuple[str, str, Compute]:
    most = int(part[-1]) + (1.5 if part.startswith("live") else 2.5)
    return f"loss known to next commit, {_words(part)}", f"<= {most} steps", _known(most)


def _known(most: float) -> Compute:
    def compute(found: Found) -> tuple[str, bool | None]:
        losses, steady = found["losses"], _steady(found)
        ratios = [loss["known"] / steady[loss["slices"]] for loss in losses]
        new = median(loss["new"] / steady[loss["slices"]] for loss in losses)
        told = f"{_spread(ratios)} of {_seconds(_usual(losses, steady))}, {len(losses)} losses"
        if any(loss["redone"] for loss in losses):
            told += f"; {new:.1f} to a step never done before"
        return told, median(ratios) <= most

    return compute


def _steady(found: Found) -> dict[int, float]:
    return {int(slices): seconds for slices, seconds in found["steady"].items()}


def _usual(changes: Sequence[Found], steady: dict[int, float]) -> float:
    return median(steady[change["slices"]] for change in changes)


def _spread(values: Sequence[float]) -> str:
    middle, worst = median(values), max(values)
    return f"median {middle:.2f}, p95 {percentile(values, 0.95):.2f}, worst {worst:.2f} steps"


def _every_change(found: Iterable[Found], *kinds: str) -> list[Found]:
    return [change for one in found for kind in kinds for change in one[kind]]


def programs(*found: Found) -> tuple[str, bool | None]:
    """What was asked of XLA, counting what JAX's persistent cache would have had."""
    counts = {
        kind: [change["programs"] for change in _every_change(found, kind)]
        for kind in ("losses", "regrows", "leaves")
    }
    told = ", ".join(f"{sum(each)} in {len(each)} {kind}" for kind, each in counts.items())
    return f"{told}, every set visited before", not any(map(sum, counts.values()))


def again(found: Found) -> tuple[str, bool | None]:
    redone = [loss["redone"] for loss in found["losses"]]
    host = max(redone) > 0
    told = f"at most {max(redone)}, median {median(redone):g}" if host else "0"
    return f"{told}, {len(redone)} losses", max(redone) <= _most_again(found)


def _most_again(found: Found) -> int:
    return found["snapshot_every"] if found["lookback"] == "host" else 0


def _again(part: str) -> str:
    return "0" if part.startswith("live") else "<= k = 10"


def voluntary(*found: Found) -> tuple[str, bool | None]:
    regrows, leaves = (_every_change(found, kind) for kind in ("regrows", "leaves"))
    lost = sum(change["redone"] + change["abandoned"] for change in [*regrows, *leaves])
    return f"{lost} redone or abandoned, {len(regrows)} regrows, {len(leaves)} leaves", lost == 0


def abandoned(found: Found) -> tuple[str, bool | None]:
    counts = [loss["abandoned"] for loss in found["losses"]]
    return f"at most {max(counts)}, {len(counts)} losses", max(counts) <= found["inflight"]


def pause(found: Found) -> tuple[str, bool | None]:
    regrows, steady = found["regrows"], _steady(found)
    ratios = [change["pause"] / steady[change["slices"]] for change in regrows]
    told = f"{_spread(ratios)} of {_seconds(_usual(regrows, steady))}, {len(regrows)} regrows"
    return told, median(ratios) <= REGROW_STEPS


def _kept(part: str, period: int = 15) -> float:
    return period / (period + int(part[-1])) - 0.01


def kept(found: Found) -> tuple[str, bool | None]:
    """Of the steps dispatched while slices were lost, the share that was committed."""
    within = found["while_losing"]
    share = within["committed"] / within["dispatched"]
    told = (
        f"{share:.3f}: {within['committed']} / {within['dispatched']} steps, {within['losses']} "
        f"losses, one each {found['period']} steps"
    )
    return told, share >= _kept(f"live-{found['inflight']}", found["period"])


# --- tokens and memory ------------------------------------------------------------------------


def tokens(found: Found) -> tuple[str, bool | None]:
    """A step has the same tokens on any number of slices, so CPU seconds compare."""
    cpu = {int(slices): median(each) for slices, each in found["cpu"].items()}
    useful = {int(slices): share for slices, share in found["useful"].items()}
    (few, many), stretches = sorted(cpu), sum(map(len, found["cpu"].values()))
    share, padding = cpu[many] / cpu[few], useful[few] / useful[many]
    told = (
        f"{share:.3f}; {found['tokens'] / cpu[many]:.0f} and {found['tokens'] / cpu[few]:.0f} "
        f"tokens per CPU-s on {many} and {few}, {stretches} stretches; useful share {padding:.0%}"
    )
    return told, share >= TOKEN_SHARE * padding


def _copies(part: str) -> int:
    return int(part[-1]) if part.startswith("live") else 0


def held(part: str) -> Compute:
    def compute(found: Found) -> tuple[str, bool | None]:
        extra = found[part]["most"] / found["one_copy"] - 1
        told = f"{extra:.2f} at most, of {found['one_copy'] / 1e6:.1f} MB on a slice"
        return told, extra <= _copies(part) + SMALL_ARRAYS

    return compute


# --- what others take -------------------------------------------------------------------------


def vendor(found: Found) -> tuple[str, bool | None]:
    seconds = found["losses"]
    steps = median(seconds) / min(_steady(found).values())
    where = ", ".join(f"{name} {_seconds(s)}" for name, s in found["phases"].items())
    return (
        f"median {_seconds(median(seconds))} from loss known to next commit, {steps:.1f} steps, "
        f"worst {_seconds(max(seconds))}, {len(seconds)} losses: {where}"
    ), None


def restart(found: Found) -> tuple[str, bool | None]:
    seconds = found["seconds"]
    times = f"{len(seconds)} times"
    return f"median {_seconds(median(seconds))}, worst {_seconds(max(seconds))}, {times}", None


def faster(target: int | None) -> Compute:
    """How many times as long the other takes, from the loss being known, or from the kill, to the
    next committed step."""

    def compute(ours: Found, other: Found) -> tuple[str, bool | None]:
        known = median(loss["known"] for loss in ours["losses"])
        theirs = median(other.get("losses") or other["seconds"])
        times = theirs / known
        told = f"{times:.1f} times: {_seconds(known)} (live, inflight 2) against {_seconds(theirs)}"
        return told, None if target is None else times >= target

    return compute


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
