"""What was written on the command line, as one frozen value; and the help for it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elastix.faults import Corrupt, Fault, Hang, Lose, Return, parse_script
from elastix.faults import parse as parse_fault
from elastix.usage import UsageParser

_ABOUT = """\
elastix trains on several slices of devices, loses some, and carries on.

  elastix run RECIPE      train, or resume, a recipe
  elastix verify RECIPE   train it with and without the faults given, and compare the bits
  elastix notify RUN_DIR  tell a run that slices will be taken away
  elastix replay RUN_DIR  feed the events of a run to the machine again, and explain its decisions
  elastix checkpoints RUN_DIR  list a run's checkpoints, verify them, and say which a resume takes
  elastix simulate        run fault schedules on ghosts instead of arrays, thousands by seed
  elastix local-pathways  a Pathways on this machine, whose slices are processes to kill
  elastix advise RECIPE   how often to save, how long to wait, and what share of time will be useful
  elastix bench RECIPE    measure what a step and a lost slice cost, beside what others take
  elastix data pack       tokenize and pack documents into files to train from
  elastix launch gke RECIPE  manifests that run it on Cloud TPU slices; launch xpk: the xpk command

RECIPE is file.py, file.py:function or package.module:function; the function, `recipe` unless it
is named, returns an elastix.Recipe.

examples:
  elastix run recipes/quickstart.py
  elastix run recipes/quickstart.py --lose 1@40 --return 1@80
  elastix verify recipes/quickstart.py --lose 1@40 --lose 0@60 --return 1@80 --return 0@80

`elastix run --help` tells the options, `elastix run RECIPE --help` also the recipe's own fields."""

_RUN = """\
Train a recipe to its end, through every loss and return of slices. Run again with the same run
directory, it resumes from its newest good checkpoint.

examples:
  elastix run recipes/quickstart.py
  elastix run recipes/quickstart.py --steps 60 --lose 1@20 --return 1@40
  elastix run recipes.quickstart:recipe --slices 2 --policy.min-slices 2 --optimizer.peak 1e-3"""

_VERIFY = """\
Train a recipe twice, in two processes: with the faults given and without any. The exit status is 0
only if both end with the same bits (state_sha256), after the same examples in the same order
(consumed), with the same losses; and if every fault fired, the state is finite, the checkpoint on
disk is the state reported, and training changed the model.

example:
  elastix verify recipes/quickstart.py --lose 1@40 --lose 0@60 --return 1@80 --return 0@80"""

_MORE = """\
fields of the recipe:
  --FIELD VALUE           replaces any plain field of the recipe, such as --global-batch 48,
                          --optimizer.peak 1e-3, --model.num-layers 2 or --policy.min-slices 2;
                          all come after RECIPE, and `elastix run RECIPE --help` lists them

exit status:
  0 done   1 failed, with the reason on one line   2 usage or bad input, nothing was changed
  75 preempted: the same command resumes   130 interrupted twice (the first Ctrl-C saves and stops)

a run directory holds:
  recipe.json     whose it is, and with which versions it was run
  metrics.jsonl   one row a step: loss, slices, seconds, tokens, learning_rate
  evaluations.jsonl  one row an evaluation, if policy.eval_every asks for them
  events.jsonl    every event, and the state it led to
  recoveries.jsonl   what each recovery was and cost
  checkpoints/    the newest checkpoints, each with checksums
  summary.json    how the run ended: outcome, state_sha256, consumed, recoveries, compiles"""


_TEXTS = {"run": _RUN, "verify": _VERIFY}


@dataclass(frozen=True)
class Command:
    """One command; `fields` are the arguments that name fields of the recipe."""

    name: str
    recipe: str
    run_dir: str | None = None
    fork: str | None = None
    backend: str = "simulated"
    slices: int = 4
    devices_per_slice: int = 2
    faults: tuple[Fault, ...] = ()
    fields: tuple[str, ...] = ()
    compile_cache: str | None = None
    keep: bool = False
    wants_help: bool = False

    def child_arguments(self, run_dir: str, with_faults: bool) -> list[str]:
        """The arguments of `elastix run` that run the same, in another directory."""
        faults = [part for fault in self.faults for part in str(fault).split()]
        return [
            *("run", self.recipe, "--run-dir", run_dir, "--backend", self.backend),
            *("--slices", str(self.slices), "--devices-per-slice", str(self.devices_per_slice)),
            *(("--compile-cache", self.compile_cache) if self.compile_cache else ()),
            *(faults if with_faults else ()),
            *self.fields,
        ]


def parse(argv: Sequence[str]) -> Command | None:
    """The command that `argv` gives; None if it asked for general help, which was printed.

    Raises:
        ValueError: it is no command that elastix knows; one line with the remedy.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_ABOUT)
        return None
    name, *rest = argv
    if name not in _TEXTS:
        raise ValueError(f"{name!r} is no command: elastix --help lists them")
    parser = _parser(name)
    options, places, fields = _split(rest)
    wants_help = "--help" in options
    if wants_help:
        parser.print_help()
        if not places:
            return None
        options.remove("--help")
    if len(places) != 1:
        what = f"{len(places)} RECIPEs: {', '.join(places)}" if places else "no RECIPE"
        raise ValueError(
            f"{what}: write `elastix {name} RECIPE`, with fields of the recipe after it"
        )
    return _command(name, places[0], parser.parse_args([*options, places[0]]), fields, wants_help)


def _command(
    name: str, recipe: str, given: argparse.Namespace, fields: list[str], wants_help: bool
) -> Command:
    losses = [parse_fault(Lose, text) for text in given.lose]
    hangs = [parse_fault(Hang, text) for text in given.hang]
    corrupt = [parse_fault(Corrupt, text) for text in given.corrupt]
    returns = [parse_fault(Return, text) for text in vars(given)["return"]]
    sizes = {option: vars(given)[option] for option in _SIZES}
    for option, size in sizes.items():
        flag = f"--{option.replace('_', '-')} {size}"
        if size is not None and size < 1:
            raise ValueError(f"{flag}: use 1 or more")
        if size is not None and given.backend == "pathways":
            raise ValueError(f"{flag}: Pathways has the slices that its proxy shows; leave it out")
    if name == "verify" and given.backend == "pathways":
        raise ValueError(
            "--backend pathways: elastix verify compares two runs on simulated slices; leave it out"
        )
    if given.steps is not None:
        fields = ["--num-steps", str(given.steps), *fields]
    return Command(
        name=name,
        recipe=recipe,
        run_dir=given.run_dir,
        fork=getattr(given, "fork", None),
        backend=given.backend,
        **{option: size for option, size in sizes.items() if size is not None},
        faults=(*losses, *hangs, *corrupt, *returns, *_scripted(given.faults)),
        fields=tuple(fields),
        compile_cache=given.compile_cache,
        keep=getattr(given, "keep", False),
        wants_help=wants_help,
    )


def _scripted(path: str | None) -> tuple[Fault, ...]:
    """The faults of a script in a file."""
    if path is None:
        return ()
    try:
        return parse_script(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no text"
        raise ValueError(
            f"--faults {path} cannot be read ({why}): name a file of lines such as 'lose 1@40'"
        ) from error


_SIZES = ("slices", "devices_per_slice")
"""Of the cluster that is simulated."""
_WITH_VALUE = (
    *("--run-dir", "--fork", "--backend", "--slices", "--devices-per-slice", "--steps"),
    *("--lose", "--hang", "--corrupt", "--return", "--faults", "--compile-cache"),
)
_ALONE = ("--keep", "--help")


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """(elastix's own options with their values, what stands before any field, fields of the recipe
    with all that follows each)."""
    options: list[str] = []
    places: list[str] = []
    fields: list[str] = []
    into = places
    rest = iter("--help" if a == "-h" else a for a in arguments)
    for argument in rest:
        if argument in _ALONE:
            options.append(argument)
        elif argument.partition("=")[0] in _WITH_VALUE:
            options.append(argument)
            if "=" not in argument:
                options += [value] if (value := next(rest, None)) is not None else []
        else:
            if argument.startswith("--"):
                into = fields
            into.append(argument)
    return options, places, fields


def _parser(name: str) -> argparse.ArgumentParser:
    parser = UsageParser(
        prog=f"elastix {name}",
        usage=f"elastix {name} RECIPE [options] [--FIELD VALUE]...",
        description=_TEXTS[name],
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="file.py, file.py:function or package.module:function")
    default = "runs/<recipe>" if name == "run" else "a temporary one, removed on success"
    if name == "run":
        add("--fork", metavar="DIR@STEP", help="begin from this checkpoint of another run")
    folder = "directory, or gs://BUCKET/FOLDER," if name == "run" else "directory"
    add("--run-dir", metavar="DIR", help=f"{folder} of the run's files (default: {default})")
    add(
        "--backend",
        metavar="NAME",
        default="simulated",
        help="simulated: CPU devices grouped into slices (the default); pathways: Cloud TPU slices",
    )
    add("--slices", metavar="N", type=int, help="number of simulated slices (default: 4)")
    add("--devices-per-slice", metavar="N", type=int, help="of simulated slices (default: 2)")
    add("--steps", metavar="N", type=int, help="train so many steps: short for --num-steps N")
    fault = partial(add, action="append", default=[], metavar="S@STEP")
    fault("--lose", help="lose slice S, counted from 0, while STEP runs; S@12.5s: at 12.5 s")
    fault("--hang", help="slice S answers, but finishes no step from STEP on")
    fault("--corrupt", help="flip one bit of each array of slice S while STEP runs, in silence")
    fault("--return", help="bring it back, with empty memory, when STEP is committed")
    add(
        "--faults",
        metavar="FILE",
        help="a script: lose, hang, corrupt or return S@STEP a line",
    )
    add(
        "--compile-cache",
        metavar="DIR|off",
        help="where compiled programs are kept between runs (default: ~/.cache/elastix/jax)",
    )
    if name == "verify":
        add("--keep", action="store_true", help="keep both run directories on success too")
    return parser
