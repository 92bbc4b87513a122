"""`--FIELD VALUE`: any plain field of a recipe's tree, from the command line, by tyro."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, get_type_hints

import tyro

from elastix.recipe import Recipe

_HIDDEN: Any = tyro.conf.Suppress[tyro.conf.Fixed[Any]]  # type: ignore[misc]
_CONFIG = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)


def override(recipe: Recipe, arguments: Sequence[str]) -> Recipe:
    """The recipe with the fields that `arguments` name replaced.

    Raises:
        ValueError: there is no such field, or its value will not do; one line with the remedy.
    """
    if not arguments:
        return recipe
    flags = sorted(_flags(recipe))
    for argument in arguments:
        if argument.startswith("--"):
            _refuse_unknown(argument.partition("=")[0].replace("_", "-"), flags)
    return _parse(recipe, arguments)


def print_field_help(recipe: Recipe, prog: str) -> None:
    """Print what tyro tells of the recipe's fields: names, types, defaults and docstrings."""
    with contextlib.suppress(SystemExit):
        tyro.cli(
            _open_fields(recipe),
            prog=prog,
            description="Fields of this recipe, each with its default:",
            args=["--help"],
            config=_CONFIG,
        )


def _refuse_unknown(flag: str, flags: list[str]) -> None:
    if flag in flags:
        return
    last = _last(flag)
    close = [f for f in flags if _last(f) == last] + difflib.get_close_matches(flag, flags, n=3)
    names = ", ".join(dict.fromkeys(close)) or "listed by `elastix run RECIPE --help`"
    raise ValueError(f"{flag} is no option and no field of the recipe; the closest are {names}")


def _last(flag: str) -> str:
    return flag.removeprefix("--").rpartition(".")[2]


def _flags(value: Any, prefix: str = "--") -> Iterator[str]:
    """The flag of every field that a command line can set."""
    for field in _settable(value):
        name, inner = f"{prefix}{field.name.replace('_', '-')}", getattr(value, field.name)
        if _is_tree(inner):
            yield from _flags(inner, f"{name}.")
        elif not _is_code(value, field.name):
            yield name


def _settable(value: Any) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(value) if field.init]


def _is_tree(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_code(owner: Any, name: str) -> bool:
    """Whether the field is for a loss, hooks and the like: nothing a command line could hold."""
    return callable(getattr(owner, name)) or "Callable[" in str(_hints(owner).get(name))


def _hints(value: Any) -> dict[str, Any]:
    try:
        return get_type_hints(type(value), include_extras=True)
    except NameError:  # a name imported for the type checker alone
        return {}


def _open_fields(value: Any) -> Any:
    """The class of `value` with each field's type narrowed to what it holds, and with that as its
    default; fields that hold code are fixed and hidden.

    A recipe's fields are protocols (any model, any data), of which tyro could make no arguments.
    """
    kind, hints, fields = type(value), _hints(value), []
    for field in _settable(value):
        inner = getattr(value, field.name)
        hint = hints.get(field.name, type(inner))
        if _is_tree(inner):
            hint = _open_fields(inner)
        elif _is_code(value, field.name):
            hint = _HIDDEN
        default = hint() if _is_tree(inner) else inner
        make = dataclasses.field(default_factory=partial(_same, default))
        fields.append((field.name, hint, make))
    frozen = kind.__dataclass_params__.frozen
    opened = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=frozen)
    opened.__doc__ = kind.__doc__
    return opened


def _same(value: Any) -> Any:
    return value


def _close(value: Any, like: Any) -> Any:
    """Back from the narrowed classes to those of the recipe."""
    if not _is_tree(like):
        return value
    names = [field.name for field in _settable(like)]
    return type(like)(**{n: _close(getattr(value, n), getattr(like, n)) for n in names})


def _parse(recipe: Recipe, arguments: Sequence[str]) -> Recipe:
    """Let tyro parse; what it would print as a box becomes the line of a ValueError."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            parsed = tyro.cli(
                _open_fields(recipe), prog="elastix", args=list(arguments), config=_CONFIG
            )
    except SystemExit:
        raise ValueError(_one_line(printed.getvalue())) from None
    return _close(parsed, recipe)


def _one_line(box: str) -> str:
    """The message in tyro's box, which stands between its title and its first rule."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("│ ")
        if re.match(r"[╭╰─]|-{8}", text):
            sections.append([])
        else:
            sections[-1].append(text)
    message = " ".join(" ".join(sections[1] if sections[1:] else sections[0]).split())
    message = re.sub(r"^Error parsing (\w[\w.]*): ", "", message)
    return message.removeprefix("Error parsing ").rstrip(".")
