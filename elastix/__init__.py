"""JAX-native elastic training over several TPU slices: a run that loses a slice goes on with
those left, takes it back later, and ends with the weights it would have had."""

from elastix.backends.simulated import SimulatedBackend, simulate_devices
from elastix.faults import Lose, Return
from elastix.machine import Policy
from elastix.mesh import MeshSpec
from elastix.recipe import AdamW, Recipe
from elastix.run import Summary, train

__all__ = [
    "AdamW",
    "Lose",
    "MeshSpec",
    "Policy",
    "Recipe",
    "Return",
    "SimulatedBackend",
    "Summary",
    "simulate_devices",
    "train",
]
