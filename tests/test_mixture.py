"""Mixtures: the share of each source, its own epochs, and the one position of them all."""

import collections
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastix.data import MinLength, Mixed, Mixture, PackedText, Text, TokenRecords, stream
from elastix.data.mixture import MOST_PERIOD, quota_schedule, shares
from elastix.overrides import override
from elastix.run_directory import RunDirectory
from tests.recipes import tiny
from tests.test_data import assert_equal, ids, refuses, take
from tests.test_packing import cache, some_texts, write_documents  # noqa: F401

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=6)


def rows(size, source):
    return [{"source": np.int32(source), "x": np.int32(i)} for i in range(size)]


# The schedule


@settings(max_examples=200)
@given(WEIGHTS)
def test_each_source_has_its_share_of_every_beginning(weights):
    counts = shares(weights)
    period = sum(counts)
    schedule = quota_schedule(counts).tolist()
    had = [0] * len(counts)
    for n, source in enumerate(schedule, 1):
        had[source] += 1
        assert all(abs(h - n * c / period) < 1 for h, c in zip(had, counts, strict=True))
    assert had == counts


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([3, 1], [3, 1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([10, 20], [1, 2]),
        ([1e-4, 1], [1, 10_000]),
        ([5], [1]),
        ([0.1, 0.1], [1, 1]),
        ([0.5, 0.25, 1], [2, 1, 4]),
    ],
)
def test_only_the_ratios_of_weights_count(weights, expected):
    assert shares(weights) == expected


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([], ["nothing"]),
        ([1, 0], ["weight=0", "leave out"]),
        ([-1], ["weight=-1"]),
        ([True], ["weight=True"]),
        (["1"], ["weight='1'"]),
        ([float("nan")], ["weight=nan"]),
        ([float("inf")], ["weight=inf"]),
        ([1 / 3, 0.5], [str(MOST_PERIOD), "round"]),
        ([1, 10**9], [str(MOST_PERIOD), "whole numbers"]),
    ],
)
def test_weights_that_will_not_do(weights, words):
    refuses(lambda: shares(weights), *words)


def test_the_schedule_never_changes():
    # Pinned: another schedule would part every run that resumes from what it consumed before.
    assert quota_schedule([3, 1]).tolist() == [0, 0, 1, 0]
    assert quota_schedule([4, 3, 2]).tolist() == [0, 1, 2, 0, 1, 0, 2, 1, 0]


# Mixed sources


@settings(max_examples=60)
@given(
    weights=WEIGHTS,
    sizes=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    seed=st.integers(0, 99),
    shuffle=st.one_of(st.booleans(), st.integers(1, 9)),
)
def test_each_source_goes_through_its_own_epochs(weights, sizes, seed, shuffle):
    parts = [(rows(size, s), w) for s, (size, w) in enumerate(zip(sizes, weights, strict=False))]
    mixed = Mixed(*parts)
    order = mixed.order(seed, shuffle)
    seen = collections.defaultdict(list)
    for number in range(300):
        row = mixed[order(number)]
        source, count = mixed.example(number)
        assert row["source"] == source and len(seen[source]) == count
        seen[source].append(int(row["x"]))
    for source, consumed in seen.items():
        for start in range(0, len(consumed), sizes[source]):
            epoch = consumed[start : start + sizes[source]]
            assert len(set(epoch)) == len(epoch)  # nothing twice in an epoch


def test_the_same_source_twice_has_two_orders():
    mixed = Mixed((rows(50, 0), 1), (rows(50, 0), 1))
    order = mixed.order(0)
    consumed = [mixed[order(number)]["x"].item() for number in range(100)]
    assert consumed[::2] != consumed[1::2] and sorted(consumed[::2]) == list(range(50))
    other = mixed.order(1)
    assert [mixed[other(number)]["x"].item() for number in range(100)] != consumed


@settings(max_examples=60)
@given(weights=WEIGHTS, number=st.integers(0, 2**45))
def test_any_example_is_as_near_as_the_first(weights, number):
    mixed = Mixed(*((rows(3, s), w) for s, w in enumerate(weights)))
    counts = shares(weights)
    source, count = mixed.example(number)
    # Exactly, since floats do not reach that far: |count - number * share| < 1.
    assert abs(count * sum(counts) - number * counts[source]) < sum(counts)
    following = {mixed.example(number + k)[0] for k in range(sum(counts))}
    assert following == set(range(len(weights)))


def test_an_order_of_ones_own_is_held_to_the_source():
    data = stream(
        rows(3, 0), global_batch=1, seed=0, fingerprint={}, order=lambda n: 0 if n < 3 else 3
    )
    refuses(lambda: take(data, 4), "order(3) is 3", "0 to 2")


# The configuration


@pytest.fixture
def mixture(tmp_path) -> Mixture:
    one = write_documents(tmp_path / "one.jsonl", some_texts(20, seed=1))
    two = write_documents(tmp_path / "two.jsonl", [f"second {t}" for t in some_texts(9, seed=2)])
    return Mixture((PackedText((one,), seq_len=40), PackedText((two,), seq_len=40)), (0.7, 0.3))


@pytest.mark.parametrize("shuffle", [True, False, 4])
def test_a_crash_anywhere_changes_nothing(mixture, shuffle):
    mixture = replace(mixture, shuffle=shuffle)
    whole = take(replace(mixture, prefetch=0).build(6, 3), 14)
    for crash in range(12):
        for prefetch in (crash % 5, (crash + 2) % 5):
            resumed = replace(mixture, prefetch=prefetch).build(6, 3)
            assert_equal(take(resumed, 2, crash), whole[crash : crash + 2])


def test_ids_tell_the_source(mixture):
    first = mixture.parts[0].build(1, 0).num_examples
    data = mixture.build(10, 0)
    for batch in take(data, 30):
        assert (batch["example_id"] >= first).sum() == 3
    assert data.num_examples > first and max(ids(data, 30)) == data.num_examples - 1


def test_what_is_changed_is_refused_at_resume(mixture, tmp_path):
    def opens(data):
        found = data.build(4, 0).fingerprint
        RunDirectory.open(tmp_path / "run", tiny.recipe(), found, {}).close()

    opens(mixture)
    opens(replace(mixture, prefetch=0))
    one, two = mixture.parts
    for changed, words in [
        (replace(mixture, weights=(0.6, 0.4)), "shares was [7, 3], is [3, 2]"),
        (replace(mixture, parts=(two, one)), "parts was"),
        (replace(mixture, parts=(one,), weights=()), "shares was [7, 3], is [1]"),
        (replace(mixture, shuffle=False), "shuffle was True, is False"),
    ]:
        with pytest.raises(ValueError, match="another data") as caught:
            opens(changed)
        assert words in str(caught.value)
    write_documents(tmp_path / "two.jsonl", ["quite other text"] * 9)
    with pytest.raises(ValueError, match="another data .*parts was"):
        opens(mixture)


def test_text_and_records_are_parts_too(tmp_path):
    from tests.test_data import write_records

    path = tmp_path / "a.txt"
    path.write_text("to be or not to be" * 20)
    records = [np.arange(9, dtype="<u2").tobytes()] * 3
    file = write_records(tmp_path / "a.arrayrecord", records)
    mixed = Mixture((Text((path,), seq_len=8), TokenRecords((file,), seq_len=8)), (2, 1))
    (batch,) = take(mixed.build(6, 0), 1)
    assert (batch["tokens"] == np.arange(9)).all(axis=1).sum() == 2


def test_fields_are_set_on_the_command_line(mixture):
    recipe = replace(tiny.recipe(), data=mixture)
    data = override(recipe, ["--data.shuffle", "100", "--data.weights", "3", "1"]).data
    assert data == replace(mixture, shuffle=100, weights=(3, 1))
    text = replace(mixture.parts[0], keep=(MinLength(3),))  # no command line holds a predicate
    packed = override(replace(recipe, data=text), ["--data.seq-len", "7"]).data
    assert packed == replace(text, seq_len=7)
    assert hash(mixture) and json.dumps(recipe.identity())


def test_bad_mixtures(mixture, tmp_path):
    one, two = mixture.parts
    other = replace(mixture, parts=(one, replace(two, seq_len=41)))
    refuses(lambda: other.build(1, 0), "part 1", "int32[42]", "int32[41]", "seq_len")
    refuses(lambda: Mixture((one, Text())).build(1, 0), "part 1", "packed")
    for parts, weights, words in [
        (one, (), ["parts", "tuple"]),
        ((one,), 1, ["weights=1", "tuple"]),
        ((), (), ["nothing"]),
        ((one, two), (1,), ["weights=(1,)", "as many as parts, 2"]),
        ((one, two), (1, 0), ["weight=0"]),
        ((mixture, one), (), ["Mixture cannot be part"]),
        (("a.txt",), (), ["str cannot be part"]),
    ]:
        refuses(lambda p=parts, w=weights: Mixture(p, w), *words)
    assert Mixture((one, two)) == Mixture([one, two], [1.0, 1])
    refuses(lambda: replace(mixture, shuffle=0), "shuffle=0")
    refuses(lambda: replace(mixture, prefetch=-1), "prefetch=-1")


def test_batches_far_away(mixture):
    data = mixture.build(7, 0)
    far = take(data, 2, 10**12)
    assert_equal(far[1:], list(itertools.islice(data.batches(10**12 + 1), 1)))
