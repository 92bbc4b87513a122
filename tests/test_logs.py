"""The files of a run that grow: metrics and events, over several processes and torn lines."""

from __future__ import annotations

import json

import numpy as np
import pytest

from elastix.event_log import EventLog, encode
from elastix.machine import (
    Policy,
    Prepare,
    Restoring,
    Saved,
    Source,
    Started,
    Starting,
    Tier,
    transition,
)
from elastix.metrics import MetricsLog, Row
from elastix.progress import Progress

POLICY = Policy()


def row(step, loss=1.5):
    return Row(step, loss, slices=4, seconds=0.1, tokens=10.0, learning_rate=1e-3, grad_norm=1.0)


def test_a_step_done_again_writes_nothing(tmp_path):
    path, heard = tmp_path / "metrics.jsonl", []
    log = MetricsLog(path, listeners=(heard.append,))
    for step in (1, 2, 1, 2, 3):
        assert log.commit(row(step)) is None
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert [r.step for r in heard] == [1, 2, 3]


@pytest.mark.parametrize(("exact_from", "refused"), [(1, True), (2, False)])
def test_a_step_done_again_must_give_the_same_loss_bits(exact_from, refused):
    log = MetricsLog(None, exact_from)
    log.commit(row(1, 1.5))
    answer = log.commit(row(1, float(np.nextafter(np.float32(1.5), np.float32(2)))))
    assert (answer is not None) == refused
    assert not refused or "step 1 was done again and gave loss 1.5000001" in answer


def test_a_torn_last_line_is_cut_and_the_next_process_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.commit(row(step, float(step)))
    log.close()
    whole = path.read_bytes()
    for cut in range(1, len(whole) - whole[:-1].rfind(b"\n") - 1):
        path.write_bytes(whole[:-cut])
        again = MetricsLog(path)
        assert again.losses == [1.0, 2.0]
        again.commit(row(3, 3.0))
        again.close()
        assert path.read_bytes() == whole


def test_metrics_that_are_damaged_are_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "loss": 1.0}\n')
    with pytest.raises(ValueError, match="is no record of steps from 1 on"):
        MetricsLog(path)
    path.write_text("{]\n")
    for line in ("{]", "[1]", "7", "[" * 100_000):
        path.write_text(f"{line}\n")
        with pytest.raises(ValueError, match="line 1 is damaged"):
            MetricsLog(path)


def test_an_event_row_has_the_event_the_state_it_led_to_and_the_effects(tmp_path):
    path = tmp_path / "events.jsonl"
    seed = Source(Tier.SEED, 0)
    event = Started(
        at=0.5,
        num_steps=3,
        slices=frozenset({0, 1}),
        up=frozenset({1, 0}),
        sources=(seed,),
        durable=False,
    )
    state, effects = transition(Starting(), event, POLICY)
    for _ in range(2):  # two processes
        log = EventLog(path, POLICY, pid=77)
        log.append(event, state, effects)
        log.append(Saved(at=1.0, step=3), state, ())
        log.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["seq"] for r in rows] == [0, 1, 2, 3]
    first = rows[0]
    assert first["event"]["policy"]["min_slices"] == 1 and first["event"]["pid"] == 77
    assert first["event"]["up"] == [0, 1] and first["at"] == 0.5
    assert isinstance(state, Restoring) and first["state"]["type"] == "Restoring"
    prepare = encode(Prepare(1, frozenset({0, 1}), seed))
    assert first["effects"] == [prepare] and prepare["source"]["tier"] == "seed"


def test_progress_is_chained_over_the_ids_in_order():
    ids = [np.array([3, 1], np.int64), np.array([2**40, 0], np.int64)]
    progress = Progress()
    for batch in ids:
        progress = progress.consume(batch)
    assert progress.examples == 4
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress
    swapped = Progress().consume(ids[1]).consume(ids[0])
    assert swapped.sha256 != progress.sha256 and swapped.examples == 4
