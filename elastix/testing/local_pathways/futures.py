"""Futures that depend on futures, without a thread that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Generic, TypeVar

from elastix.testing.local_pathways.failures import internal

T = TypeVar("T")
S = TypeVar("S")


class Future(Generic[T]):
    """A value or an error that is there, or that will be.

    Unlike those of `concurrent.futures`, one that is done holds nothing but its end: a program's
    results wait for its arguments, and a chain of steps would never be let go.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Future[T]], object]] | None = []
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has its end."""
        return self._callbacks is None

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call it at the end, in the thread that brings it; now, if that was."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback(self)

    def exception(self) -> BaseException | None:
        """The error, once it is there."""
        self._wait()
        return self._error

    def result(self) -> T:
        """The value, once it is there; raises the error."""
        if (error := self.exception()) is not None:
            raise error
        return self._value

    def settle(self, value: Any, error: BaseException | None) -> None:
        """Its end, unless it has one: whoever is first decides."""
        with self._lock:
            if self._callbacks is None:
                return
            self._value, self._error = value, error
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks:
            callback(self)

    def _wait(self) -> None:
        if self._callbacks is not None:
            over = threading.Event()
            self.add_done_callback(lambda _: over.set())
            over.wait()


def settle(future: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
    """Give a future its end, unless it has one."""
    future.settle(value, error)


def done(value: T) -> Future[T]:
    """One that has its value."""
    future: Future[T] = Future()
    settle(future, value)
    return future


def failed(error: BaseException) -> Future[Any]:
    """One that is an error."""
    future: Future[Any] = Future()
    settle(future, error=error)
    return future


def then(before: Future[S], work: Callable[[S], T]) -> Future[T]:
    """What `work` makes of a value; an error goes past it."""
    after: Future[T] = Future()

    def finish(future: Future[S]) -> None:
        try:
            settle(after, work(future.result()))
        except BaseException as error:
            settle(after, error=internal(error))

    before.add_done_callback(finish)
    return after


def chain(before: Future[S], work: Callable[[S], Future[T]]) -> Future[T]:
    """As `then`, of work that is itself a future."""
    after: Future[T] = Future()

    def finish(inner: Future[Future[T]]) -> None:
        if inner.exception() is not None:
            return settle(after, error=inner.exception())
        return inner.result().add_done_callback(lambda last: copy(last, after))

    then(before, work).add_done_callback(finish)
    return after


def copy(source: Future[Any], target: Future[Any]) -> None:
    """End `target` as the finished `source` ended."""
    if source.exception() is None:
        settle(target, source.result())
    else:
        settle(target, error=source.exception())


def gather(futures: Sequence[Future[Any]]) -> Future[list[Any]]:
    """All values, as soon as all are there; the first error, as soon as there is one."""
    every: Future[list[Any]] = Future()

    def one(future: Future[Any]) -> None:
        if future.exception() is not None:
            settle(every, error=future.exception())
        elif all(of.done() and of.exception() is None for of in futures):
            settle(every, [of.result() for of in futures])

    for future in futures:
        future.add_done_callback(one)
    if not futures:
        settle(every, [])
    return every


def after(causes: Sequence[Future[Any]], consequence: Future[T]) -> Future[T]:
    """The consequence, but of errors that of a cause: the consequence may be known first."""
    return chain(gather(causes), lambda _: consequence)


def submit(pool: Executor, work: Callable[[], T]) -> Future[T]:
    """What `work` makes in a thread of the pool."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            settle(future, work())
        except BaseException as error:
            settle(future, error=internal(error))

    pool.submit(run)
    return future
