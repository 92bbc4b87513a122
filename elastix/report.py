"""PURE: what a person reads of a run, as lines of text."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from elastix.evaluation import EvalRow
from elastix.machine import (
    DataFailed,
    Event,
    Failed,
    Policy,
    PreemptionNoticed,
    Prepared,
    RestoreFailed,
    Restoring,
    Saved,
    SaveFailed,
    Source,
    State,
    StepStuck,
    Waiting,
)
from elastix.metrics import Row
from elastix.recoveries import PHASES, Recovery
from elastix.wording import count, duration, names, plural, size

if TYPE_CHECKING:
    from elastix.run import RunInfo, Summary

_RECENT = 20
_SOURCES = {
    "live": "the surviving slices' own memory",
    "host": "a snapshot in host memory",
    "disk": "a checkpoint on disk",
    "seed": "the seed, at step 0",
}


@dataclass(frozen=True)
class Block:
    """A title and, below it, named texts."""

    title: str
    fields: tuple[tuple[str, str], ...]

    def lines(self) -> list[str]:
        """The fields, one line each."""
        return [f"  {name:<12}{text}" for name, text in self.fields]


# --- at the start -----------------------------------------------------------------------------


def start_block(info: RunInfo, name: str) -> Block:
    """What runs, on what, and from where it goes on."""
    recipe, policy = info.recipe, info.recipe.policy
    most = "all" if policy.max_slices is None else str(policy.max_slices)
    snapshot = f"the last host snapshot (one every {policy.snapshot_every} steps)"
    lookback = "the last step" if policy.lookback == "live" else snapshot
    policy_text = (
        f"{policy.min_slices} to {most} slices; after a loss go back to {lookback}; "
        f"{_checkpoints(policy)}; "
        f"patience {policy.patience:g} s"
    )
    times = policy.deadlines.items()
    return Block(
        f"{name}: {recipe.num_steps} steps on {info.num_slices} slices "
        f"x {info.devices_per_slice} devices",
        (
            ("state", f"{count(info.num_params)} parameters, {size(info.state_bytes)} in all"),
            ("work", _work(info)),
            ("reduction", _reduction(recipe.reduction)),
            ("policy", policy_text),
            ("deadlines", ", ".join(f"{name} {seconds:g} s" for name, seconds in times)),
            ("run dir", f"{info.run_dir or 'none: nothing is kept'}; {resume_point(info)}"),
        ),
    )


def resume_point(info: RunInfo) -> str:
    """Where the run starts, in words."""
    if not info.checkpoints:
        return "starts anew from step 0"
    newest, last = info.checkpoints[-1], info.recipe.num_steps
    if newest >= last:
        return f"complete already: its checkpoint of step {newest} is the end"
    return f"resumes from its checkpoint of step {newest}"


def _work(info: RunInfo) -> str:
    recipe = info.recipe
    shares = recipe.useful_shares(info.num_slices).items()
    useful = ", ".join(f"{share:.0%} on {slices}" for slices, share in shares)
    return (
        f"{recipe.global_batch} examples a step in R={recipe.num_replicas} logical replicas; "
        f"useful share by number of slices: {useful}"
    )


def _reduction(name: str) -> str:
    same = "the same bits on any number of slices"
    return f"ordered: {same}" if name == "ordered" else f"fast: not {same}"


def _checkpoints(policy: Policy) -> str:
    """When a checkpoint is written, and which are kept."""
    steps, seconds = policy.checkpoint_every, policy.checkpoint_seconds
    due = [f"every {steps} steps"] if steps else []
    due += [f"every {seconds:g} s"] if seconds else []
    when = f"a checkpoint {' and '.join(due) or 'at the end only'}"
    if not policy.keep_best:
        return when
    return f"{when}, the newest {policy.keep_checkpoints} and the best {policy.keep_best} kept"


# --- while it runs ----------------------------------------------------------------------------


class Pace:
    """How fast the last steps went."""

    def __init__(self, info: RunInfo):
        self._info = info
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._rates: deque[float] = deque(maxlen=_RECENT)

    def add(self, row: Row) -> None:
        if row.seconds > 0:
            self._seconds.append(row.seconds)
            devices = row.slices * self._info.devices_per_slice
            self._rates.append(row.tokens / row.seconds / devices)

    @property
    def tokens_per_device(self) -> float:
        """Weighted targets each second on each live device: the median of recent steps."""
        return median(self._rates) if self._rates else 0.0

    def seconds_left(self, step: int) -> float:
        """Until the last step, if no slice is lost or found."""
        left = self._info.recipe.num_steps - step
        return median(self._seconds) * left if self._seconds else math.nan


def step_text(row: Row, info: RunInfo, pace: Pace) -> str:
    """One committed step, without its number."""
    left = pace.seconds_left(row.step)
    return (
        f"loss {row.loss:.4f}  {count(pace.tokens_per_device)} tokens/s/device  "
        f"slices {row.slices}/{info.num_slices}  {duration(left)} left"
    )


def step_line(row: Row, info: RunInfo, pace: Pace) -> str:
    """One committed step."""
    width = len(str(info.recipe.num_steps))
    return f"step {row.step:>{width}}/{info.recipe.num_steps}  {step_text(row, info, pace)}"


def eval_line(row: EvalRow) -> str:
    """One evaluation."""
    metrics = "".join(
        f", {name} {value:.4f}" for name, value in row.metrics.items() if isinstance(value, float)
    )
    examples = plural(row.examples, "example")
    return f"evaluated after step {row.step}: loss {row.loss:.4f}{metrics} ({examples})"


def waiting_line(state: Waiting, policy: Policy, at: float) -> str:
    """That nothing trains, for what, and until when."""
    ledger = state.ledger
    up = f"waiting: {len(ledger.up)} of {len(ledger.slices)} slices are up"
    if len(ledger.up) >= policy.min_slices:
        return f"{up}, goes on with {state.want} or in {duration(max(0.0, state.until - at))}"
    since = at if ledger.below_since is None else ledger.below_since
    left = max(0.0, since + policy.deadline - at)
    return f"{up}, needs {policy.min_slices}, gives up in {duration(left)}"


def restoring_line(state: Restoring) -> str:
    """That the next mesh is being made ready, and from what."""
    source = state.source
    return f"restoring slices {names(state.mesh)} ({source.tier.value}, step {source.step})"


def source_text(source: Source) -> str:
    """A source of a train state, in words."""
    return _source(source.tier.value, source.step)


def _source(tier: str, step: int | None) -> str:
    what = _SOURCES.get(tier, "nowhere")
    return what if tier == "seed" else f"{what}, after step {step}"


def event_line(event: Event, after: State) -> str | None:
    """What a person should know of an event beside steps and recoveries; None: nothing."""
    match event:
        case PreemptionNoticed(slices=slices) if slices:
            left = max(0.0, event.until - event.at)
            return f"{slices_text(sorted(slices))} will be taken away in {left:.3g} s: leaving"
        case PreemptionNoticed():
            return "stopping: the steps in flight are finished and saved (Ctrl-C: stop at once)"
        case SaveFailed():
            return f"the checkpoint of step {event.step} was not written: {event.reason}"
        case RestoreFailed():
            return f"{source_text(event.source)} cannot be used: {event.reason}"
        case DataFailed() if not isinstance(after, Failed):
            return f"the data of step {event.step} are read again: {event.reason}"
        case StepStuck() if not isinstance(after, Failed):
            return f"{event.during} did not finish in time: asking the slices"
    return None


def progress_note(event: Event) -> str | None:
    """What passes in the background, for a line that is written over."""
    match event:
        case Saved():
            return f"checkpoint {event.step}"
        case Prepared():
            return ""
    return None


# --- a recovery -------------------------------------------------------------------------------


def recovery_title(recovery: Recovery) -> str:
    """One line: what happened."""
    if recovery.kind == "loss":
        return f"{slices_text(recovery.lost)} lost after step {recovery.step}"
    if recovery.kind == "corrupt":
        return f"{slices_text(recovery.lost)} left out after step {recovery.step}: wrong bits"
    if recovery.kind == "leave" and not recovery.lost:
        return f"paused for a preemption after step {recovery.step}"
    if recovery.kind == "leave":
        return f"{slices_text(recovery.lost)} left before preemption, after step {recovery.step}"
    if recovery.found:
        return f"{slices_text(recovery.found)} came back after step {recovery.step}"
    return f"{recovery.kind} after step {recovery.step}"


def slices_text(ids: Sequence[int]) -> str:
    """`slice 1`, or `slices 0, 1`."""
    return f"{'slice' if len(ids) == 1 else 'slices'} {names(ids)}"


def recovery_block(recovery: Recovery, num_slices: int) -> Block:
    """What a recovery was and cost; its figures are those of `summary.json`."""
    came_with = [("joined", recovery.found)] if recovery.kind in ("loss", "corrupt") else []
    told = recovery.kind in ("loss", "leave", "corrupt")  # by the title
    went_with = [] if told else [("lost", recovery.lost)]
    cost = (
        f"{plural(recovery.steps_lost, 'step')} lost, "
        f"{recovery.steps_abandoned} in flight abandoned, "
        f"{plural(recovery.compiles, 'program')} compiled"
        f"{', on its way before' if recovery.warming else ''}"
    )
    share = f"{len(recovery.slices)} of {num_slices}"
    return Block(
        f"recovery: {recovery_title(recovery)}",
        (
            ("noticed", " ".join(recovery.cause.split())),
            *((name, slices_text(ids)) for name, ids in came_with + went_with if ids),
            ("state from", _source(recovery.source or "", recovery.resumed_at)),
            ("cost", cost),
            (
                "goes on",
                f"from step {recovery.resumed_at} on slices {names(recovery.slices)} ({share})",
            ),
            ("seconds", seconds_text(recovery)),
        ),
    )


def seconds_text(recovery: Recovery) -> str:
    """Seconds by phase and their sum."""
    phases = [f"{name} {recovery.seconds[name]:.3f}" for name in PHASES]
    return ", ".join([*phases, f"total {recovery.total_seconds:.3f}"])


# --- at the end ---------------------------------------------------------------------------------


def summary_block(summary: Summary, info: RunInfo, unigram_loss: float | None = None) -> Block:
    """How the run ended; the reason of a failure is not among it."""
    consumed, evaluated = summary.consumed, summary.evaluations
    programs = plural(summary.compiles, "program")
    optional = (
        ("final loss", summary.losses and loss_text(summary.losses[-1], unigram_loss)),
        ("evaluated", evaluated and f"{evaluated[-1]['loss']:.4f}, the last of {len(evaluated)}"),
        ("state", summary.state_sha256 and f"sha256 {summary.state_sha256}"),
        (
            "consumed",
            consumed and f"{consumed['examples']} examples, sha256 {consumed['sha256']}",
        ),
        ("recoveries", _recoveries_text(summary.recoveries)),
        ("compiled", f"{programs}, and {summary.compile_cache_hits} from the persistent cache"),
        ("process", f"pid {summary.pid}"),
        ("run dir", info.run_dir and str(info.run_dir)),
        ("not fired", ", ".join(summary.unfired_faults)),
    )
    steps = f"{summary.steps} of {info.recipe.num_steps} steps"
    return Block(
        f"{summary.outcome}: {steps} in {duration(summary.seconds)}",
        tuple((name, text) for name, text in optional if text),
    )


def loss_text(loss: float, unigram_loss: float | None) -> str:
    """The loss, beside that of knowing how often each token occurs and nothing else."""
    if unigram_loss is None:
        return f"{loss:.4f}"
    below = unigram_loss - loss
    where = f"{abs(below):.4f} {'below' if below >= 0 else 'ABOVE'}"
    return f"{loss:.4f}, {where} the {unigram_loss:.4f} of knowing token frequencies alone"


def _recoveries_text(recoveries: Sequence[dict]) -> str:
    if not recoveries:
        return "none"
    kinds = [r["kind"] for r in recoveries]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    redone = sum(r["steps_lost"] for r in recoveries)
    return f"{len(recoveries)} ({counts}); {plural(redone, 'step')} redone in all"
