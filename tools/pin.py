"""Writes constraints.txt: the newest versions of everything elastix uses, for several Pythons.

    python tools/pin.py python3.11 python3.12 python3.13

For each interpreter named, the dependencies and all extras of pyproject.toml are installed in a
temporary venv and listed. A version that is the same wherever a package is needed gets one line;
versions that differ get one line for each Python. Standard library only.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Written by `make pins` (tools/pin.py) from pyproject.toml; not to be edited by hand.\n"
TOOLS = {"pip", "setuptools", "wheel"}


def main(interpreters: list[str]) -> int:
    if not interpreters:
        print("usage: python tools/pin.py python3.11 python3.12 python3.13", file=sys.stderr)
        return 2
    wanted = requirements((ROOT / "pyproject.toml").read_text())
    pins = dict(resolve(interpreter, wanted) for interpreter in interpreters)
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(merge(pins)) + "\n")
    return 0


def requirements(pyproject: str) -> list[str]:
    """The core dependencies and those of every extra."""
    project = tomllib.loads(pyproject)["project"]
    return [*project["dependencies"], *chain(*project["optional-dependencies"].values())]


def resolve(interpreter: str, wanted: Iterable[str]) -> tuple[str, dict[str, str]]:
    """(Python version as "3.12", version by package) of a fresh installation of `wanted`."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        python = f"{folder}/bin/python"
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        version = "import sys; print('%d.%d' % sys.version_info[:2])"
        version = subprocess.check_output([python, "-c", version], text=True).strip()
        print(f"installing for Python {version}", flush=True)
        subprocess.run([*pip, "install", "--quiet", "--quiet", "--no-compile", *wanted], check=True)
        listed = json.loads(subprocess.check_output([*pip, "list", "--format=json"]))
    return version, {p["name"]: p["version"] for p in listed if p["name"] not in TOOLS}


def merge(pins: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Lines of a constraints file, sorted, from {Python version: {package: version}}."""
    lines = []
    for name in sorted(set().union(*pins.values()), key=str.lower):
        found = {python: versions[name] for python, versions in pins.items() if name in versions}
        if len(set(found.values())) == 1:
            lines.append(f"{name}=={next(iter(found.values()))}")
        else:
            lines += [
                f'{name}=={version} ; python_version == "{python}"'
                for python, version in found.items()
            ]
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
