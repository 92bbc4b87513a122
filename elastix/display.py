"""How a run is shown: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from elastix import report
from elastix.evaluation import EvalRow
from elastix.machine import Event, Restoring, State, Training, Waiting
from elastix.metrics import Row
from elastix.recoveries import Recovery
from elastix.run import RunInfo, Summary

_SECONDS_BETWEEN_LINES = 10.0


def open_display(name: str) -> TerminalDisplay | PlainDisplay:
    """The display that fits what standard output is; `name` is the run's.

    Both are context managers, which leave the terminal as it was.
    """
    console = Console(highlight=False, soft_wrap=True)
    return TerminalDisplay(name, console) if console.is_terminal else PlainDisplay(name, console)


class PlainDisplay:
    """A line about every twentieth of the run or 10 seconds, and blocks: no escape sequences."""

    def __init__(self, name: str, console: Console):
        self.has_started = False
        """Whether training began: what fails before is bad input."""
        self._name, self._console = name, console
        self._last_line, self._last_step = time.monotonic(), 0
        self._said = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        pass

    def started(self, run: RunInfo) -> None:
        self.has_started = True
        self._run, self._pace = run, report.Pace(run)
        self._block(report.start_block(run, self._name))

    def step(self, row: Row) -> None:
        self._pace.add(row)
        if self._is_due(row):
            self._last_line, self._last_step = time.monotonic(), row.step
            self._print(report.step_line(row, self._run, self._pace))

    def evaluated(self, row: EvalRow) -> None:
        self._print(report.eval_line(row))

    def event(self, before: State, event: Event, after: State) -> None:
        line = report.event_line(event, after)
        if line:
            self._print(line)
        if isinstance(after, Waiting):
            up = (len(after.ledger.up), after.want)
            self._say(
                report.waiting_line(after, self._run.recipe.policy, event.at), key=f"waiting {up}"
            )
        else:
            self._said = ""

    def recovered(self, recovery: Recovery) -> None:
        self._block(report.recovery_block(recovery, self._run.num_slices))

    def finished(self, summary: Summary) -> None:
        self._block(report.summary_block(summary, self._run, unigram_loss(self._run)))

    def _is_due(self, row: Row) -> bool:
        total = self._run.recipe.num_steps
        if row.step == total or row.step - self._last_step >= max(1, total // 20):
            return True
        return time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES

    def _say(self, line: str, key: str) -> None:
        """Print a line once, until something else is said."""
        if key != self._said:
            self._said = key
            self._print(line)

    def _block(self, block: report.Block) -> None:
        self._print(f"--- {block.title} ---", *block.lines())

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(Text(line))
        self._console.file.flush()


class TerminalDisplay:
    """One live line, and a block for the start, each recovery and the end."""

    def __init__(self, name: str, console: Console):
        self.has_started = False
        """Whether training began: what fails before is bad input."""
        self._name, self._console = name, console
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
            refresh_per_second=4,
        )
        self._task: TaskID | None = None
        self._steps = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, run: RunInfo) -> None:
        self.has_started = True
        self._run, self._pace = run, report.Pace(run)
        self._block(report.start_block(run, self._name), "blue")
        total = run.recipe.num_steps
        self._task = self._progress.add_task("", total=total, text="compiling")

    def step(self, row: Row) -> None:
        self._pace.add(row)
        self._steps = report.step_text(row, self._run, self._pace)
        self._live(self._steps, completed=row.step)

    def evaluated(self, row: EvalRow) -> None:
        self._console.print(Text(report.eval_line(row)))

    def event(self, before: State, event: Event, after: State) -> None:
        line = report.event_line(event, after)
        if line:
            self._console.print(Text(line, style="yellow"))
        if isinstance(after, Waiting):
            self._live(report.waiting_line(after, self._run.recipe.policy, event.at))
        elif isinstance(after, Restoring):
            self._live(report.restoring_line(after))
        elif isinstance(after, Training) and (note := report.progress_note(event)) is not None:
            self._live(f"{self._steps}  {note}")

    def recovered(self, recovery: Recovery) -> None:
        color = "yellow" if recovery.lost else "green"
        self._block(report.recovery_block(recovery, self._run.num_slices), color)
        self._live(self._steps)

    def finished(self, summary: Summary) -> None:
        self._progress.stop()
        block = report.summary_block(summary, self._run, unigram_loss(self._run))
        self._block(block, "green" if summary.exit_status == 0 else "red")

    def _live(self, text: str, **fields: Any) -> None:
        if self._task is not None:
            self._progress.update(self._task, text=text, **fields)

    def _block(self, block: report.Block, color: str) -> None:
        table = Table.grid(padding=(0, 2))
        for name, text in block.fields:
            table.add_row(Text(name, style="dim"), Text(text))
        panel = Panel(table, title=Text(block.title), title_align="left", border_style=color)
        self._console.print(panel, soft_wrap=False)


def unigram_loss(run: RunInfo) -> float | None:
    """The loss of knowing how frequent each token is, if the recipe's data can tell."""
    loss = getattr(run.recipe.data, "unigram_loss", None)
    return loss() if loss else None
