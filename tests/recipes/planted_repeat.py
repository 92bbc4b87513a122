"""Planted defect: a stream that is taken up again repeats a batch."""

from dataclasses import replace

from elastix import Recipe
from tests.recipes import planted_skip


def recipe() -> Recipe:
    return replace(planted_skip.recipe(), data=planted_skip.SkippingPoints(shift=-1))
