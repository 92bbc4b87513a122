"""The gRPC edge: the service of the IFRT proxy, bound to this machine alone."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent import futures
from typing import Any

import grpc

from elastix.testing.local_pathways.blobs import chunks, collect
from elastix.testing.local_pathways.cluster import Cluster
from elastix.testing.local_pathways.failures import Failure
from elastix.testing.local_pathways.protocol import Protocol, Version, negotiate
from elastix.testing.local_pathways.session import Session

NAME = "xla.ifrt.proxy.GrpcIfrtService"
METADATA = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
MOST_CALLS = 256
"""At once, of all clients: each transfer is one."""


class Service:
    """Serves clients; `told` hears of those that come and go."""

    def __init__(self, protocol: Protocol, cluster: Cluster, told: Any):
        self._protocol, self._cluster, self._told = protocol, cluster, told
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(1)

    def serve(self, port: int) -> tuple[grpc.Server, int]:
        """Start on a port of the loopback interface (0: a free one); it stops with the server.

        Raises:
            ValueError: the port is taken.
        """
        endless = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        server = grpc.server(
            futures.ThreadPoolExecutor(MOST_CALLS), options=[*endless, ("grpc.so_reuseport", 0)]
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, self._rpcs()),))
        try:
            bound = server.add_insecure_port(f"127.0.0.1:{port}")
        except RuntimeError:
            bound = 0
        if not bound:
            raise ValueError(f"port {port} is taken: use another, or 0 for any that is free")
        server.start()
        return server, bound

    def _rpcs(self) -> dict[str, grpc.RpcMethodHandler]:
        rows = (
            ("GetVersion", grpc.unary_unary_rpc_method_handler, "GrpcGetVersionRequest"),
            ("IfrtSession", grpc.stream_stream_rpc_method_handler, "IfrtRequest"),
            ("HostBufferStore", grpc.stream_unary_rpc_method_handler, "GrpcHostBufferStoreRequest"),
            (
                "HostBufferLookup",
                grpc.unary_stream_rpc_method_handler,
                "GrpcHostBufferLookupRequest",
            ),
            (
                "HostBufferDelete",
                grpc.unary_unary_rpc_method_handler,
                "GrpcHostBufferDeleteRequest",
            ),
        )
        methods = (self._version, self._session, self._store, self._lookup, self._delete)
        return {
            name: handler(method, self._message(request).FromString, _serialize)
            for (name, handler, request), method in zip(rows, methods, strict=True)
        }

    def _message(self, name: str) -> Any:
        return self._protocol.message(f"xla.ifrt.proxy.{name}")

    def _version(self, request: Any, context: grpc.ServicerContext) -> Any:
        response = self._message("GrpcGetVersionResponse")()
        try:
            chosen = negotiate(*map(_version, (request.min_version, request.max_version)))
        except ValueError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        response.version.protocol_version = chosen.protocol
        response.version.ifrt_serdes_version_number = chosen.serdes
        return response

    def _session(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        session = Session(self._protocol, self._cluster, next(self._numbers))
        self._sessions[session.number] = session
        self._told("connected", session.number)
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def take() -> None:
            try:
                for request in requests:
                    session.answer(request).add_done_callback(lambda of: answers.put(of.result()))
            except grpc.RpcError:
                pass  # the client went without a word
            answers.put(None)

        def gone() -> None:
            session.buffers.close()
            answers.put(None)

        context.add_callback(gone)
        taker = threading.Thread(target=take, daemon=True)
        taker.start()
        try:
            yield from iter(answers.get, None)
        finally:  # also when the client goes while an answer is on its way: gRPC asks for no more
            del self._sessions[session.number]
            session.buffers.close()
            taker.join()
            session.end()
            self._told("disconnected", session.number)

    def _store(self, requests: Iterable[Any], context: grpc.ServicerContext) -> Any:
        metadata = dict(context.invocation_metadata())[METADATA]
        told = self._message("GrpcHostBufferStoreMetadata").FromString(metadata)
        blob = collect(request.data for request in requests)
        session = self._sessions.get(told.session_id)
        if session is not None:
            session.buffers.put(told.handle, blob)
        return self._message("GrpcHostBufferStoreResponse")()

    def _lookup(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        response = self._message("GrpcHostBufferLookupResponse")
        try:
            blob = self._sessions[request.session_id].buffers.get(request.handle)
        except (KeyError, Failure):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no host buffer {request.handle}")
        for data in chunks(blob):
            yield response(data=data)

    def _delete(self, request: Any, context: grpc.ServicerContext) -> Any:
        session = self._sessions.get(request.session_id)
        if session is not None:
            session.buffers.delete(request.handle)
        return self._message("GrpcHostBufferDeleteResponse")()


def _serialize(message: Any) -> bytes:
    return message.SerializeToString()


def _version(proto: Any) -> Version:
    return Version(proto.protocol_version, proto.ifrt_serdes_version_number)
