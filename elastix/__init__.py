"""JAX-native elastic training over several TPU slices: a run that loses a slice goes on with
those left, takes it back later, and ends with the weights it would have had."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastix.backends.pathways import PathwaysBackend
    from elastix.backends.simulated import SimulatedBackend, simulate_devices
    from elastix.faults import Lose, Return
    from elastix.machine import Policy
    from elastix.mesh import MeshSpec
    from elastix.recipe import AdamW, Recipe
    from elastix.run import Summary, train
else:
    from elastix.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "elastix.backends.pathways": ("PathwaysBackend",),
            "elastix.backends.simulated": ("SimulatedBackend", "simulate_devices"),
            "elastix.faults": ("Lose", "Return"),
            "elastix.machine": ("Policy",),
            "elastix.mesh": ("MeshSpec",),
            "elastix.recipe": ("AdamW", "Recipe"),
            "elastix.run": ("Summary", "train"),
        },
    )

__all__ = [
    "AdamW",
    "Lose",
    "MeshSpec",
    "PathwaysBackend",
    "Policy",
    "Recipe",
    "Return",
    "SimulatedBackend",
    "Summary",
    "simulate_devices",
    "train",
]
