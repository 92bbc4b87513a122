"""What clients ask about programs. One that runs has results at once; what goes wrong is found by
whoever reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from elastix.testing.local_pathways import messages
from elastix.testing.local_pathways.array_requests import set_dtype
from elastix.testing.local_pathways.arrays import Array, Arrays
from elastix.testing.local_pathways.blobs import Blob, collect
from elastix.testing.local_pathways.failures import Code, Failure, internal
from elastix.testing.local_pathways.futures import Future, after, failed, gather, then
from elastix.testing.local_pathways.messages import Compiled, Key
from elastix.testing.local_pathways.programs import (
    Assignment,
    Launcher,
    Program,
)
from elastix.testing.local_pathways.protocol import Protocol
from elastix.testing.local_pathways.shardings import write_sharding


class ProgramRequests:
    """Handlers, by the name of the request."""

    def __init__(self, protocol: Protocol, arrays: Arrays):
        self._protocol, self._arrays, self._cluster = protocol, arrays, arrays.cluster
        self._launcher = Launcher(arrays.cluster)
        self._programs: dict[int, Program] = {}
        self._statuses: dict[int, Future[Any]] = {}

    def check_future(self, request: Any, response: Any) -> Future[Any]:
        return self._status(request.future_handle)

    def loaded_executable_fetch_execute_result(self, request: Any, response: Any) -> Future[Any]:
        return self._status(request.result_status_handle)

    def _status(self, handle: int) -> Future[Any]:
        if handle not in self._statuses:
            raise Failure(Code.NOT_FOUND, f"unknown future handle {handle}")
        return self._statuses.pop(handle)

    def add_status(self, future: Future[Any], handle: int = 0) -> int:
        """Keep a future that the client asks for once."""
        handle = handle or self._arrays.handle()
        self._statuses[handle] = future
        return handle

    def delete_array(self, request: Any, response: Any) -> None:
        self._arrays.delete(request.array_handle)
        response.deletion_future_handle = self.add_status(gather([]))

    # Compiled.

    def compile(self, request: Any, response: Any) -> Future[None]:
        if request.host_callbacks:
            raise Failure(
                Code.UNIMPLEMENTED,
                "host callbacks (jax.debug.print, io_callback): this server has no host for them",
            )
        message = self._protocol.message("xla.ifrt.XlaCompileOptionsProto")
        options = message.FromString(request.compile_options.data).compile_options
        assignment = _assignment(options.executable_build_options.device_assignment)
        # In one order: an executable that is kept is found by these bytes.
        command = messages.Compile(options.SerializeToString(deterministic=True), assignment)
        answer = self._cluster.compile(command, collect([request.program.data]))
        handle = self._arrays.handle()

        def keep(compiled: tuple[Compiled, list[Blob]]) -> None:
            program = Program(
                self._arrays.key(handle), compiled[1][0], compiled[0], command.options, assignment
            )
            self._programs[handle] = program
            response.loaded_executable_handle = handle
            response.name = program.compiled.name
            response.num_devices = len(program.devices)
            response.device_ids.extend(program.devices)
            response.addressable_device_ids.extend(program.devices)
            response.fingerprint_value = hashlib.sha256(
                request.program.data + request.compile_options.data
            ).digest()
            response.ready_future_handle = self.add_status(gather([]))

        return then(answer, keep)

    def loaded_executable_metadata(self, request: Any, response: Any) -> None:
        compiled = self._find(request).compiled
        for name, shardings in (
            ("parameter_shardings", compiled.parameter_shardings),
            ("output_shardings", compiled.result_shardings),
        ):
            if shardings is not None:
                field = getattr(response, name)
                field.SetInParent()
                for op in shardings:
                    field.shardings.add().ParseFromString(op)
        for field, layouts in (
            (response.parameter_layouts_list, compiled.parameter_layouts),
            (response.output_layouts_list, [result.layout for result in compiled.results]),
        ):
            field.SetInParent()
            for layout in layouts:
                field.layouts.add(minor_to_major=layout, tail_padding_alignment_in_elements=1)
        kinds = [result.memory_kind for result in compiled.results]
        response.output_memory_kinds.memory_kind_lists.add(memory_kinds=kinds)
        response.donated_input_indices.SetInParent()
        response.donated_input_indices.donated_input_indices.extend(compiled.donated)
        stats = response.compiled_memory_stats
        stats.SetInParent()
        for name, value in compiled.memory.items():
            field_name = name.removesuffix("_in_bytes") + "_in_bytes"
            if field_name in stats.DESCRIPTOR.fields_by_name:
                setattr(stats, field_name, value)
        response.size_of_generated_code_in_bytes = compiled.code_size

    def loaded_executable_human_readable_program_text(self, request: Any, response: Any) -> None:
        response.human_readable_program_text = self._find(request).compiled.text

    def loaded_executable_cost_analysis(self, request: Any, response: Any) -> None:
        response.attributes.SetInParent()
        for name, cost in self._find(request).compiled.costs.items():
            response.attributes.attributes[name].float_value = cost

    def loaded_executable_is_deleted(self, request: Any, response: Any) -> None:
        response.is_deleted = request.loaded_executable_handle not in self._programs

    def loaded_executable_destruct(self, request: Any, response: Any) -> None:
        program = self._find(request)
        del self._programs[program.key.handle]
        for slice, generation, _ in program.loaded:
            if generation == self._cluster.generation(slice):
                self._cluster.ask(slice, messages.Unload(program.key))

    def _find(self, request: Any) -> Program:
        handle = request.loaded_executable_handle
        if handle not in self._programs:
            raise Failure(Code.NOT_FOUND, f"unknown executable handle {handle}")
        return self._programs[handle]

    # Run.

    def loaded_executable_execute(self, request: Any, response: Any) -> None:
        program = self._find(request)
        results = self._arrays.keys(request.result_array_handle, len(program.compiled.results))
        verdict = self._start(program, request, results)
        slices = self._cluster.topology.slices_of(program.devices)
        for index, key in enumerate(results):
            result, sharding = program.compiled.results[index], program.sharding(index)
            ready = dict.fromkeys(slices, verdict)
            self._arrays.add_new(key, sharding, result.shape, result.dtype, ready)
            if not request.result_array_handle:
                output = response.outputs.add(array_handle=key.handle)
                set_dtype(output.dtype, result.dtype)
                output.shape.dims.extend(result.shape)
                output.sharding.CopyFrom(write_sharding(self._protocol, sharding))
        if request.execute_options.fill_status or request.result_status_handle:
            response.status_handle = self.add_status(verdict, request.result_status_handle)

    def _start(self, program: Program, request: Any, results: Sequence[Key]) -> Future[None]:
        """What the results, good or not, depend on: the arguments, and the run itself."""
        try:
            arguments = [self._arrays.find_usable(handle) for handle in request.args_handles]
            kept = set(request.execute_options.non_donatable_input_indices)
            donated = [arguments[i] for i in program.compiled.donated if i not in kept]
            return self._run(program, arguments, donated, results)
        except Exception as error:
            return failed(internal(error))

    def _run(
        self,
        program: Program,
        arguments: Sequence[Array],
        donated: Sequence[Array],
        results: Sequence[Key],
    ) -> Future[None]:
        for array in donated:
            array.is_deleted = True
        for array in arguments:
            self._arrays.check(array)
        there = [ready for array in arguments for ready in array.ready.values()]
        for ready in there:
            if ready.done():
                ready.result()  # an error is known already: nothing need run
        keys = [array.key for array in arguments]
        run = self._launcher.run(program, keys, results, {array.key for array in donated})
        return after(list({id(of): of for of in there}.values()), run)


def _assignment(proto: Any) -> Assignment:
    """Devices by replica and partition."""
    partitions = [tuple(of.replica_device_ids) for of in proto.computation_devices]
    return tuple(zip(*partitions, strict=True)) or ((0,),)
