"""Who imports whom: decisions are pure and devices are at the edge. Each rule is seen to fail."""

import ast
import graphlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
# One file holds a whole model family, or all tests of a module.
MAX_LINES = {"models": 450, "tests": 850}
DEFAULT_MAX_LINES = 350
NOT_OURS = {"build", "dist", "runs", "shared"}

# Beside the standard library, a module whose name matches may import these alone.
ALLOWED = {
    r"recipes\b": {"elastix", "models", "recipes"},
    r"models\b": {"jax", "equinox", "einops", "jaxtyping", "models"},
    r"elastix\.machine\b": {"elastix.machine"},
    r"elastix\.recoveries$": {"elastix.machine"},
    r"elastix\.jsonl$": set(),
    r"elastix\.event_log$": {"elastix.machine", "elastix.jsonl"},
    r"elastix\.(replay|explain)$": {"elastix.machine", "elastix.event_log", "elastix.replay"},
    r"elastix\.(faults|goodput|goodput_model|durations|lazy)$": set(),
}
# These may be imported by modules whose names match, and by nobody else in these packages.
RESERVED = {
    "pathwaysutils": r"elastix\.(backends\.pathways|launch\.jobset)$",
    "elastix.cli": r"elastix\.__main__$",
}
RESTRICTED = ("elastix", "models", "recipes")

# Modules that must load with the standard library alone.
PURE = (
    *("machine", "recoveries", "faults", "goodput", "jsonl", "event_log", "replay", "explain"),
    *("lazy", "goodput_model", "durations"),
)


class Import(NamedTuple):
    """One import: the module named, and what `from` takes out of it."""

    line: int
    module: str
    name: str = ""
    at_load: bool = True

    def is_of(self, package: str) -> bool:
        return f"{self.module}.{self.name}.".startswith(f"{package}.")


def python_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        if path.suffix == ".py":
            yield path
        elif path.is_dir() and path.name[0] != "." and path.name not in NOT_OURS:
            yield from sorted(path.rglob("*.py"))


def modules(root: Path) -> dict[str, Path]:
    """The modules of the restricted packages, by dotted name."""
    found = {}
    for path in python_files(root):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in RESTRICTED:
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(module: str, path: Path) -> list[Import]:
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    return list(_imports(ast.parse(path.read_text()).body, package, True))


def _imports(nodes: list[ast.AST], package: str, at_load: bool) -> Iterator[Import]:
    for node in nodes:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(node.lineno, alias.name, at_load=at_load)
            case ast.ImportFrom():
                parents = package.split(".")[: 1 - node.level or None] if node.level else []
                base = ".".join([*parents, *filter(None, [node.module])])
                for alias in node.names:
                    yield Import(node.lineno, base, alias.name, at_load)
            case ast.If() if ast.unparse(node.test).endswith("TYPE_CHECKING"):
                yield from _imports(node.body, package, False)
                yield from _imports(node.orelse, package, at_load)
            case _:
                function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
                inside = at_load and not isinstance(node, function)
                yield from _imports(list(ast.iter_child_nodes(node)), package, inside)


def broken_rules(root: Path) -> list[str]:
    """Every violation in the tree at `root`, one line each."""
    found = modules(root)
    read = {module: imports(module, path) for module, path in found.items()}
    return [
        *(
            f"{module}:{i.line} {problem}"
            for module in read
            for i, problem in _misplaced(module, read)
        ),
        *_cycles(read),
        *_bad_files(root),
    ]


def _misplaced(module: str, read: dict[str, list[Import]]) -> Iterator[tuple[Import, str]]:
    for item in read[module]:
        top = item.module.partition(".")[0]
        for pattern, allowed in ALLOWED.items():
            known = top in sys.stdlib_module_names or any(item.is_of(name) for name in allowed)
            if re.match(pattern, module) and not known:
                yield item, f"imports {item.module}"
        for reserved, pattern in RESERVED.items():
            if item.is_of(reserved) and not re.match(pattern, module):
                yield item, f"imports {reserved}"


def _cycles(read: dict[str, list[Import]]) -> list[str]:
    graph = {module: set() for module in read}
    for module, items in read.items():
        for item in items:
            target = f"{item.module}.{item.name}"
            target = target if target in read else item.module
            if item.at_load and target in read:
                graph[module].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["cycle: " + " <- ".join(error.args[1])]
    return []


def _bad_files(root: Path) -> Iterator[str]:
    for path in python_files(root):
        name, lines = path.relative_to(root), path.read_text().count("\n")
        if path.name == "utils.py":
            yield f"{name}: name it after what it does"
        most = MAX_LINES.get(name.parts[0], DEFAULT_MAX_LINES)
        if lines > most:
            yield f"{name}: {lines} lines, at most {most}"


def test_the_layout_of_the_repository():
    assert len(modules(ROOT)) > 20
    problems = broken_rules(ROOT)
    assert not problems, "\n".join(problems)


PLANTED = [
    ({"recipes/a.py": "import jax"}, "recipes.a:1 imports jax"),
    ({"recipes/a.py": "from optax import adamw"}, "recipes.a:1 imports optax"),
    ({"models/a.py": "import elastix.mesh"}, "models.a:1 imports elastix.mesh"),
    ({"models/a.py": "def f():\n  import numpy as np"}, "models.a:2 imports numpy"),
    ({"elastix/machine/a.py": "import jax"}, "elastix.machine.a:1 imports jax"),
    (
        {"elastix/machine/__init__.py": "from elastix import mesh"},
        "elastix.machine:1 imports elastix",
    ),
    (
        {"elastix/machine/a.py": "from ..mesh import Mesh"},
        "elastix.machine.a:1 imports elastix.mesh",
    ),
    ({"elastix/machine/__init__.py": "from .. import x"}, "elastix.machine:1 imports elastix"),
    (
        {"elastix/recoveries.py": "import elastix.faults"},
        "elastix.recoveries:1 imports elastix.faults",
    ),
    ({"elastix/faults.py": "if 1:\n  import numpy"}, "elastix.faults:2 imports numpy"),
    (
        {"elastix/replay.py": "from elastix.run import train"},
        "elastix.replay:1 imports elastix.run",
    ),
    ({"elastix/event_log.py": "import numpy"}, "elastix.event_log:1 imports numpy"),
    (
        {"elastix/goodput.py": "if TYPE_CHECKING:\n  import elastix.machine"},
        "elastix.goodput:2 imports elastix.machine",
    ),
    ({"elastix/run.py": "import pathwaysutils.x"}, "elastix.run:1 imports pathwaysutils"),
    (
        {"elastix/launch/xpk.py": "import pathwaysutils"},
        "elastix.launch.xpk:1 imports pathwaysutils",
    ),
    ({"elastix/run.py": "from elastix import cli"}, "elastix.run:1 imports elastix.cli"),
    ({"elastix/run.py": "from .cli import main"}, "elastix.run:1 imports elastix.cli"),
    (
        {"elastix/a.py": "import elastix.b", "elastix/b.py": "class B:\n  from . import a"},
        "cycle: elastix.a <- elastix.b <- elastix.a",
    ),
    ({"elastix/utils.py": ""}, "elastix/utils.py: name it after what it does"),
    ({"elastix/a/b.py": "\n" * 351}, "elastix/a/b.py: 351 lines, at most 350"),
    ({"tests/a/b.py": "\n" * 851}, "tests/a/b.py: 851 lines, at most 850"),
]


def plant(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)


@pytest.mark.parametrize(("files", "problem"), PLANTED, ids=[problem for _, problem in PLANTED])
def test_a_planted_violation_is_found(tmp_path, files, problem):
    plant(tmp_path, files)
    assert broken_rules(tmp_path) == [problem]


def test_what_is_allowed_is_not_reported(tmp_path):
    plant(
        tmp_path,
        {
            "recipes/a.py": "import os.path\nfrom elastix.data import Text\nimport models.qwen3",
            "models/a.py": "import jax.numpy as jnp\nfrom models import b\nfrom .b import c",
            "models/b.py": "from einops import rearrange",
            "elastix/machine/__init__.py": "from elastix.machine.a import b\nfrom . import a",
            "elastix/machine/a.py": "def f():\n  from elastix.machine import g",
            "elastix/recoveries.py": "from elastix.machine import State\nfrom . import machine",
            "elastix/backends/pathways.py": "import pathwaysutils",
            "elastix/launch/jobset.py": "from pathwaysutils.x import y",
            "elastix/__main__.py": "from elastix.cli import main",
            "elastix/a.py": "if typing.TYPE_CHECKING:\n  import elastix.b",
            "elastix/b.py": "import elastix.a\ndef f():\n  import elastix.c",
            "elastix/c.py": "import elastix.b" + "\n" * 350,
            "tests/a.py": "import elastix.cli",
            "runs/a.py": "\n" * 351,
        },
    )
    assert broken_rules(tmp_path) == []


LOAD = """
import importlib, pkgutil, sys, types

# Importing elastix itself would load JAX: a bare package stands in for it.
elastix = sys.modules["elastix"] = types.ModuleType("elastix")
elastix.__path__ = [sys.argv[1]]
before = set(sys.modules)
for name in sys.argv[2:]:
    module = importlib.import_module(f"elastix.{name}")
    for inner in pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}."):
        importlib.import_module(inner.name)
assert "elastix.machine.rules" in sys.modules
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - sys.stdlib_module_names - {"elastix"}))
"""


def loaded_by_the_pure_modules(package: Path) -> list[str]:
    """Top-level packages, outside the standard library, that loading them brings in."""
    names = [
        name for name in PURE if (package / name).exists() or (package / f"{name}.py").exists()
    ]
    command = [sys.executable, "-c", LOAD, str(package), *names]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_the_pure_modules_load_the_standard_library_alone():
    assert loaded_by_the_pure_modules(ROOT / "elastix") == []


@pytest.mark.parametrize("module", ["machine/values", "recoveries", "event_log", "replay"])
def test_jax_planted_in_a_pure_module_is_found(tmp_path, module):
    shutil.copytree(ROOT / "elastix", tmp_path / "elastix")
    planted = tmp_path / "elastix" / f"{module}.py"
    planted.write_text(planted.read_text() + "\nimport jax\n")
    assert {"jax", "numpy"} <= set(loaded_by_the_pure_modules(tmp_path / "elastix"))
