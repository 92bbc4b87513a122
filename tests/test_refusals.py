"""Refused before anything of a run is made: unknown token ids, and sizes nobody can use."""

import json
import math
import re
import threading
from dataclasses import dataclass, fields, replace

import numpy as np
import optax
import pytest

from elastix import AdamW, MeshSpec, SimulatedBackend, train
from elastix.data import Mixture, PackedRecords, PackedText, Text, TokenRecords, stream
from models.qwen3 import SIZES
from recipes import quickstart
from tests.recipes import tiny
from tests.test_background import FastClock

# --- token ids ------------------------------------------------------------------------------------

KNOWN = 256
MODEL = replace(SIZES["tiny"], vocab_size=KNOWN, hidden_size=16, num_layers=1)
LETTERS = {letter: number for number, letter in enumerate("abcdefghij")}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Text, a tokenizer of 11 ids whose last is 400, packed records, and a cache not made yet."""
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "words.txt").write_text("a b c d e f g h i j " * 40)
    model = tokenizers.models.WordLevel({**LETTERS, "<|endoftext|>": 400}, unk_token="a")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made_from = {"dtype": "<u2", "seq_len": 8, "vocab_size": 300}
    index = {"format_version": 1, "made_from": made_from, "shards": []}
    (tmp_path / "index.json").write_text(json.dumps(index))
    return tmp_path


TEXT = Text(files=("words.txt",), seq_len=8)
OTHER = replace(TEXT, tokenizer="tokenizer.json")
PACKED = PackedText(files=("words.txt",), seq_len=8, tokenizer="tokenizer.json")
DATA = [
    (TEXT, 257),
    (OTHER, 401),
    (PACKED, 401),
    (PackedRecords("."), 300),
    (TokenRecords(("none.arrayrecord",)), 65536),
    (Mixture((TEXT, PackedRecords("."), OTHER)), 401),
    (Mixture((PACKED, PACKED)), 401),
]


@pytest.mark.parametrize(("data", "ids"), DATA, ids=lambda x: type(x).__name__)
def test_a_model_without_all_token_ids_of_the_data_is_refused(folder, data, ids):
    recipe = replace(quickstart.recipe(), model=MODEL, data=data)
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match=told("data", ids)):
        train(recipe, backend=SimulatedBackend(4, 2), run_dir="run")
    assert sorted(folder.rglob("*")) == before, "not even the cache of the tokens was made"
    least = replace(recipe, model=replace(MODEL, vocab_size=ids))
    least.check_vocabulary()
    with pytest.raises(ValueError, match="^model.vocab_size="):
        replace(least, model=replace(MODEL, vocab_size=ids - 1)).check_vocabulary()


def told(name, ids):
    return rf"^model\.vocab_size={KNOWN} is less than {name}\.vocab_size={ids}, [^\n]* of {ids} or "


def test_data_that_are_evaluated_on_are_compared_too(folder):
    small = replace(quickstart.recipe(), model=replace(MODEL, vocab_size=257), data=TEXT)
    small.check_vocabulary()
    evaluated = replace(small, eval_data=OTHER, policy=replace(small.policy, eval_every=5))
    with pytest.raises(ValueError, match=r"less than eval_data\.vocab_size=401"):
        train(evaluated, backend=SimulatedBackend(4, 2), run_dir="run")
    replace(evaluated, policy=small.policy).check_vocabulary()  # nothing is evaluated


@dataclass(frozen=True)
class Opens:
    """Data that may be part of a mixture."""

    def open(self):
        raise NotImplementedError


def test_models_and_data_that_state_no_vocabulary_are_not_compared(folder):
    assert Mixture((Opens(),)).vocab_size is None
    assert Mixture((Opens(), TEXT)).vocab_size == 257
    replace(quickstart.recipe(), data=tiny.Points()).check_vocabulary()
    replace(tiny.recipe(), data=OTHER).check_vocabulary()


# --- sizes ----------------------------------------------------------------------------------------

NEVER = (math.nan, math.inf, -math.inf, 10**40, -(10**40), -1, -0.5, "x", (), 1j)
CONFIGS = (quickstart.recipe(), SIZES["tiny"], AdamW(clip=1.0, decay=10), MeshSpec(1, 1))
NUMBERS = [
    pytest.param(config, field.name, id=f"{type(config).__name__}.{field.name}")
    for config in CONFIGS
    for field in fields(config)
    if type(getattr(config, field.name)) in (int, float)
]


@pytest.mark.parametrize(("config", "name"), NUMBERS)
def test_no_number_of_a_configuration_may_be_anything(config, name):
    for value in (*NEVER, *([0.5] if type(getattr(config, name)) is int else [])):
        with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
            replace(config, **{name: value})
        assert f"{name}={value!r}: " in str(error.value)


@pytest.mark.parametrize("name", ["model", "data", "optimizer", "loss", "eval_data", "eval_loss"])
def test_what_is_no_configuration_and_no_function_is_refused(name):
    for value in (3, "x", ()):
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: use a ")):
            replace(tiny.recipe(), **{name: value})


def raising(error):
    def build(*_):
        raise error

    return build


@dataclass(frozen=True)
class Failing:
    """A configuration whose parts raise."""

    error: Exception

    def build(self, *_):
        raise self.error


@dataclass(frozen=True)
class BadState:
    """An optimizer that is built, and whose state cannot be."""

    def build(self):
        return optax.GradientTransformation(raising(ValueError("no such leaf")), optax.identity)


ERRORS = (ValueError("one\ntwo"), OverflowError(""), MemoryError("much"), OSError("gone"))
BROKEN = [
    *(({"model": Failing(error)}, "^model Failing") for error in ERRORS),
    *(({"optimizer": Failing(error)}, "^the recipe's model and optim") for error in ERRORS),
    *(({"data": Failing(error)}, "^data Failing") for error in ERRORS),
    (
        {"optimizer": BadState()},
        r"^the state of the optimizer cannot be built: ValueError: no such",
    ),
]


@pytest.mark.parametrize("part", ["model", "optimizer", "data"])
def test_a_mistake_in_the_code_of_a_part_keeps_its_traceback(part):
    recipe = replace(tiny.recipe(), **{part: Failing(KeyError("width"))})
    with pytest.raises(KeyError, match="width"):
        train(recipe, backend=SimulatedBackend(4, 2))


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_what_a_part_of_a_recipe_raises_is_one_line_with_the_place(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        train(
            replace(tiny.recipe(), **changes),
            backend=SimulatedBackend(4, 2),
            run_dir=tmp_path / "run",
        )
    assert "\n" not in str(error.value)
    assert "test_refusals.py line" in str(error.value) and "correct" in str(error.value)
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Silent:
    """Data whose second record comes only when `gate` opens."""

    gate: threading.Event

    def build(self, global_batch, seed):
        return stream(self, global_batch=global_batch, seed=seed, shuffle=False, fingerprint={})

    def __len__(self):
        return 100

    def __getitem__(self, index):
        assert index == 0 or self.gate.wait(60)
        return {"x": np.float32(index)}


def test_a_source_that_does_not_answer_at_first_is_refused_at_the_deadline(tmp_path):
    gate = threading.Event()
    backend = SimulatedBackend(4, 2, clock=FastClock())
    told = r"^data: reading the first batch did .* \(600 s\): see whether its source answers"
    with pytest.raises(ValueError, match=told):
        train(replace(tiny.recipe(), data=Silent(gate)), backend=backend, run_dir=tmp_path / "run")
    gate.set()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": replace(SIZES["tiny"], vocab_size=2 * 10**9)},
            r"^the train state is .* GiB, and each of 4 slices holds one, in .*: use a smaller",
        ),
        (
            {"global_batch": 24 * 10**7, "data": Text(seq_len=50_000)},
            r"^global_batch=240000000 examples of 200068 bytes are 48016320000000 .*; use fewer$",
        ),
    ],
)
def test_a_state_or_a_batch_that_memory_cannot_hold_is_refused(changes, message, tmp_path):
    recipe = replace(quickstart.recipe(), **changes)
    with pytest.raises(ValueError, match=message) as error:
        train(recipe, backend=SimulatedBackend(4, 2), run_dir=tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
