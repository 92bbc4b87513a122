"""The arrays behind the names of the machine: train states on devices, copies in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import Any

import jax
import numpy as np

from elastix.backends import Backend, Health, slices_of
from elastix.background import wait_for
from elastix.checkpoints import CheckpointError
from elastix.classification import (
    SliceLostError,
    StuckError,
    controller_is_lost,
)
from elastix.compile_cache import Compilation, compiles_of_this_thread
from elastix.leaf_hash import agreed
from elastix.machine import (
    Done,
    Failed,
    Policy,
    Slices,
    Source,
    Starting,
    State,
    Tier,
    named_snapshots,
    names_train_state,
)
from elastix.program import Batch, Program
from elastix.progress import Progress
from elastix.saver import Saver
from elastix.snapshots import Copying, HostSnapshot
from elastix.train_state import Leaves


@dataclass(frozen=True)
class _Snapshot:
    """A host snapshot on its way, and the hashes that each slice of `mesh` computes for it."""

    step: int
    mesh: Slices
    hashes: dict[str, Any]
    copying: Copying


class Arrays:
    """Builds, steps, copies and frees train states; keyed by (epoch, step)."""

    def __init__(self, program: Program, backend: Backend, saver: Saver | None, policy: Policy):
        self._program, self._backend, self._saver = program, backend, saver
        self._policy = policy
        self._states: dict[tuple[int, int], Leaves] = {}
        self._snapshot: _Snapshot | None = None
        self._unpublished: set[int] = set()
        self._waited_compiles = 0

    @property
    def num_states(self) -> int:
        """The train states held, of which each slice of the mesh has a copy."""
        return len(self._states)

    @property
    def compiles(self) -> int:
        """XLA compiles that this thread made, or waited for while another made them."""
        return compiles_of_this_thread() + self._waited_compiles

    def compile(self, mesh: Slices) -> bool:
        """See that the executables for `mesh` exist: the step, and the host snapshot. Returns
        whether one was on its way already.

        Raises:
            StuckError: it does not by the deadline of a compile, which then goes on.
        """
        warming = self._program.is_compiling(mesh)
        step, snapshot = self._executables(mesh)  # beside each other, not one after the other
        self._await(step, mesh, "compiling the step")
        self._await(snapshot, mesh, "compiling the host snapshot")
        return warming

    def compiling(self, mesh: Slices) -> Sequence[Future[Any]]:
        """The executables of `compile`, made in the background from now on."""
        return self._executables(mesh)

    def _executables(self, mesh: Slices) -> tuple[Compilation, Compilation]:
        return self._program.compiling_step(mesh), self._program.compiling_snapshot(mesh)

    def warm(self, sets: Sequence[Slices]) -> None:
        """Make the executables for these sets in the background, one after another, and for no
        others."""
        self._program.warm(sets)

    def _await(self, job: Compilation, mesh: Slices, what: str) -> Any:
        names, made = ", ".join(map(str, sorted(mesh))), job.done()
        deadline = self._policy.prepare_deadline
        executable = wait_for(job, self._backend, mesh, deadline, f"{what} for slices {names}")
        self._waited_compiles += 0 if made else job.compiles
        return executable

    def step(self, epoch: int, step: int, mesh: Slices, batch: Batch) -> dict[str, Any]:
        """Dispatch the update from `step - 1` to `step`; returns its results, as futures.

        The input is donated, and gone, unless the policy looks back to live states.
        """
        before = (epoch, step - 1)
        on_mesh = self._program.put_batch(batch, mesh)
        leaves, results = self._program.step(mesh)(self._states[before], on_mesh)
        if self._program.donates:
            del self._states[before]
        self._states[epoch, step] = leaves
        return results

    def trial(self, slices: Slices) -> dict[str, Any]:
        """Dispatch one step of the seed's state on a batch of zeros; its results, as futures."""
        initial = self._initial(slices)
        self.compile(slices)
        on_mesh = self._program.put_batch(self._program.zeros(), slices)
        _, results = self._program.step(slices)(initial, on_mesh)
        return results

    def finishes_alone(self, slice_id: int) -> bool:
        """Whether the slice finishes a step by the deadline of one, with nobody else."""
        alone = frozenset({slice_id})
        results = self.trial(alone)  # a compile that hangs is no slice's doing
        try:
            self._backend.read(results, alone, self._policy.step_deadline)
        except StuckError:
            return False
        return True

    def evaluate(self, epoch: int, step: int, mesh: Slices, batch: Batch) -> dict[str, Any]:
        """Dispatch the evaluation of one batch; the sums over it, as futures."""
        self._await(self._program.compiling_eval(mesh), mesh, "compiling the evaluation")
        on_mesh = self._program.put_batch(batch, mesh)
        return self._program.evaluate(mesh)(self._states[epoch, step], on_mesh)

    def consumed_ids(self, ids: np.ndarray) -> np.ndarray:
        """The example ids that a step's results say it consumed: int64[global_batch]."""
        return self._program.consumed_ids(ids)

    def restore(
        self, source: Source, epoch: int, mesh: Slices, known: dict[int, Progress]
    ) -> Progress | None:
        """Build the state of `source` on `mesh`; None if no holder has it.

        Args:
            known: the progress of steps that this process has seen.

        Raises:
            CheckpointError: a checkpoint cannot be trusted; it was set aside.
            SliceLostError: a slice that was read or written is not alive afterwards.
            StuckError: a checkpoint is not read, or the state is not on the mesh, in time.
        """
        # Once more: a slice may have come back while the step was compiled, and what it will hold
        # is built from here on.
        self._backend.admit(mesh - source.holders)
        try:
            leaves, progress = self._build(source, mesh, known)
            if leaves is None:
                return None
            self._backend.wait(leaves, mesh | source.holders, self._policy.step_deadline)
        except jax.errors.JaxRuntimeError as error:
            if not controller_is_lost(error):  # who else would ask for holders outside the mesh?
                self._require(source.holders - mesh, "restoring")
            raise
        self._require(mesh | source.holders, "restoring")
        self._states[epoch, source.step] = leaves
        return progress

    def _build(
        self, source: Source, mesh: Slices, known: dict[int, Progress]
    ) -> tuple[Leaves | None, Progress]:
        shardings, transfers = self._program.shardings(mesh), self._backend.transfers
        match source.tier:
            case Tier.SEED:
                return self._initial(mesh), Progress()
            case Tier.LIVE:
                leaves = self._states.get((source.epoch, source.step))
                donors = self._program.devices(source.holders)
                moved = transfers.move(leaves, donors, shardings) if leaves else None
                return moved, known[source.step]
            case Tier.HOST:
                copies = self._host_copies(source.step, source.holders)
                shapes = self._program.shapes
                restored = transfers.restore(copies, shapes, shardings) if copies else None
                return restored, known[source.step]
            case Tier.DISK:
                assert self._saver
                place = lambda path, leaf: transfers.place(leaf, shardings[path])  # noqa: E731
                restored, metadata = self._saver.load(source.step, place)
                return restored, Progress.from_json(metadata["progress"])

    def _initial(self, mesh: Slices) -> Leaves:
        """The seed's train state, as futures."""
        return self._await(self._program.compiling_init(mesh), mesh, "compiling the seed")()

    def _host_copies(self, step: int, holders: Slices) -> list[HostSnapshot]:
        memories = (self._backend.host_memory(s) for s in sorted(holders))
        return [memory[step] for memory in memories if step in memory]

    def _host_copy(self, step: int, holders: Slices) -> dict[str, np.ndarray] | None:
        copies = self._host_copies(step, holders)
        return copies[0].whole(self._program.shapes) if copies else None

    def begin_snapshot(self, epoch: int, step: int, mesh: Slices) -> None:
        """Begin to copy the state of `step` whole to the host memory of every slice. The step may
        still run; the next one may be dispatched."""
        hashes, leaves = self._program.snapshot(self._states[epoch, step], mesh)
        devices = {s: self._backend.devices[s] for s in sorted(mesh)}
        copying = self._backend.transfers.copy(leaves, devices, step)
        self._snapshot = _Snapshot(step, mesh, {"hashes": hashes}, copying)

    @property
    def snapshot_begun(self) -> float:
        """The step whose snapshot was begun and is neither finished nor given up; `inf` if there
        is none."""
        return self._snapshot.step if self._snapshot else inf

    def give_up_snapshot(self) -> None:
        """Nobody waits for it any more."""
        self._snapshot = None

    def finish_snapshot(self) -> int:
        """Wait for the copies that were begun, and keep them; returns their step.

        Raises:
            SliceLostError: a slice is not alive after the copy, so that none of them counts.
            SliceCorruptError: a slice holds other bits than most.
            StuckError: they are not there by the deadline of a step.
        """
        assert self._snapshot
        begun, self._snapshot = self._snapshot, None
        hashes = self._hashes(begun.hashes, begun.mesh)
        copies = begun.copying.finish(hashes)
        self._require(begun.mesh, "a host snapshot")
        for slice_id, copy in copies.items():
            self._backend.host_memory(slice_id)[begun.step] = copy
        self._unpublished.add(begun.step)
        return begun.step

    def _hashes(self, hashed: dict[str, Any], mesh: Slices) -> dict[str, str]:
        """The hash of each leaf: each slice computes it of what it holds, and all must agree."""
        rows = self._backend.read(hashed, mesh, self._policy.step_deadline)["hashes"]
        paths = [leaf.path for leaf in self._program.spec.leaves]
        return agreed(dict(zip(sorted(mesh), rows, strict=True)), paths)

    def published(self, step: int) -> None:
        """The machine knows the snapshot of `step`: from now on its state decides how long."""
        self._unpublished.discard(step)

    def final(self, step: int, mesh: Slices) -> dict[str, np.ndarray] | None:
        """The whole leaves after `step`, from a snapshot of a slice that is alive after it was
        read, or else from the checkpoint; None if there is neither."""
        for slice_id in sorted(mesh):
            with contextlib.suppress(jax.errors.JaxRuntimeError, StuckError):
                whole = self._host_copy(step, frozenset({slice_id}))
                if whole and self._probe([slice_id])[slice_id] is Health.UP:
                    return whole
        with contextlib.suppress(CheckpointError, StuckError):
            return self._saver.load(step)[0] if self._saver and step > 0 else None
        return None

    def _probe(self, slices: Iterable[int]) -> dict[int, Health]:
        return self._backend.probe(slices, self._policy.probe_deadline)

    def _require(self, slices: Slices, during: str) -> None:
        """What was read or written is only good if these slices are alive after it."""
        health = self._probe(sorted(slices)) if slices else {}
        gone = slices_of(health, Health.DOWN, Health.EMPTIED)
        if gone:
            names = ", ".join(map(str, sorted(gone)))
            raise SliceLostError(gone, f"slice {names} does not hold its canary after {during}")

    def release(self, state: State) -> None:
        """Free the arrays and host copies that the state does not name."""
        if isinstance(state, Done | Failed):
            self.warm(())
        if isinstance(state, Starting | Done | Failed):
            return
        for epoch, step in list(self._states):
            if not names_train_state(state, epoch, step):
                del self._states[epoch, step]
        kept = named_snapshots(state) | self._unpublished
        for slice_id in self._backend.devices:
            memory = self._backend.host_memory(slice_id)
            for step in set(memory) - kept:
                del memory[step]
