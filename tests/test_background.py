"""What hangs in another thread: noticed at its deadline, by the clock of the backend."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from elastix import Policy, SimulatedBackend
from elastix.backends.simulated import RealClock, VirtualClock
from elastix.background import Worker, start, wait_for
from elastix.checkpoints import CheckpointStore
from elastix.classification import StuckError
from elastix.data import stream
from elastix.feed import StreamFeed
from elastix.leaf_hash import hashes_of
from elastix.machine import Abandon, Save, Saved, SaveFailed
from elastix.saver import Saver
from elastix.snapshots import HostCopy


@pytest.fixture
def backend():
    return SimulatedBackend(2, 1)


def raising(error):
    raise error


def test_a_result_and_an_error_come_out_where_they_are_waited_for(backend):
    assert wait_for(start(lambda: 7), backend, (), 5.0, "x") == 7
    with pytest.raises(KeyError, match="no"):
        wait_for(start(raising, KeyError("no")), backend, (), 5.0, "x")
    with pytest.raises(TimeoutError, match="its own"):
        wait_for(start(raising, TimeoutError("its own")), backend, (), 5.0, "x")


def test_what_does_not_finish_is_stuck_at_its_deadline(backend):
    forever = threading.Event()
    began = time.monotonic()
    with pytest.raises(StuckError, match="compiling did not finish in time"):
        wait_for(start(forever.wait), backend, (), 0.2, "compiling")
    assert 0.2 <= time.monotonic() - began < 5.0
    forever.set()


def test_a_known_loss_interrupts_what_is_waited_for(backend):
    forever = threading.Event()
    threading.Timer(0.1, backend.lose, (1,)).start()
    with pytest.raises(Exception, match="DATA_LOSS"):
        wait_for(start(forever.wait), backend, (0, 1), 60.0, "compiling")
    forever.set()


def test_a_worker_does_what_it_is_given_in_order_and_can_be_left_behind():
    worker, forever, done = Worker("x"), threading.Event(), []
    for n in range(3):
        worker.submit(done.append, n).result(timeout=5.0)
    assert done == [0, 1, 2]
    worker.submit(forever.wait)
    began = time.monotonic()
    worker.close(timeout=0.1)
    assert time.monotonic() - began < 5.0
    forever.set()


def test_a_process_ends_though_its_thread_hangs():
    code = (
        "import threading; from elastix.background import Worker, start;"
        "w = Worker('x'); w.submit(threading.Event().wait); start(threading.Event().wait)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# --- data ---------------------------------------------------------------------------------------


class Source:
    """Twelve records; reading waits while `gate` is shut."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.gate.wait()
        if self.broken:
            raise OSError("the disk went away")
        return {"x": np.float32(index)}


def feed(source, backend, prefetch=0):
    made = stream(source, global_batch=2, seed=0, shuffle=False, prefetch=prefetch, fingerprint={})
    return StreamFeed(made, backend)


def first(batch):
    return int(batch["example_id"][0])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_come_by_number_and_from_anywhere_after_a_reset(backend, prefetch):
    batches = feed(Source(), backend, prefetch)
    assert [first(batches.take(n, (), 5.0)) for n in range(4)] == [0, 2, 4, 6]
    batches.reset()
    assert [first(batches.take(n, (), 5.0)) for n in (1, 2)] == [2, 4]
    batches.reset()


def test_a_source_that_hangs_is_stuck_and_goes_on_when_it_is_asked_again(backend):
    source = Source()
    batches = feed(source, backend)
    assert first(batches.take(0, (), 5.0)) == 0
    batches.take(1, (), 5.0)
    source.gate.clear()
    batches.reset()
    with pytest.raises(StuckError, match="reading batch 2"):
        batches.take(2, (), 0.2)
    batches.reset()
    source.gate.set()
    assert first(batches.take(2, (), 5.0)) == 4
    batches.reset()


def test_what_a_source_raises_comes_out_at_the_batch_it_was_read_for(backend):
    source = Source()
    batches = feed(source, backend)
    batches.take(0, (), 5.0)
    batches.reset()
    source.broken = True
    with pytest.raises(OSError, match="went away"):
        batches.take(1, (), 5.0)
    source.broken = False
    batches.reset()
    assert first(batches.take(1, (), 5.0)) == 2
    batches.reset()


# --- saves --------------------------------------------------------------------------------------


class SlowStore(CheckpointStore):
    """Begins to write when `gate` opens."""

    def __init__(self, root, keep=3):
        super().__init__(root, keep=keep)
        self.gate, self.began = threading.Event(), threading.Event()

    def write(self, step, leaves, metadata):
        self.began.set()
        self.gate.wait()
        return super().write(step, leaves, metadata)


def copy(step):
    whole = np.arange(4, dtype=np.float32)
    return HostCopy(step, {"w": [((slice(0, 4),), whole)]}, hashes_of({"w": whole}))


@pytest.fixture
def saver(tmp_path):
    backend = SimulatedBackend(2, 1, clock=VirtualClock())
    store = SlowStore(tmp_path / "checkpoints")
    made = Saver(store, backend, {"w": (4,)}, {}, Policy())
    yield made, store, backend
    store.gate.set()
    made.close()


def answer_of(saver):
    give_up = time.monotonic() + 30.0
    while (event := saver.answer(timeout=0.05)) is None:
        assert time.monotonic() < give_up
    return event


def test_a_save_that_hangs_has_failed_and_what_it_writes_later_is_removed(saver):
    made, store, backend = saver
    made.save(Save(1, 10, 0), copy(10), {})
    assert store.began.wait(30.0) and made.answer() is None and made.pending == 1
    backend.idle(Policy().save_deadline)
    event = made.answer()
    assert isinstance(event, SaveFailed) and "not written in 300 s" in event.reason
    assert made.pending == 0
    store.gate.set()
    made.save(Save(1, 20, 0), copy(20), {})
    event = answer_of(made)
    assert isinstance(event, Saved) and event.step == 20, "the late answer of step 10 is dropped"
    assert store.steps() == (20,)


def test_a_save_that_was_abandoned_before_it_ran_out_of_time_is_removed_once(saver):
    """A removal at its deadline would come behind what another save wrote for the same step."""
    made, store, backend = saver
    made.save(Save(1, 10, 0), copy(10), {})
    assert store.began.wait(30.0)
    backend.idle(Policy().save_deadline / 2)
    made.abandon(Abandon(1, 10))
    made.save(Save(2, 10, 1), copy(10), {})
    backend.idle(Policy().save_deadline / 2)
    late = made.answer()
    assert isinstance(late, SaveFailed) and late.epoch == 1 and made.pending == 1
    store.gate.set()
    assert isinstance(answer_of(made), Saved)
    assert made.load(10)[0]["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert store.steps() == (10,)


def test_nothing_older_goes_for_a_save_that_is_abandoned_while_it_is_written(tmp_path):
    """Its slice died: what it wrote is removed, and the one before is all there is."""
    store = SlowStore(tmp_path / "checkpoints", keep=1)
    store.gate.set()
    saver = Saver(store, SimulatedBackend(2, 1, clock=VirtualClock()), {"w": (4,)}, {}, Policy())
    saver.save(Save(1, 10, 0), copy(10), {})
    assert isinstance(answer_of(saver), Saved)
    store.gate.clear()
    store.began.clear()
    saver.save(Save(1, 20, 0), copy(20), {})
    assert store.began.wait(30.0)
    saver.abandon(Abandon(1, 20))
    store.gate.set()
    answer_of(saver)
    saver.close()
    assert store.steps() == (10,)


def test_the_answer_of_an_abandoned_save_is_not_taken_for_that_of_the_next_of_its_step(tmp_path):
    """In one epoch: its slice, which was to be taken away, died, and another writes the step."""
    backend = SimulatedBackend(2, 1, clock=VirtualClock())
    store = SlowStore(tmp_path / "checkpoints")
    saver = Saver(store, backend, {"w": (4,)}, {}, Policy())
    backend.lose(1)
    saver.save(Save(5, 10, 1), copy(10), {})
    saver.abandon(Abandon(5, 10))
    saver.save(Save(5, 10, 0), copy(10), {})
    store.gate.set()
    assert isinstance(answer_of(saver), Saved) and saver.pending == 0
    saver.close()
    assert store.steps() == (10,)


class FastClock(RealClock):
    """A thousand seconds pass in one."""

    def now(self):
        return 1000 * super().now()


def test_a_checkpoint_that_cannot_be_read_in_time_is_stuck(tmp_path):
    store = SlowStore(tmp_path / "checkpoints")
    saver = Saver(store, SimulatedBackend(2, 1, clock=FastClock()), {"w": (4,)}, {}, Policy())
    saver.save(Save(1, 10, 0), copy(10), {})
    with pytest.raises(StuckError, match="reading the checkpoint of step 5"):
        saver.load(5)
    store.gate.set()
    saver.close()
