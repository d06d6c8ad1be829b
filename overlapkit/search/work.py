"""A search over all cores: chunks of the space, judged by processes, taken together as they come in."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from math import ceil

from overlapkit.errors import RecipeError
from overlapkit.recipe import Recipe
from overlapkit.search.judge import Judge
from overlapkit.search.ranking import Ranking
from overlapkit.search.space import Space

_ALONE = 3_000  # points: fewer are judged sooner than a process starts and asks the rules again
_CHUNKS_EACH = 16  # per process, so that none waits long for the last one
_LARGEST_CHUNK = 100  # points: what Ctrl-C may have to wait for
Report = Callable[[Ranking], None]


def usual_workers() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def judged(recipe: Recipe, space: Space, *, keep: int, workers: int, report: Report) -> tuple[Ranking, bool]:
    """What the whole space comes to, and False; or what is there so far, and True, where Ctrl-C comes first.

    ``report`` is called with the ranking after each part.

    Raises:
        RecipeError: the recipe cannot be timed, or the memory of its GPU is not known.
    """
    ranking = Ranking(keep)
    judge = Judge(recipe, space, keep)  # here first, so that what is wrong with the recipe is said once
    workers = min(workers, max(1, ceil(space.size / _ALONE)))
    chunks = _chunks(space.size, workers)
    parts = _alone(judge, chunks) if workers == 1 else _parallel(judge, recipe, space, keep, workers, chunks)
    try:
        for part in parts:
            ranking.add(part)
            report(ranking)
    except KeyboardInterrupt:
        return ranking, True
    finally:
        parts.close()
    return ranking, False


def _chunks(size: int, workers: int) -> Iterator[tuple[int, int]]:
    step = min(_LARGEST_CHUNK, max(1, size // (workers * _CHUNKS_EACH)))
    return ((start, min(start + step, size)) for start in range(0, size, step))


def _alone(judge: Judge, chunks: Iterator[tuple[int, int]]) -> Generator[Ranking, None, None]:
    for chunk in chunks:
        yield judge.judge(*chunk)


def _parallel(
    judge: Judge, recipe: Recipe, space: Space, keep: int, workers: int, chunks: Iterator[tuple[int, int]]
) -> Generator[Ranking, None, None]:
    """Rankings in the order in which they are done. Only a few chunks wait at a time, however many there are.

    While the processes start, ``judge`` does their work.
    """
    executor = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(recipe, space, keep)
    )
    pending: set[Future[Ranking]] = set()
    started = False
    try:
        while True:
            while len(pending) < 2 * workers and (chunk := next(chunks, None)) is not None:
                with _interrupts_held():
                    pending.add(executor.submit(_judge, *chunk))
            if not pending:
                return
            if not started and (chunk := next(chunks, None)) is not None:
                yield judge.judge(*chunk)
                started = any(future.done() for future in pending)
                continue
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        hint = "give fewer --workers where memory is short"
        raise RecipeError("a process of the search was ended from outside", source="search", hint=hint) from None
    finally:
        with _interrupts_held():  # a second Ctrl-C waits for the processes, or they would stay
            executor.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits: a process that is started meanwhile inherits this, and is not stopped by one on its way."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_JUDGE: dict[str, Judge] = {}  # this process's own


def _begin(recipe: Recipe, space: Space, keep: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process; the first one decides
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    _JUDGE["own"] = Judge(recipe, space, keep)


def _end_with_the_first() -> None:
    """A process waits for work for ever, also where the first one was killed."""
    first = multiprocessing.parent_process()
    if first is not None:
        first.join()
        os._exit(1)


def _judge(start: int, stop: int) -> Ranking:
    return _JUDGE["own"].judge(start, stop)
