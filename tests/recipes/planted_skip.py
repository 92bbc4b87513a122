"""Planted defect: a stream that is taken up again skips a batch."""

from dataclasses import dataclass, replace

from elastix import Recipe
from tests.recipes import tiny


class Skipping:
    """A stream that starts `shift` batches off whenever it does not start at the beginning."""

    def __init__(self, stream, shift):
        self._stream, self._shift = stream, shift
        self.fingerprint = stream.fingerprint

    def batches(self, position):
        return self._stream.batches(position + self._shift if position else 0)


@dataclass(frozen=True)
class SkippingPoints(tiny.Points):
    """The points, wrongly resumed."""

    shift: int = 1

    def build(self, global_batch, seed):
        return Skipping(super().build(global_batch, seed), self.shift)


def recipe() -> Recipe:
    """Nothing is redone (`live`), so that no repeated step gives the defect away."""
    whole = tiny.recipe()
    return replace(whole, data=SkippingPoints(), policy=replace(whole.policy, lookback="live"))
