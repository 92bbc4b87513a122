"""The process that compiles, for all slices and on none of them: programs compile whoever is dead.

On a real Pathways that is the head's work, too. A program is compiled once; the executable is
loaded by each slice that runs it, also by one that comes back.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from elastix.testing.local_pathways import executables, messages, runtime
from elastix.testing.local_pathways.blobs import Blob, pack, view
from elastix.testing.local_pathways.futures import submit
from elastix.testing.local_pathways.serving import attach, serve
from elastix.testing.local_pathways.topology import Topology


class Compiler:
    """Compiles for the devices of all slices, without having any of them."""

    def __init__(self, topology: Topology, kept: executables.Directory | None):
        self._topology, self._kept = topology, kept
        self._system = executables.this_system()
        self._thread = ThreadPoolExecutor(1)
        self._devices = submit(self._thread, lambda: runtime.alone(topology.all_devices))

    def do(self, command: messages.Compile, blobs: list[Blob]) -> Any:
        """A future of what is known of the program; the executable comes with it."""
        return submit(self._thread, lambda: self._compile(command, bytes(view(blobs[0]))))

    def _compile(self, command: messages.Compile, program: bytes) -> Any:
        if self._kept is None:
            executable, compiled = self._anew(command, program)
        else:
            num_devices = len(self._topology.all_devices)
            name = executables.name_of(command, program, num_devices, self._system)
            executable, compiled = self._kept.get(name, lambda: self._anew(command, program))
        return compiled, [pack(memoryview(executable))]

    def _anew(self, command: messages.Compile, program: bytes) -> executables.Made:
        return runtime.compile_program(
            self._devices.result(), program, command.options, command.assignment
        )


def main(argv: list[str]) -> None:
    """Compile: FD PARENT_PID SLICES DEVICES_PER_SLICE, and a directory to keep executables in."""
    link, topology = attach(argv), Topology(*map(int, argv[2:4]))
    kept = executables.Directory(Path(argv[4])) if argv[4:] else None
    serve(link, Compiler(topology, kept).do)
