"""`elastix launch`: the edge. Reads the recipe, checks, and prints, writes or applies manifests."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from elastix.launch.checks import check, warnings
from elastix.launch.jobset import build_jobset
from elastix.launch.manifest import manifests
from elastix.launch.review import review
from elastix.launch.spec import Head, Launch
from elastix.launch.summary import summary
from elastix.launch.tpus import TPUS, parse_slice_type
from elastix.launch.xpk import xpk_command, xpk_notes
from elastix.overrides import override
from elastix.recipe_loading import load_recipe
from elastix.usage import UsageParser

_GKE = """\
Run a recipe on Cloud TPU slices, through Pathways on Google Kubernetes Engine: a JobSet of one
head, which holds `elastix run` with Pathways' resource manager and proxy beside it, and one job for
each slice. Without --render and --apply nothing is made, and what it would be is told.

The recipe is loaded here, for its policy, and again in the image, where RECIPE must name the same
file: the Dockerfile of elastix copies recipes/ and models/."""

_XPK = """\
Print the xpk command that launches the same, as far as xpk can, and what it cannot. The options are
those of `elastix launch gke`."""

_MORE = """\
fields of the recipe stand after --, as in
  elastix launch gke recipes/quickstart.py --tpu v5e:4x4 --slices 3 --image REGION-docker.pkg.dev/\
PROJECT/REPO/elastix:1 --pathways-tag TAG --bucket gs://BUCKET --render run.yaml \
-- --policy.min-slices 2

exit status: 0, 1 if kubectl failed, 2 bad input, nothing was written"""


def launch_main(argv: Sequence[str]) -> int:
    """`elastix launch`: 0, or 1 if kubectl failed.

    Raises:
        ValueError: bad input, in one line with the remedy; nothing was written or applied.
    """
    options, fields = _split(argv)
    try:
        given = _parser().parse_args(options)
    except SystemExit as helped:  # --help, after it was printed
        return int(helped.code or 0)
    launch = _launch(given, fields)
    check(launch)
    for line in warnings(launch, _jax_version()):
        print(f"elastix: warning: {line}", file=sys.stderr)
    return _print_xpk(launch) if given.command == "xpk" else _gke(launch, given)


def _gke(launch: Launch, given: argparse.Namespace) -> int:
    jobset = build_jobset(launch)
    review(jobset, launch)
    text = _yaml(manifests(jobset, launch))
    if given.apply:
        return _apply(text)
    if given.render == "-":
        print(text, end="")
    elif given.render is not None:
        _write(Path(given.render), text)
    else:
        print(summary(launch))
        print("nothing was made: --render FILE writes the manifests, --apply applies them")
    return 0


def _print_xpk(launch: Launch) -> int:
    text = xpk_command(launch)
    for note in xpk_notes(launch):
        print(f"# otherwise than elastix launch gke: {note}")
    print(text)
    return 0


# --- from the command line to a launch ------------------------------------------------------------


def _launch(given: argparse.Namespace, fields: tuple[str, ...]) -> Launch:
    loaded = load_recipe(given.recipe)
    recipe = override(loaded.recipe, fields)
    slice_type = parse_slice_type(given.tpu)
    slices = _number("--slices", given.slices)
    recipe.check_slices(slices)
    recipe.mesh.inner_shape(slice_type.devices)
    return Launch(
        recipe=given.recipe,
        fields=fields,
        num_steps=recipe.num_steps,
        policy=recipe.policy,
        name=_name(loaded.name) if given.name is None else given.name,
        slice_type=slice_type,
        slices=slices,
        spares=_number("--spares", given.spares),
        missing=slices if given.missing is None else _number("--missing", given.missing),
        image=given.image,
        pathways_tag=given.pathways_tag,
        bucket=given.bucket,
        data_bucket=given.data_bucket,
        namespace=given.namespace,
        queue=given.queue,
        priority=given.priority_class,
        priority_value=(
            None
            if given.priority_value is None
            else _number("--priority-value", given.priority_value)
        ),
        suspend_resume=given.suspend_resume,
        colocated_python=given.colocated_python,
        elastic_flag=given.elastic_flag,
        max_restarts=_number("--max-restarts", given.max_restarts),
        head=Head(given.head_node_pool, given.service_account, given.head_cpu, given.head_memory),
    )


def _name(recipe: str) -> str:
    """A recipe's name with what a JobSet's name may hold."""
    return re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-")


def _number(option: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,12}", text):
        raise ValueError(f"{option} {text}: use a whole number")
    return int(text)


def _jax_version() -> str:
    import jax

    return jax.__version__


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """(elastix's own options, the fields of the recipe: what stands after `--`)."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], tuple(words[at + 1 :])


# --- out ------------------------------------------------------------------------------------------


def _yaml(documents: list[dict[str, object]]) -> str:
    import yaml

    return yaml.safe_dump_all(documents, sort_keys=False, explicit_start=True)


def _write(path: Path, text: str) -> None:
    """Write a new file, whole or not at all; one that holds the same already is left as it is."""
    try:
        if path.is_file() and path.read_bytes() == text.encode():
            print(f"{path} holds it already")
            return
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        create(path, text)
    except FileExistsError:
        raise ValueError(
            f"--render {path} exists and holds something else: name another file, or remove it"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"--render {str(path)!r} cannot be written ({why}): name another file"
        ) from error
    print(f"{path}: apply it with kubectl apply -f {shlex.quote(str(path))}")


def create(path: Path, text: str) -> None:
    """Write a new file, or leave none: half a manifest may be one that Kubernetes takes.

    Raises:
        OSError: it cannot be written, or is there.
    """
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _apply(text: str) -> int:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise ValueError("--apply: there is no kubectl on the PATH: install it, or use --render")
    done = subprocess.run([kubectl, "apply", "-f", "-"], input=text, text=True)
    if done.returncode:
        print(f"elastix: kubectl apply ended with {done.returncode}: see above", file=sys.stderr)
    return 1 if done.returncode else 0


def _parser() -> UsageParser:
    parser = UsageParser(prog="elastix launch", description="Launch a recipe on Cloud TPU slices.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text, short in (
        ("gke", _GKE, "a JobSet for Kubernetes"),
        ("xpk", _XPK, "the xpk command that is equal to it"),
    ):
        child = commands.add_parser(
            name,
            help=short,
            usage=f"elastix launch {name} RECIPE [options] [-- --FIELD VALUE ...]",
            description=text,
            epilog=_MORE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _add_options(child)
        if name == "gke":
            out = child.add_mutually_exclusive_group()
            out.add_argument("--render", metavar="FILE", help="write the manifests; -: print them")
            out.add_argument("--apply", action="store_true", help="run kubectl apply with them")
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="file.py, file.py:function or package.module:function")
    add("--tpu", metavar="T", required=True, help=f"TYPE:TOPOLOGY, TYPE of {', '.join(TPUS)}")
    add("--slices", metavar="N", required=True, help="slices that the run trains on")
    add("--image", metavar="I", required=True, help="the controller's, with a tag or a digest")
    add("--pathways-tag", metavar="T", required=True, help="of Pathways' images, for the same JAX")
    add("--bucket", metavar="B", required=True, help="gs://NAME or gs://NAME/FOLDER, for the run")
    add("--data-bucket", metavar="B", help="gs://NAME, mounted at /data, read-only (default: none)")
    add("--name", metavar="N", help="of the JobSet and of the run (default: the recipe's)")
    add("--namespace", metavar="NS", default="default", help="(default: default)")
    add("--queue", metavar="Q", help="LocalQueue of Kueue (default: none)")
    add("--priority-class", metavar="C", help="PriorityClass of all pods (default: none)")
    add("--priority-value", metavar="N", help="make that PriorityClass too, with this value")
    add("--spares", metavar="N", default="0", help="slices more that take over (default: 0)")
    add("--missing", metavar="N", help="slices that may be missing at once (default: all)")
    add(
        "--suspend-resume",
        action="store_true",
        help="give workers the time of a save to write out their memory before a preemption",
    )
    add("--colocated-python", metavar="I", help="image of a Python sidecar of each worker")
    add(
        "--elastic-flag",
        choices=("num_elastic_slices", "num_elastic_instances"),
        default="num_elastic_slices",
        help="how the proxy's flag is spelled (default: num_elastic_slices)",
    )
    add("--max-restarts", metavar="N", default="100", help="of the whole JobSet (default: 100)")
    head = Head()
    add("--head-node-pool", metavar="P", default=head.node_pool, help=f"({head.node_pool})")
    add("--head-cpu", metavar="N", default=head.cpu, help=f"of the controller ({head.cpu})")
    add("--head-memory", metavar="M", default=head.memory, help=f"({head.memory})")
    add("--service-account", metavar="S", default=head.service_account, help="of the head")
