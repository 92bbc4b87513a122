"""One global stream of batches: batch n is the same on every mesh, so its state is the number n."""

import json
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, final

import grain
import numpy as np

from elastix.data.order import example_at
from elastix.host_memory import host_memory

_HORIZON = 2**52  # examples: no run lasts as long, and no count overflows
_MOST_PREFETCH = 1000
_ID_BYTES = 64  # of the number of an example, while a batch is made
_COLUMN_KINDS = "biufcV"  # V: also the extension types of ml_dtypes, such as bfloat16

_Columns = list[tuple[str, tuple[np.dtype, tuple[int, ...]]]]

Order = Callable[[int], int]
"""The index of the example that is consumed as number n, counted from 0 over all epochs."""


class DataError(ValueError):
    """Data or its configuration cannot be used; one line names the value and the remedy."""


class Source(Protocol):
    """Random access to records: a mapping of column names to arrays, the same shapes in each.

    `source[i]` for 0 <= i < len(source) must give the same record every time. It is called by
    one thread at a time, not always the same one.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, np.ndarray]: ...


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """Returns `value` as an int; DataError unless it is a whole number from `least` to `most`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise DataError(f"{name}={value!r} must be a whole number of at least {least}")
    if most is not None and number > most:
        raise DataError(f"{name}={value!r} must be a whole number of at most {most}")
    return number


def check_prefetch(value: object) -> int:
    """Returns how many batches are read ahead; DataError for a number that no memory could hold."""
    return whole("prefetch", value, 0, _MOST_PREFETCH)


def check_shuffle(value: object) -> bool | int:
    """Returns True, False or a window of examples as they were given; DataError for any other."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    try:
        return whole("shuffle", value, 1)
    except DataError:
        raise DataError(
            f"shuffle={value!r} must be True, False or a window of at least 1 example"
        ) from None


def order_of(size: int, seed: int, shuffle: bool | int) -> Order:
    """Returns the endless order of `size` examples, shuffled fully, within windows or not at all.

    Whether it is a window or a bool is told by the type: `shuffle=1` is a window of 1.
    """
    if shuffle is False:
        return lambda number: number % size
    window = None if shuffle is True else shuffle
    return lambda number: example_at(number, size, seed, window)


@final
@dataclass(frozen=True, eq=False)
class Stream:
    """Batches by number: batch n, counted from 0, is what step n + 1 consumes.

    `global_batch` and `num_examples` count examples; `fingerprint` holds JSON values and is equal
    exactly when the batches are meant to be. Build one with `stream`.
    """

    global_batch: int
    num_examples: int
    fingerprint: dict[str, object]
    _batches: "_Batches" = field(repr=False)
    _prefetch: int = field(repr=False)

    def batches(self, position: int) -> Iterator[dict[str, np.ndarray]]:
        """Yields batches from number `position` on, without end.

        Each is a dict of arrays of shape (global_batch, ...), with `example_id`, int64, the index
        of each record in the source. What the source raises comes out of `next` and ends the
        iterator; `batches(position)` anew goes on from any batch. DataError for a bad position.
        """
        position = whole("position", position, 0)
        if position >= len(self._batches):
            raise DataError(f"position={position} is past the last batch, {len(self._batches) - 1}")
        # One thread at most: more gain nothing, and Grain's default depth of 500 is thrown away
        # at each change of position.
        options = grain.ReadOptions(
            num_threads=min(self._prefetch, 1), prefetch_buffer_size=self._prefetch
        )
        iterator = iter(grain.MapDataset.source(self._batches).to_iter_dataset(options))
        iterator.set_state({"next_index": position})
        return _until_error(iterator)


def stream(
    source: Source,
    *,
    global_batch: int,
    seed: int,
    shuffle: bool | int = True,
    prefetch: int = 2,
    fingerprint: Mapping[str, object],
    order: Order | None = None,
) -> Stream:
    """Returns the endless stream of `source`: each record once an epoch, in a new order each epoch.

    Batches straddle epochs, so a source may be smaller than a batch. `shuffle` may be a number:
    then records move only within windows of so many. An `order` of your own takes its place.
    `fingerprint` is a mapping of JSON values that says which data this is (a name and a hash,
    say); the stream adds what else decides its batches. `prefetch` is how many batches are read
    ahead, 0 for none; it changes no batch. Raises DataError for bad arguments, an empty source or
    a first record that will not do.

        stream(images, global_batch=64, seed=0, fingerprint={"kind": "digits", "sha256": "ab12"})
    """
    global_batch = whole("global_batch", global_batch, 1)
    seed = whole("seed", seed, 0)
    prefetch = check_prefetch(prefetch)
    shuffle = check_shuffle(shuffle)
    batches = _Batches(source, global_batch, order or order_of(len(source) or 1, seed, shuffle))
    decided = {
        "records": batches.size,
        "columns": _spelled(batches.columns),
        "global_batch": global_batch,
        "seed": seed,
        "shuffle": shuffle,
        # The order itself, so that a release which shuffles in another way is noticed on resume.
        "order": [batches.example(number) for number in range(min(8, batches.size))],
    }
    merged = _fingerprint(fingerprint, decided)
    return Stream(global_batch, batches.size, merged, batches, prefetch)


def _fingerprint(given: Mapping[str, object], decided: dict[str, object]) -> dict[str, object]:
    """Merges the two, as they will read after a trip through JSON (tuples become lists)."""
    if not isinstance(given, Mapping):
        raise DataError(f"fingerprint={given!r} must be a mapping of JSON values")
    if taken := sorted(given.keys() & decided.keys()):
        raise DataError(f"fingerprint key {taken[0]!r} is set by the stream; use another name")
    try:
        return json.loads(json.dumps({**given, **decided}, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise DataError(f"fingerprint must hold JSON values only: {error}") from None


def _until_error(iterator: grain.DatasetIterator) -> Iterator[dict[str, np.ndarray]]:
    """Ends for good at the first exception: Grain would go on and skip a batch in silence."""
    try:
        yield from iterator
        raise DataError("the source raised StopIteration; raise another error, or give the record")
    finally:
        iterator.close()


class _Batches:
    """Batch n of a source, for any n: numbered, checked and stacked.

    Reads under a lock: after an error a new iterator starts while the thread of the old one may
    still be reading, and a source with one file handle would hand each the other's bytes. Copies
    each record before it reads the next, because a source may fill one buffer again and again.
    """

    def __init__(self, source: Source, global_batch: int, order: Order):
        self._source, self._global_batch, self._order = source, global_batch, order
        self._lock = threading.Lock()
        self.size = len(source)
        if not 0 < self.size <= _HORIZON:
            raise DataError(f"source has {self.size} records; it must have 1 to {_HORIZON}")
        self.columns = _columns(0, self._read(0))
        _refuse_too_large(global_batch, self.columns)

    def __len__(self) -> int:
        return _HORIZON // self._global_batch

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        """Returns batch `number`, arrays of shape (global_batch, ...)."""
        first = number * self._global_batch
        ids = [self.example(first + i) for i in range(self._global_batch)]
        batch = {name: np.empty((len(ids), *shape), dtype) for name, (dtype, shape) in self.columns}
        for row, index in enumerate(ids):
            with self._lock:
                for name, value in self._checked(index).items():
                    batch[name][row] = value
        return {**batch, "example_id": np.array(ids, np.int64)}

    def example(self, number: int) -> int:
        """Returns the index of the example consumed as `number`, counted over all epochs."""
        index = self._order(number)
        if not 0 <= index < self.size:
            raise DataError(f"order({number}) is {index}; it must be 0 to {self.size - 1}")
        return index

    def _checked(self, index: int) -> dict[str, np.ndarray]:
        record = self._read(index)
        if (columns := _columns(index, record)) != self.columns:
            raise DataError(
                f"record {index} is {_spelled(columns)}, record 0 is {_spelled(self.columns)}; "
                "pad or crop so that all are alike"
            )
        return record

    def _read(self, index: int) -> dict[str, np.ndarray]:
        record = self._source[index]
        if not isinstance(record, Mapping):
            kind = type(record).__name__
            raise DataError(f"record {index} is a {kind}; it must be a mapping of arrays")
        return {name: np.asarray(value) for name, value in record.items()}


def _columns(index: int, record: dict[str, np.ndarray]) -> _Columns:
    """Returns [(name, (dtype, shape))], sorted; DataError for a column that cannot be batched."""
    if not record:
        raise DataError(f"record {index} has no columns; it must have at least one")
    if "example_id" in record:
        raise DataError(f"record {index} has a column 'example_id', which the stream sets; rename")
    for name, array in record.items():
        if not isinstance(name, str):
            raise DataError(f"record {index} has a column named {name!r}; use a string")
        if array.dtype.kind not in _COLUMN_KINDS or array.dtype.type is np.void:
            raise DataError(f"record {index} column {name!r} is {array.dtype}; make it numbers")
    return sorted((name, (array.dtype, array.shape)) for name, array in record.items())


def _refuse_too_large(global_batch: int, columns: _Columns) -> None:
    """Before one is made: the system would end the process without a word."""
    example = sum(dtype.itemsize * math.prod(shape) for _, (dtype, shape) in columns) + _ID_BYTES
    if global_batch * example > host_memory():
        raise DataError(
            f"global_batch={global_batch} examples of {example} bytes are {global_batch * example} "
            f"bytes and there are {host_memory()} of memory; use fewer"
        )


def _spelled(columns: _Columns) -> dict[str, str]:
    return {name: f"{dtype}{list(shape)}" for name, (dtype, shape) in columns}
