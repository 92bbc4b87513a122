"""What comes before training: the recipe with its overrides, and JAX set up for the backend."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import jax

from elastix.backends import Backend
from elastix.backends.simulated import SimulatedBackend, simulate_devices
from elastix.command import Command
from elastix.overrides import override
from elastix.recipe import Recipe
from elastix.recipe_loading import LoadedRecipe, load_recipe


def prepare(command: Command) -> LoadedRecipe:
    """The recipe that `command` names, with the fields it gives.

    Raises:
        ValueError: bad input, in one line with the remedy.
    """
    if command.backend not in ("simulated", "pathways"):
        raise ValueError(f"--backend {command.backend}: use simulated or pathways")
    loaded = load_recipe(command.recipe)
    return replace(loaded, recipe=override(loaded.recipe, command.fields))


def open_backend(command: Command, recipe: Recipe) -> Backend:
    """The backend that `command` names, with its devices.

    Raises:
        ValueError: bad input, in one line with the remedy.
    """
    if command.backend == "pathways":
        return pathways_backend(command)
    recipe.check_slices(command.slices)  # before so many devices are made
    return simulated_backend(command)


def pathways_backend(command: Command) -> Backend:
    """The slices of a Pathways proxy. What would not be used there is refused."""
    from elastix.backends.pathways import PathwaysBackend, refuse_faults

    refuse_faults(command.faults)
    if command.compile_cache not in (None, "off"):
        raise ValueError(
            f"--compile-cache {command.compile_cache}: Pathways keeps compiled programs itself; "
            "leave it out"
        )
    backend = PathwaysBackend()
    for note in backend.notes:
        print(f"elastix: {note}", flush=True)
    return backend


def simulated_backend(command: Command) -> SimulatedBackend:
    """Give JAX the CPU devices that `command` asks for, and a cache of compiled programs."""
    keep_compiled_programs(command.compile_cache)
    jax.config.update("jax_platforms", "cpu")
    simulate_devices(command.slices * command.devices_per_slice)
    return SimulatedBackend(command.slices, command.devices_per_slice, command.faults)


def keep_compiled_programs(where: str | None) -> None:
    """Turn on JAX's persistent cache in directory `where`; "off": leave it as it is; None: a
    directory of the user's, if one can be written.

    Raises:
        ValueError: the directory named cannot be written.
    """
    if where == "off":
        return
    try:
        folder = Path(where) if where else _users_cache()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is read-only")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        if where:
            raise ValueError(
                f"--compile-cache {where} cannot be written ({error}): name another directory, "
                "or off"
            ) from error
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _users_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "elastix" / "jax"
