"""From what is written on a command line to a `Recipe`: found, imported and called.

RECIPE is `file.py`, `file.py:function` or `package.module:function`. All three ways to one file
import it under one module name, because that name is part of the recipe's identity.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from elastix.recipe import Recipe
from elastix.user_code import is_installed, told

DEFAULT_FUNCTION = "recipe"
_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg", ".git")


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and how to speak of it: `given` as it was written, `name` for its run directory."""

    recipe: Recipe
    given: str
    name: str


def load_recipe(given: str) -> LoadedRecipe:
    """Import the module that `given` names and call its function.

    Raises:
        ValueError: there is no such file, module or function, it cannot be imported, it touches
            JAX's devices, or what it returns is no recipe; one line with the remedy.
    """
    place, _, function = given.partition(":")
    function = function or DEFAULT_FUNCTION
    touched_before = devices_are_touched()
    module = _import(given, place)
    make = getattr(module, function, None)
    if not callable(make):
        raise ValueError(
            f"recipe {given}: {module.__name__} has no function {function!r}: {_hint(module)}"
        )
    recipe = _call(given, make)
    if devices_are_touched() and not touched_before:
        raise ValueError(
            f"recipe {given} touches JAX's devices when it is imported: make arrays inside the "
            "model's build or the loss, not in the module or in the recipe's function"
        )
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"recipe {given}: {function}() returns {type(recipe).__name__}: return an "
            "elastix.Recipe"
        )
    stem = module.__name__.rpartition(".")[2]
    return LoadedRecipe(recipe, given, stem if function == "recipe" else f"{stem}-{function}")


def devices_are_touched() -> bool:
    """Whether JAX has started a backend, after which the number of devices is fixed.

    JAX has no public way to ask; this is the one place that asks the private way.
    """
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def _call(given: str, make: Callable[[], object]) -> object:
    try:
        return make()
    except ValueError as error:
        if isinstance(error, UnicodeError):
            raise ValueError(_failed(given, "fails", error)) from error
        raise  # of the recipe's own making: it names the value and the remedy
    except (Exception, SystemExit) as error:
        raise ValueError(_failed(given, "fails", error)) from error


def _hint(module: ModuleType) -> str:
    """The functions of a module that could be meant."""
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
        if not name.startswith("_") and not isinstance(value, type)
    ]
    return f"name one of {', '.join(own)} after a colon" if own else "write one"


# --- importing ----------------------------------------------------------------------------------


def _import(given: str, place: str) -> ModuleType:
    if place.endswith(".py") or os.sep in place:
        return _import_file(given, Path(place))
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", place):
        raise ValueError(f"recipe {given!r}: write file.py, file.py:function or package.module")
    _put_on_path(Path.cwd())
    try:
        spec = importlib.util.find_spec(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise ValueError(_failed(given, "cannot be imported", error)) from error
        spec = None
    except Exception as error:
        raise ValueError(_failed(given, "cannot be imported", error)) from error
    if spec is None or spec.origin is None:
        raise ValueError(
            f"recipe {given}: there is no module {place!r} here or among the installed packages: "
            "name a module, or a file that ends in .py"
        )
    origin = Path(spec.origin)
    if is_installed(origin):
        return _guarded(given, lambda: importlib.import_module(place))
    return _import_file(given, origin)


def _import_file(given: str, file: Path) -> ModuleType:
    if file.suffix != ".py":
        raise ValueError(f"recipe {given}: {file} is no Python file: name one that ends in .py")
    if not file.is_file():
        what = "is no file" if file.exists() else "does not exist"
        raise ValueError(f"recipe {given}: {file} {what}: name a Python file")
    file = file.resolve()
    root, name = module_name(file)
    _put_on_path(Path.cwd())
    _put_on_path(root)
    return _guarded(given, lambda: _load(file, name))


def module_name(file: Path) -> tuple[Path, str]:
    """The folder to import `file` from and its dotted name there: the same from any folder.

    It is the path from the project, which is the nearest folder above with a pyproject.toml, a
    setup file or .git (from its `src`, if the file is in there). Without a project, it is the
    name in the package, or of the file's folder and the file.
    """
    folder = file.parent
    above = (f for f in (folder, *folder.parents) if any((f / m).exists() for m in _PROJECT_FILES))
    root = next(above, None)
    if root is None:
        parents = (f for f in folder.parents if not (f / "__init__.py").exists())
        root = next(parents, folder)
    elif file.is_relative_to(root / "src"):
        root = root / "src"
    for candidate in (root, folder.parent, folder):
        parts = file.relative_to(candidate).with_suffix("").parts
        if all(part.isidentifier() for part in parts):
            return candidate, ".".join(parts)
    return folder, file.stem


def _load(file: Path, name: str) -> ModuleType:
    """Import `file` as `name`. Not by `import_module`: an installed package of the same first name
    (`tests`, `recipes`) would be found in its stead."""
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == file:
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _guarded(given: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise ValueError(_failed(given, "cannot be imported", error)) from error


def _failed(given: str, how: str, error: BaseException) -> str:
    return f"recipe {given} {how}: {told(error)}: correct it there"
