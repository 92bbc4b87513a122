"""The protocol of the IFRT proxy as the installed jaxlib speaks it: its messages, and its versions.

jaxlib has only the client of the protocol, and no `.proto` files; but the descriptors of its
messages lie, serialized, in its shared library. Nothing of them is kept here: another jaxlib
brings others, and one whose messages are not those needed is refused.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

KNOWN = "jaxlib 0.10.x to 0.12.x"
ROOTS = (
    "xla/python/ifrt_proxy/common/grpc_ifrt_service.proto",
    "xla/python/ifrt/sharding_serdes.proto",
    "xla/python/pjrt_ifrt/xla_sharding.proto",
    "xla/python/pjrt_ifrt/xla_compiler.proto",
)
NEEDED = {
    "xla.ifrt.proxy.IfrtRequest": "request_metadata init_request compile_request",
    "xla.ifrt.proxy.LoadedExecutableExecuteRequest": "args_handles execute_options "
    "result_array_handle result_status_handle",
    "xla.ifrt.proxy.CopyArraysRequest": "array_handles device_ids memory_kind result_handles",
    "xla.ifrt.proxy.GrpcHostBufferStoreMetadata": "session_id handle buffer_size",
    "xla.ifrt.HloShardingProto": "devices memory_kind xla_op_sharding",
    "xla.ifrt.SingleDeviceShardingProto": "device_id memory_kind",
    "xla.ifrt.XlaCompileOptionsProto": "compile_options",
}
"""Messages, and fields of them, without which nothing works."""


class Version(NamedTuple):
    """Of the protocol, and of what is serialized inside its messages."""

    protocol: int
    serdes: int


OLDEST, NEWEST = Version(16, 2), Version(25, 6)
"""The versions that this server speaks."""


def negotiate(oldest: Version, newest: Version) -> Version:
    """The newest version that a client of these versions and this server both speak.

    Raises:
        ValueError: there is none.
    """
    chosen = Version(*map(min, newest, NEWEST))
    if any(one < least for one, least in zip(chosen, map(max, oldest, OLDEST), strict=True)):
        raise ValueError(
            f"the client speaks IFRT proxy protocol {oldest.protocol} to {newest.protocol} (serdes "
            f"{oldest.serdes} to {newest.serdes}), this server {OLDEST.protocol} to "
            f"{NEWEST.protocol} (serdes {OLDEST.serdes} to {NEWEST.serdes}): use {KNOWN}"
        )
    return chosen


class Protocol:
    """Classes of messages, by full name."""

    def __init__(self, pool: descriptor_pool.DescriptorPool):
        self._pool = pool

    @functools.cache  # noqa: B019 (there is one, for the life of the process)
    def message(self, name: str) -> Any:
        """The class of a message.

        Raises:
            KeyError: there is no such message.
        """
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))

    def missing(self, needed: Mapping[str, str]) -> list[str]:
        """Which of the messages and fields needed are not there."""
        return list(_missing(self._pool, needed))


def _missing(pool: descriptor_pool.DescriptorPool, needed: Mapping[str, str]) -> Iterator[str]:
    for name, fields in needed.items():
        try:
            known = pool.FindMessageTypeByName(name).fields_by_name
        except KeyError:
            yield name
            continue
        yield from (f"{name}.{field}" for field in fields.split() if field not in known)


def read(binary: Any, version: str) -> Protocol:
    """The protocol in the bytes of a jaxlib's shared library.

    Raises:
        ValueError: it is not a protocol that is known here; the message names those that are.
    """
    pool = descriptor_pool.DescriptorPool()
    try:
        _add_files(pool, binary, ROOTS, set())
        missing = Protocol(pool).missing(NEEDED)
    except LookupError as error:
        missing = [str(error.args[0])]
    if missing:
        raise ValueError(
            f"jaxlib {version} speaks an IFRT proxy protocol that is not known here (it lacks "
            f"{', '.join(missing)}): use {KNOWN}"
        )
    return Protocol(pool)


@functools.cache
def installed() -> Protocol:
    """The protocol of the installed jaxlib.

    Raises:
        ValueError: as `read` does.
    """
    import jaxlib

    libraries = sorted(Path(jaxlib.__file__).parent.glob("libjax_common*"))
    if not libraries:
        return read(b"", jaxlib.__version__)
    with (
        libraries[0].open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary,
    ):
        return read(binary, jaxlib.__version__)


def _add_files(
    pool: descriptor_pool.DescriptorPool, binary: Any, names: Iterable[str], added: set[str]
) -> None:
    """Add files and, before each, those that it imports."""
    for name in names:
        if name in added:
            continue
        added.add(name)
        if name.startswith("google/protobuf/"):
            module = import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
            pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
            continue
        file = _find(binary, name)
        _add_files(pool, binary, file.dependency, added)
        pool.AddSerializedFile(file.SerializeToString())


def _find(binary: Any, name: str) -> descriptor_pb2.FileDescriptorProto:
    """A file's descriptor: it starts with the file's name, and is as long as it makes sense."""
    start = bytes([0x0A, len(name)]) + name.encode()
    at = binary.find(start)
    while at >= 0:
        file = descriptor_pb2.FileDescriptorProto()
        try:
            file.ParseFromString(binary[at : _end(binary, at)])
        except Exception:
            file.Clear()
        if file.message_type or file.enum_type:
            return file
        at = binary.find(start, at + 1)
    raise LookupError(name)


_VARINT, _BYTES = 0, 2
_FIELDS = dict.fromkeys((1, 2, 3, 4, 5, 6, 7, 8, 9, 12), _BYTES)
_FIELDS |= dict.fromkeys((10, 11, 14), _VARINT)
"""The fields of a FileDescriptorProto, which are written in the order of their numbers."""


def _end(binary: Any, at: int) -> int:
    """Where the descriptor that starts at `at` ends."""
    last = 0
    while at < len(binary):
        tag, after = _varint(binary, at)
        field, kind = tag >> 3, tag & 7
        if _FIELDS.get(field) != kind or field < last or field == last == 1:
            break
        value, after = _varint(binary, after)
        at, last = after + (value if kind == _BYTES else 0), field
    return min(at, len(binary))


def _varint(binary: Any, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(binary):
        byte, at = binary[at], at + 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, at
