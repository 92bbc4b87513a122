"""The slices' processes: started, watched by heartbeat, asked, lost and started again.

Threads: one that supervises (it alone starts processes and keeps the time), and for each process
one that writes to it and one that reads from it. Membership changes under one lock, whoever asks.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from elastix.testing.local_pathways import membership, messages, runtime
from elastix.testing.local_pathways.blobs import Blob
from elastix.testing.local_pathways.failures import Code, Failure
from elastix.testing.local_pathways.forks import ForkServer
from elastix.testing.local_pathways.futures import Future, failed, settle
from elastix.testing.local_pathways.membership import Decision, Member, Phase, Rules
from elastix.testing.local_pathways.process import Process, is_stopped
from elastix.testing.local_pathways.topology import Topology

Told = Callable[[str, int, str], None]
"""Called with what happened ("lost", "joined"), the slice, and the reason."""


class Gang(NamedTuple):
    """Slices that run programs together: its number, and the generation of each slice."""

    number: int
    generations: dict[int, int]


class Suspicion(NamedTuple):
    """Processes of which one may be gone, until when to wait for that, and who waits."""

    generations: dict[int, int]
    until: float
    cleared: Future[None]


class Cluster:
    """All slices."""

    def __init__(
        self,
        topology: Topology,
        rules: Rules,
        log_dir: Path | None,
        compile_cache: Path | None,
        told: Told,
    ):
        self.topology, self._rules, self._told = topology, rules, told
        self._forks, self._compile_cache = ForkServer(log_dir), compile_cache
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        now = time.monotonic()
        slices = range(topology.num_slices)
        self._members = {i: membership.starting(now) for i in slices}
        self._processes: dict[int, Process] = {}
        self._gangs: dict[tuple[int, ...], Gang] = {}
        self._suspicions: list[Suspicion] = []
        self._services: dict[int, tuple[dict[int, int], Any]] = {}
        """By gang: the generations of slices that may be connected, and the service."""
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._all_up = threading.Event()
        for i in slices:
            self._todo.put(lambda i=i: self._start(i))  # type: ignore[misc]
        self._todo.put(self._start_compiler)
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()

    # What is there.

    @property
    def pids(self) -> dict[int, int | None]:
        """The process of each slice, None where there is none."""
        with self._lock:
            return {i: self._pid(i) for i in self._members}

    def num_bytes(self) -> dict[int, int | None]:
        """What the arrays of each slice take; None where it is not there or stopped."""
        with self._lock:
            asked = {i: self.ask(i, messages.Usage()) for i in self.up() if not self._stopped(i)}
        told = {i: future.result()[0] for i, future in asked.items() if not future.exception()}
        return {i: told[i][1] if i in told else None for i in self._members}

    def _stopped(self, slice: int) -> bool:
        return is_stopped(self._pid(slice))

    def wait_until_up(self, timeout: float) -> bool:
        """Whether all slices serve within `timeout` seconds."""
        return self._all_up.wait(timeout)

    def generation(self, slice: int) -> int:
        """The number of the slice's present process."""
        return self._members[slice].generation

    def check(self, generations: Mapping[int, int]) -> None:
        """Whether what was made by these processes is still there.

        Raises:
            Failure: DATA_LOSS, and which slice.
        """
        with self._lock:
            for slice, generation in generations.items():
                self._notice(slice)
                member = self._members[slice]
                if member.phase is not Phase.UP or member.generation != generation:
                    raise _lost(slice)

    def suspect(self, generations: Mapping[int, int]) -> Future[None]:
        """A peer saw a connection break: DATA_LOSS as soon as one of these processes is known to
        be gone, a value if after a heartbeat none is."""
        suspicion = Suspicion(dict(generations), time.monotonic() + self._rules.heartbeat, Future())
        with self._lock:
            self._suspicions.append(suspicion)
        self._todo.put(self._look_into)
        return suspicion.cleared

    def _look_into(self) -> None:
        with self._lock:
            suspicions, self._suspicions = self._suspicions, []
            for suspicion in suspicions:
                try:
                    self.check(suspicion.generations)
                except Failure as failure:
                    settle(suspicion.cleared, error=failure)
                    continue
                if time.monotonic() >= suspicion.until:
                    settle(suspicion.cleared)
                else:
                    self._suspicions.append(suspicion)

    def up(self) -> list[int]:
        """The slices that serve."""
        with self._lock:
            return [i for i, member in self._members.items() if member.phase is Phase.UP]

    # Asking.

    def ask(self, slice: int, command: Any, blobs: Sequence[Blob] = ()) -> Future[Any]:
        """The answer of a slice, which is a value and the blobs that came with it.

        Commands reach a slice in the order of the calls; the call itself never waits.
        """
        with self._lock:
            self._notice(slice)
            if self._members[slice].phase is not Phase.UP:
                return failed(_lost(slice))
            return self._processes[slice].ask(command, blobs)

    def compile(self, command: messages.Compile, artifact: Blob) -> Future[Any]:
        """The answer of the process that compiles."""
        with self._lock:
            return self._compiler.ask(command, [artifact])

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """What is asked of several slices within is in the same order on all of them."""
        with self._lock:
            yield

    # Gangs.

    def gang(self, slices: tuple[int, ...]) -> Gang:
        """The gang of these slices as they are now; a new one if a slice is not who it was.

        Raises:
            Failure: DATA_LOSS if a slice is not there.
        """
        with self._lock:
            generations = {i: self.generation(i) for i in slices}
            self.check(generations)
            gang = self._gangs.get(slices)
            if gang is None:
                gang = self._gangs[slices] = Gang(next(self._numbers), generations)
                port, service = runtime.start_service(len(slices))
                self._services[gang.number] = dict(generations), service
                for i in slices:
                    self._processes[i].ask(messages.JoinGang(gang.number, port, slices))
            return gang

    def is_there(self, slice: int, generation: int, gang: int | None) -> bool:
        """Whether what was loaded into a process, for itself or for a gang, can still run there."""
        gangs = (None, *(of.number for of in self._gangs.values()))
        return self.generation(slice) == generation and gang in gangs

    def leave(self, slices: tuple[int, ...]) -> None:
        """End a gang, so that none of its slices waits for another."""
        with self._lock:
            if slices not in self._gangs:
                return
            gang = self._gangs.pop(slices).number
            for i in slices:
                if self._members[i].phase is Phase.UP:
                    left = self._processes[i].ask(messages.LeaveGang(gang))
                    left.add_done_callback(partial(self._parted, gang, i))

    def _parted(self, gang: int, slice: int, left: Future[Any]) -> None:
        with self._lock:
            if gang in self._services and left.exception() is None:
                self._services[gang][0].pop(slice)
                self._end_services()

    def _end_services(self) -> None:
        """Those of gangs that were left, or died, by all their slices."""
        self._services = {n: of for n, of in self._services.items() if not self._is_over(of[0])}

    # Giving and taking.

    def give_back(self, slice: int) -> None:
        """Start the slice's process again, with empty memory.

        Raises:
            ValueError: it is there.
        """
        with self._lock:
            is_up = self._members[slice].phase is Phase.UP
            if is_up and self._pid(slice) is None:  # its end is known before the link says so
                self._happened(slice, membership.Exited(noticed=True))
            try:
                self._happened(slice, membership.Returned())
            except ValueError as error:
                raise ValueError(f"slice {slice}: {error}") from None

    def close(self) -> None:
        """End all processes."""
        self._todo.put(None)
        self._supervisor.join()
        with self._lock:
            for process in (self._compiler, *self._processes.values()):
                process.end()
            self._forks.end()

    # Membership: everything that happens comes by here.

    def _happened(self, slice: int, event: membership.Event, generation: int | None = None) -> None:
        """`generation` names the process it happened to; an older one matters no more."""
        with self._lock:
            member = self._members[slice]
            if generation is not None and generation != member.generation:
                return
            now = time.monotonic()
            self._members[slice], decisions = membership.transition(member, event, now, self._rules)
            for decision in decisions:
                self._carry_out(decision, slice, member)
        if all(m.phase is Phase.UP for m in self._members.values()):
            self._all_up.set()

    def _carry_out(self, decision: Decision, slice: int, member: Member) -> None:
        match decision:
            case Decision.LOSE_ENDED:
                self._lose(slice, _lost(slice), "its process ended")
            case Decision.LOSE_SILENT:
                late = f"slice {slice}: no heartbeat for {self._rules.heartbeat:g} s"
                self._lose(slice, Failure(Code.DEADLINE_EXCEEDED, late), "no heartbeat")
            case Decision.KILL:
                self._processes[slice].end()
            case Decision.START:
                self._todo.put(lambda: self._start(slice))
            case Decision.WELCOME:
                self._told("joined", slice, f"pid {self._pid(slice)}")

    def _notice(self, slice: int) -> None:
        self._happened(slice, membership.Asked())

    def _lose(self, slice: int, failure: Failure, reason: str) -> None:
        for slices in [slices for slices in self._gangs if slice in slices]:
            self.leave(slices)
        self._end_services()
        self._processes[slice].fail(failure)
        self._told("lost", slice, reason)

    def _is_over(self, generations: dict[int, int]) -> bool:
        """Whether none of these processes is there: one that is would end with its service."""
        alive = (Phase.UP, Phase.SILENT)
        return all(
            self._members[i].generation != generation or self._members[i].phase not in alive
            for i, generation in generations.items()
        )

    # Processes.

    def _supervise(self) -> None:
        tick = min(max(self._rules.heartbeat / 5, 0.02), 1.0)
        due = time.monotonic() + tick
        while True:
            try:
                work = self._todo.get(timeout=max(due - time.monotonic(), 0.0))
            except queue.Empty:
                due = time.monotonic() + tick
                self._beat()
            else:
                if work is None:
                    return
                work()

    def _beat(self) -> None:
        for slice in self._members:
            self._happened(slice, membership.Ticked(self._stopped(slice)))
            self._ping(slice)
        self._look_into()

    def _ping(self, slice: int) -> None:
        with self._lock:
            process, member = self._processes.get(slice), self._members[slice]
            if process is not None and member.phase in (Phase.UP, Phase.SILENT):
                generation = member.generation
                process.ping(lambda: self._happened(slice, membership.Heard(), generation))

    def _start(self, slice: int) -> None:
        with self._lock:
            generation = self._members[slice].generation
            self._processes[slice] = process = self._make("worker", f"slice{slice}", str(slice))
        process.listen(
            lambda: self._happened(slice, membership.Joined(), generation),
            lambda is_busy: self._happened(slice, membership.Exited(is_busy), generation),
        )

    def _start_compiler(self) -> None:
        cache = [str(self._compile_cache)] if self._compile_cache else []
        with self._lock:
            self._compiler = process = self._make("compiler", "compiler", *cache)

        def ended(is_busy: bool) -> None:
            process.fail(Failure(Code.INTERNAL, "the compiler's process ended: see its log"))
            self._todo.put(self._start_compiler)

        process.listen(lambda: None, ended)

    def _make(self, module: str, name: str, *arguments: str) -> Process:
        size = self.topology.num_slices, self.topology.devices_per_slice
        return Process(*self._forks.start(module, name, [*map(str, size), *arguments]))

    def _pid(self, slice: int) -> int | None:
        process = self._processes.get(slice)
        return process.pid if process else None


def _lost(slice: int) -> Failure:
    return Failure(Code.DATA_LOSS, f"slice {slice} was lost, with all that was in its memory")
