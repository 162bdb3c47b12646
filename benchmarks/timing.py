"""Time of calls, on the GPU and on the host.

On the GPU a call is captured in a CUDA graph, so that the host plays no part, and replays are
timed with events. All contestants are timed in turn, round by round: what the clock and the
temperature do, they do to all. Compare ratios, not microseconds of different runs.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from contestants import REFUSALS, Call
from grid import Tensors

ROUNDS, FEWER_ROUNDS, LONG_ROUND_US = 7, 5, 500_000.0
# Medians whose rounds spread more than this are of more rounds, for so long.
NOISE, NOISY_ROUNDS, NOISY_US = 0.01, 28, 2_000_000.0
ROUND_US = 4000.0  # a round takes as many calls as fill this
CAPTURED = 32  # calls in one graph at most
WARM_UPS, WARM_UP_US = 3, 200_000.0  # so many, or fewer when they take long

Context = Callable[[], AbstractContextManager[Any]]


@dataclass
class Timed:
    """One contestant's figures.

    how: "graph", "events" where it could not be captured, with the reason, or "clock" on a CPU.
    round: microseconds a call in one round.
    """

    how: str
    round: Callable[[], float]
    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return sorted(self.rounds)[len(self.rounds) // 2]

    @property
    def spread(self) -> float:
        """Of the middle half of the rounds, as a part of the median."""
        ordered, quarter = sorted(self.rounds), len(self.rounds) // 4
        return (ordered[-1 - quarter] - ordered[quarter]) / self.median


class Timer(Protocol):
    def prepare(self, call: Call, sets: Sequence[Tensors], context: Context) -> Timed: ...

    def settle(self) -> None:
        """Wait for all work. Raises what a broken GPU has to say, which nothing catches."""


class GpuTimer:
    """Replays of CUDA graphs between events, on a stream of its own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def settle(self) -> None:
        torch.cuda.synchronize()

    def prepare(self, call: Call, sets: Sequence[Tensors], context: Context) -> Timed:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), context():
            each = self._warm_up(call, sets)
            count = _clamped(ROUND_US / each, len(sets), CAPTURED)
            try:
                graph = _captured(call, sets, count)
            except REFUSALS as error:
                self.settle()
                return self._eager(call, sets, context, each, f"events: {one_line(error)}")
            graph.replay()  # the first one uploads it
            replay = self._between_events(graph.replay)
        replays = _clamped(ROUND_US / max(replay, 1.0), 1, 200)

        def run() -> None:
            for _ in range(replays):
                graph.replay()

        def one_round() -> float:
            with torch.cuda.stream(self.stream):
                return self._between_events(run) / (replays * count)

        return Timed("graph", one_round)

    def _warm_up(self, call: Call, sets: Sequence[Tensors]) -> float:
        """Microseconds of the last call."""
        total = last = 0.0
        for index in range(WARM_UPS):
            last = self._between_events(lambda index=index: call(sets[index % len(sets)]))
            total += last
            if total > WARM_UP_US:
                break
        return max(last, 1.0)

    def _eager(
        self, call: Call, sets: Sequence[Tensors], context: Context, each: float, how: str
    ) -> Timed:
        count = _clamped(ROUND_US / each, len(sets), 200)

        def run() -> None:
            for index in range(count):
                call(sets[index % len(sets)])

        def one_round() -> float:
            with torch.cuda.stream(self.stream), context():
                return self._between_events(run) / count

        return Timed(how, one_round)

    def _between_events(self, run: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


class CpuTimer:
    """Wall clock; to try the benchmark without a GPU."""

    def settle(self) -> None:
        pass

    def prepare(self, call: Call, sets: Sequence[Tensors], context: Context) -> Timed:
        def one_round() -> float:
            started = time.perf_counter()
            with context():
                call(sets[0])
            return (time.perf_counter() - started) * 1e6

        return Timed("clock", one_round)


def measure(timed: Mapping[str, Timed]) -> None:
    """Fill in the rounds of all, in turn, and more of them where they differ among each other.

    Each round starts with another one: a GPU at its power limit is slower after a heavy neighbour.
    """
    everyone = list(timed.values())
    started = time.perf_counter()
    for done in range(NOISY_ROUNDS):
        first = done % len(everyone) if everyone else 0
        for each in everyone[first:] + everyone[:first]:
            each.rounds.append(each.round())
        taken = (time.perf_counter() - started) * 1e6
        rounds = FEWER_ROUNDS if taken / (done + 1) > LONG_ROUND_US else ROUNDS
        noisy = taken < NOISY_US and any(each.spread > NOISE for each in everyone)
        if done + 1 >= rounds and not noisy:
            break


def host_us(run: Callable[[], object], calls: int = 50) -> float:
    """Microseconds that the host takes for a call, the queue drained before and after.

    Valid as long as the launches of all the calls fit into the queue, about 1000.
    """
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    elapsed = time.perf_counter() - started
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def one_line(error: BaseException) -> str:
    """The first line of an error that says something, with its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300].removeprefix("Refused: ")


def _clamped(wanted: float, low: int, high: int) -> int:
    return max(low, min(high, round(wanted)))


def _captured(call: Call, sets: Sequence[Tensors], count: int) -> torch.cuda.CUDAGraph:
    """`count` calls, the sets in turn, as one graph on the current stream.

    `torch.cuda.graph` would collect garbage and empty the cache each time, which takes longer
    than what is measured. Only this thread is held to what a capture allows: autograd's own
    threads launch into it too.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with _no_garbage_collection():
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for index in range(count):
                call(sets[index % len(sets)])
        except REFUSALS:
            with contextlib.suppress(RuntimeError):  # says only that the capture is broken
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What a collection frees could be illegal to free while a graph is captured."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
