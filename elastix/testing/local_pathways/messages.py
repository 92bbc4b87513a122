"""What the server asks of a slice's process. Everything is done in the order in which it was sent,
except that one part of a slice does not wait for another without need: see `worker.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Box = tuple[slice, ...]
"""A part of an array, by its range in each dim."""


class Key(NamedTuple):
    """The name of an array: the client's session, and its handle there."""

    session: int
    handle: int


class Shard(NamedTuple):
    """The part of an array on one device, by the device's id."""

    array: Key
    device: int


class HostView(NamedTuple):
    """An array in a blob: which, its dtype and shape, its byte strides, and the part wanted."""

    blob: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    box: Box


class Piece(NamedTuple):
    """A part of a shard, and where it goes."""

    shard: Shard
    source: Box
    target: Box


@dataclass(frozen=True)
class Ping:
    """Are you there? Answered whatever else the process does."""


@dataclass(frozen=True)
class Usage:
    """How many arrays are here, and of how many bytes?"""


@dataclass(frozen=True)
class Put:
    """Make shards from bytes that come along."""

    shards: dict[Shard, HostView]


@dataclass(frozen=True)
class Alias:
    """Make shards of those that are here: arrays do not change, so nothing is copied."""

    shards: dict[Shard, Shard]


@dataclass(frozen=True)
class Gather:
    """Make a shard from pieces of shards that are here."""

    shard: Shard
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Expect:
    """A shard will be supplied by another slice, through the server."""

    shard: Shard


@dataclass(frozen=True)
class Supply:
    """The shard that was expected: its dtype and shape, its bytes come along."""

    shard: Shard
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fail:
    """A shard that was expected will not come."""

    shard: Shard
    failure: Exception


@dataclass(frozen=True)
class Get:
    """Send a shard as soon as it is there, laid out by byte strides if any are given."""

    shard: Shard
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Delete:
    """Forget arrays."""

    arrays: tuple[Key, ...]


@dataclass(frozen=True)
class EndSession:
    """Forget all arrays and programs of a client."""

    session: int


@dataclass(frozen=True)
class Compile:
    """Compile the program that comes along for devices of any slices: nothing is loaded.

    `assignment` has the devices by replica and partition.
    """

    options: bytes
    assignment: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class JoinGang:
    """Meet the other slices of a gang at a coordination service, for programs over all of them."""

    gang: int
    port: int
    slices: tuple[int, ...]


@dataclass(frozen=True)
class LeaveGang:
    """Do not wait for the others any more; what is under way in the gang has failed. Answered when
    its coordination service is needed no more."""

    gang: int


@dataclass(frozen=True)
class Load:
    """Load the executable that comes along, into a gang or (None) on this slice alone."""

    program: Key
    gang: int | None
    options: bytes
    assignment: tuple[tuple[int, ...], ...]
    parameter_shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Unload:
    """Forget a program."""

    program: Key


@dataclass(frozen=True)
class Execute:
    """Run a loaded program; then forget the arguments that were donated."""

    program: Key
    gang: int | None
    arguments: tuple[Key, ...]
    results: tuple[Key, ...]
    donated: tuple[Key, ...]


@dataclass(frozen=True)
class Result:
    """What is known of one result of a program before it ran.

    `dtype` is NumPy's name of it, `shape` that of the whole array, `layout` minor to major.
    """

    dtype: str
    shape: tuple[int, ...]
    memory_kind: str
    layout: tuple[int, ...]


@dataclass(frozen=True)
class Compiled:
    """What is known of a compiled program; shardings are serialized `xla.OpSharding`."""

    name: str
    results: tuple[Result, ...]
    donated: tuple[int, ...]
    parameter_shapes: tuple[tuple[int, ...], ...]
    parameter_layouts: tuple[tuple[int, ...], ...]
    parameter_shardings: tuple[bytes, ...] | None
    result_shardings: tuple[bytes, ...] | None
    memory: dict[str, int]
    code_size: int
    text: str
    costs: dict[str, float]
