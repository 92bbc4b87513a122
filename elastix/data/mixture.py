"""Several sources as one, each with its share: which comes when is a table that repeats."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import tyro

from elastix.data.files import NO_IDENTITY
from elastix.data.order import derived_seed
from elastix.data.sources import Opened
from elastix.data.stream import (
    DataError,
    Order,
    Source,
    Stream,
    check_prefetch,
    check_shuffle,
    order_of,
    stream,
    whole,
)

MOST_PERIOD = 100_000
"""Examples after which a mixture must repeat its pattern of sources."""


class Mixed:
    """Several sources one after the other: a `Source`, with an order that mixes them by weight.

    `parts` are (source, weight) pairs. Weights are numbers above 0 of which only the ratios count,
    so 3 and 1, or 0.75 and 0.25, are three examples of four and one of four. Among the first n
    examples of the order, each source has its share of n, give or take less than one example; it
    goes through its own epochs, in its own orders. DataError for weights that will not do.
    """

    def __init__(self, *parts: tuple[Source, float]):
        self._sources = [source for source, _ in parts]
        self.shares = shares([weight for _, weight in parts])
        self._ends = list(accumulate(map(len, self._sources)))
        schedule = quota_schedule(self.shares)
        counts = np.zeros(len(schedule), np.int32)
        for number in range(len(parts)):
            chosen = schedule == number
            counts[chosen] = np.arange(chosen.sum())
        self._schedule, self._counts = schedule, counts

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        part = bisect_right(self._ends, index)
        return self._sources[part][index - self._begin(part)]

    def example(self, number: int) -> tuple[int, int]:
        """Returns which source example `number` is of, and how many of it came before.

        The time does not depend on the number.
        """
        period, place = divmod(number, len(self._schedule))
        part = int(self._schedule[place])
        return part, period * self.shares[part] + int(self._counts[place])

    def order(self, seed: int, shuffle: bool | int = True) -> Order:
        """Returns the order in which the sources take turns, each shuffled on its own."""
        orders = [
            order_of(len(source), derived_seed(seed, f"source {part} of a mixture"), shuffle)
            for part, source in enumerate(self._sources)
        ]

        def index(number: int) -> int:
            part, count = self.example(number)
            return self._begin(part) + orders[part](count)

        return index

    def _begin(self, part: int) -> int:
        return self._ends[part - 1] if part else 0


def shares(weights: Sequence[float]) -> list[int]:
    """Returns how many examples of each source are in a period, the smallest whole numbers.

    A weight is the decimal number that is written: 0.1 is a tenth. DataError unless all are above
    0 and the period is at most `MOST_PERIOD`.
    """
    if not weights:
        raise DataError("a mixture of nothing; give at least one source and its weight")
    for weight in weights:
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (number and 0 < weight < math.inf):
            raise DataError(f"weight={weight!r} must be a number above 0; leave out a source of 0")
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole_numbers = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole_numbers)
    counts = [number // divisor for number in whole_numbers]
    if sum(counts) > MOST_PERIOD:
        raise DataError(
            f"weights={tuple(weights)} repeat after {sum(counts)} examples, more than "
            f"{MOST_PERIOD}; round them, to 0.333 or to whole numbers such as 1 and 2"
        )
    return counts


def quota_schedule(counts: Sequence[int]) -> np.ndarray:
    """Returns the source of each example of a period, int16 [sum(counts)].

    The deadline rule of R. Tijdeman, The chairman assignment problem, 1980: of k sources with
    shares w, after n examples source s had w[s] * n, give or take at most 1 - 1 / (2k - 2).
    """
    period, k = sum(counts), len(counts)
    if k == 1:
        return np.zeros(period, np.int16)
    schedule, had = np.empty(period, np.int16), [0] * k
    unit = 2 * k - 2  # all that follows is in whole numbers: 1 is `unit * period`
    for n in range(1, period + 1):
        best = None
        for source, count in enumerate(counts):
            lag = unit * (count * n - period * had[source])
            if lag < period:
                continue
            slack = (unit - 1) * period - lag
            # The earliest deadline: slack / count, compared without a division.
            if best is None or slack * counts[best[1]] < best[0] * count:
                best = (slack, source)
        assert best, "the sum of all that is owed is one"
        schedule[n - 1] = best[1]
        had[best[1]] += 1
    return schedule


@dataclass(frozen=True)
class Mixture:
    """Several configurations of data, mixed by weight: batches have the columns they all have.

        Mixture((PackedText(files=("books.jsonl",)), PackedText(files=("code.jsonl",))), (3, 1))

    `weights` are as `Mixed` takes them, one for each of `parts`; none, and all have the same. Each
    part is shuffled and repeated on its own, as `shuffle` says here. Raises DataError for bad
    values, and in `build` if the parts' columns differ.
    """

    # The command line sets the weights, and not what is inside the parts.
    parts: tyro.conf.Suppress[tyro.conf.Fixed[tuple[Any, ...]]]
    weights: tuple[float, ...] = ()
    shuffle: bool | int = True
    prefetch: int = field(default=2, metadata=NO_IDENTITY)

    def __post_init__(self):
        for name in ("parts", "weights"):
            if not isinstance(getattr(self, name), tuple | list):
                raise DataError(f"{name}={getattr(self, name)!r} must be a tuple")
        for config in self.parts:
            if not hasattr(config, "open"):
                raise DataError(
                    f"a {type(config).__name__} cannot be part of a mixture; use Text, "
                    "TokenRecords, PackedText or PackedRecords"
                )
        weights = tuple(self.weights) or (1,) * len(self.parts)
        if len(weights) != len(self.parts):
            raise DataError(f"weights={weights} must be as many as parts, {len(self.parts)}")
        shares(weights)
        object.__setattr__(self, "parts", tuple(self.parts))
        # As floats: a command line gives those, and it is to be the same recipe.
        object.__setattr__(self, "weights", tuple(map(float, weights)))
        check_shuffle(self.shuffle)
        check_prefetch(self.prefetch)

    @property
    def vocab_size(self) -> int | None:
        """The most token ids that one of the parts states; None if none does."""
        stated = [getattr(part, "vocab_size", None) for part in self.parts]
        return max((ids for ids in stated if ids is not None), default=None)

    def build(self, global_batch: int, seed: int) -> Stream:
        """Opens all parts and returns their stream."""
        opened: list[Opened] = [config.open() for config in self.parts]
        _refuse_other_columns([source for source, _ in opened])
        weighted = zip(opened, self.weights, strict=True)
        mixed = Mixed(*((part.source, weight) for part, weight in weighted))
        seed = whole("seed", seed, 0)
        fingerprint = {
            "kind": "mixture",
            "parts": [dict(part.fingerprint) for part in opened],
            "shares": mixed.shares,
        }
        return stream(
            mixed,
            global_batch=global_batch,
            seed=seed,
            shuffle=self.shuffle,
            prefetch=self.prefetch,
            fingerprint=fingerprint,
            order=mixed.order(seed, self.shuffle),
        )


def _refuse_other_columns(sources: Sequence[Source]) -> None:
    first, *others = [_columns(source) for source in sources]
    for number, columns in enumerate(others, 1):
        if columns != first:
            raise DataError(
                f"part {number} of the mixture has {columns}, part 0 has {first}; give all the "
                "same seq_len, and do not mix packed data with what is not"
            )


def _columns(source: Source) -> dict[str, str]:
    record = {name: np.asarray(value) for name, value in source[0].items()}
    return {name: f"{a.dtype}{list(a.shape)}" for name, a in sorted(record.items())}
