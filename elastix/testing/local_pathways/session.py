"""One client's session: each request in, its response (or a future of it) out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastix.testing.local_pathways.array_requests import ArrayRequests
from elastix.testing.local_pathways.arrays import Arrays
from elastix.testing.local_pathways.buffers import Buffers
from elastix.testing.local_pathways.cluster import Cluster
from elastix.testing.local_pathways.failures import Code, Failure, internal
from elastix.testing.local_pathways.futures import Future, done, settle
from elastix.testing.local_pathways.program_requests import ProgramRequests
from elastix.testing.local_pathways.protocol import Protocol
from elastix.testing.local_pathways.topology import MEMORY_KINDS

PLATFORM, DEVICE_KIND = "tpu", "TPU v5 lite"


class Session:
    """What one client has here. Its requests are taken in order by one thread."""

    def __init__(self, protocol: Protocol, cluster: Cluster, number: int):
        self._protocol, self._topology, self.number = protocol, cluster.topology, number
        self.buffers = Buffers()
        self._arrays = Arrays(cluster, number)
        self._groups = (
            ArrayRequests(protocol, self._arrays, self.buffers),
            ProgramRequests(protocol, self._arrays),
            self,
        )

    def answer(self, request: Any) -> Future[Any]:
        """The response to a request; an error is in the response, too."""
        response = self._protocol.message("xla.ifrt.proxy.IfrtResponse")()
        response.response_metadata.op_id = request.request_metadata.op_id
        try:
            kind = (request.WhichOneof("request") or "unknown").removesuffix("_request")
            handle = self._handler(kind)
            inner = getattr(response, f"{kind}_response")
            inner.SetInParent()
            work = handle(getattr(request, f"{kind}_request"), inner)
        except Exception as error:
            return done(self._fail(response, internal(error)))
        if work is None:
            return done(response)
        answer: Future[Any] = Future()
        work.add_done_callback(lambda of: settle(answer, self._finish(response, of)))
        return answer

    def end(self) -> None:
        """The client is gone."""
        self.buffers.close()
        self._arrays.end()

    def _handler(self, kind: str) -> Callable[[Any, Any], Future[Any] | None]:
        for group in self._groups:
            if hasattr(group, kind):
                return getattr(group, kind)
        raise Failure(Code.UNIMPLEMENTED, f"requests of the kind {kind}")

    def _finish(self, response: Any, work: Future[Any]) -> Any:
        error = work.exception()
        return response if error is None else self._fail(response, internal(error))

    def _fail(self, response: Any, failure: Failure) -> Any:
        if (named := response.WhichOneof("response")) is not None:
            response.ClearField(named)
        response.response_metadata.status.code = failure.code
        response.response_metadata.status.message = failure.message
        return response

    # What is there.

    def init(self, request: Any, response: Any) -> None:
        response.session_id = self.number
        response.platform_name, response.platform_id = PLATFORM, 0x5450
        response.platform_version = "elastix local Pathways"
        response.runtime_type = "proxy/pathways"
        for device in self._topology.all_devices:
            self._describe(device, response)

    def _describe(self, device: int, response: Any) -> None:
        slice = self._topology.slice_of(device)
        local = device - self._topology.devices(slice)[0]
        memories = {kind: self._topology.memory_id(device, kind) for kind in MEMORY_KINDS}
        text = f"device({device},TPU_DEVICE,coords=[{local},0,0,0],vtask={slice},slice={slice})"
        told = response.all_devices.add(
            id=device,
            local_device_id=device,
            local_hardware_id=device,
            platform_name=PLATFORM,
            device_kind=DEVICE_KIND,
            default_memory_id=memories[MEMORY_KINDS[0]],
            memory_ids=memories.values(),
            debug_string=text,
            to_string=text,
        )
        numbers = {"slice_index": slice, "core_on_chip": 0, "task_id": slice}
        for name, value in numbers.items():
            told.attributes.attributes[name].int64_value = value
        told.attributes.attributes["coords"].int64_list_value.elements.extend([local, 0, 0])
        response.addressable_device_ids.append(device)
        response.primary_device_ids.append(device)
        for index, (kind, memory) in enumerate(memories.items()):
            response.memories.add(
                id=memory,
                memory_space_kind=kind,
                kind_id=index,
                device_ids=[device],
                debug_string=f"{kind}({memory})",
                to_string=f"{kind}({memory})",
            )

    def get_default_device_assignment(self, request: Any, response: Any) -> None:
        assignment = response.device_assignment
        assignment.replica_count = replicas = request.num_replicas
        assignment.computation_count = request.num_partitions
        for partition in range(request.num_partitions):
            ids = range(partition * replicas, (partition + 1) * replicas)
            assignment.computation_devices.add(replica_device_ids=ids)

    def get_default_layout(self, request: Any, response: Any) -> None:
        order = ",".join(map(str, reversed(range(len(request.dims)))))
        response.serialized_pjrt_layout = f"{{{order}}}".encode()
