"""A client's programs: compiled once by one slice, loaded where they run, run when asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastix.testing.local_pathways import messages, runtime
from elastix.testing.local_pathways.blobs import Blob
from elastix.testing.local_pathways.cluster import Cluster, Gang
from elastix.testing.local_pathways.failures import Code, Failure
from elastix.testing.local_pathways.futures import Future, settle
from elastix.testing.local_pathways.messages import Compiled, Key
from elastix.testing.local_pathways.shardings import Sharding

Assignment = tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Program:
    """A compiled program, and where it is loaded: (slice, generation, gang)."""

    key: Key
    executable: Blob
    compiled: Compiled
    options: bytes
    assignment: Assignment
    loaded: dict[tuple[int, int, int | None], Future[Any]] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[int, ...]:
        """In the order of shardings: partition by partition."""
        return tuple(i for partition in zip(*self.assignment, strict=True) for i in partition)

    def forget(self, is_there: Callable[[int, int, int | None], bool]) -> None:
        """Forget where it was loaded and will not run again."""
        self.loaded = {place: of for place, of in self.loaded.items() if is_there(*place)}

    def sharding(self, index: int) -> Sharding:
        """Of a result."""
        told, kind = self.compiled.result_shardings, self.compiled.results[index].memory_kind
        op = told[index] if told is not None else b""
        return Sharding(self.devices, kind, op, is_replicated=told is None)


class Launcher:
    """Runs programs on the slices of their devices."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster

    def run(
        self, program: Program, arguments: Sequence[Key], results: Sequence[Key], donated: set[Key]
    ) -> Future[None]:
        """When all slices have run it; DATA_LOSS if one is lost before.

        All slices of a gang get the programs of all clients in one order, so none waits for a
        program that another would run first.
        """
        slices = self._cluster.topology.slices_of(program.devices)
        with self._cluster.in_order():
            gang = self._cluster.gang(slices) if len(slices) > 1 else None
            number = None if gang is None else gang.number
            command = messages.Execute(
                program.key, number, tuple(arguments), tuple(results), tuple(donated)
            )
            runs = []
            for slice in slices:
                self._load(program, slice, number)
                runs.append(self._cluster.ask(slice, command))
        return self._verdict(runs, slices, gang)

    def _load(self, program: Program, slice: int, gang: int | None) -> None:
        """Once for each process and gang; whether it succeeds, the programs that run will tell."""
        place = (slice, self._cluster.generation(slice), gang)
        if place not in program.loaded:
            program.forget(self._cluster.is_there)
            command = messages.Load(
                program.key,
                gang,
                program.options,
                program.assignment,
                program.compiled.parameter_shapes,
            )
            loaded = self._cluster.ask(slice, command, [program.executable])
            program.loaded[place] = loaded

    def _verdict(
        self, runs: Sequence[Future[Any]], slices: tuple[int, ...], gang: Gang | None
    ) -> Future[None]:
        """A slice that lost its peer sees a broken connection, or waits: who is dead is known by
        the server, and is the answer whatever the others say."""
        verdict: Future[None] = Future()

        def one(run: Future[Any]) -> None:
            error = run.exception()
            if _is_loss(error):
                settle(verdict, error=error)
            elif all(run.done() for run in runs):
                errors = [error for run in runs if (error := run.exception()) is not None]
                self._judge(sorted(errors, key=_blame), gang, verdict)
            elif error is not None and gang is not None and not runtime.is_of_peer(error):
                self._cluster.leave(slices)  # the others wait for this one in vain

        for run in runs:
            run.add_done_callback(one)
        return verdict

    def _judge(
        self, errors: Sequence[BaseException], gang: Gang | None, verdict: Future[None]
    ) -> None:
        """A peer may have done its part, and died before the others had it."""
        if not errors:
            settle(verdict)
        elif gang is None or not runtime.is_of_peer(errors[0]):
            settle(verdict, error=errors[0])
        else:
            suspicion = self._cluster.suspect(gang.generations)
            suspicion.add_done_callback(
                lambda of: settle(verdict, error=of.exception() or errors[0])
            )


def _is_loss(error: BaseException | None) -> bool:
    lost = (Code.DATA_LOSS, Code.DEADLINE_EXCEEDED)
    return isinstance(error, Failure) and error.code in lost


def _blame(error: BaseException) -> tuple[bool, bool]:
    """Causes before their consequences."""
    left = isinstance(error, Failure) and error.code is Code.CANCELLED
    return left, runtime.is_of_peer(error)
