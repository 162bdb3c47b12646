"""What watched kernels saw, kept on the device and told without waiting for it.

Every watched call leaves a few numbers in a table on its device. Where nothing is to be waited for,
the table is copied to the host beside the work that goes on, and read once the copy has arrived:
a call of one step tells what was wrong in the one before. `check()` waits, and tells at once.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import CaptureError, NumericsError

log = logging.getLogger("fa_inductor")

ROWS = 8192  # of watched calls in a process, by site, direction and stream
COLUMNS = 6
_LARGEST = torch.finfo(torch.float32).max


class Names(NamedTuple):
    """How people call a row. direction: "forward" or "backward"."""

    site: str
    kernel: str
    direction: str


@dataclass(frozen=True)
class Number:
    """One of the numbers of a row. above: it is wrong if it is NaN or above that.

    text: what is then said of it, with `{}` in place of the number.
    """

    text: str
    above: float = _LARGEST


class Row:
    """The numbers of one site in one direction; the largest of each since the table was emptied.

    None is negative. seen: these numbers, float32; bits: the same memory as int32.
    cells: where a call may put its own, 0-d float32 tensors, which count when it has finished.
    """

    def __init__(self, table: Table, names: Names, numbers: Sequence[Number], action: str) -> None:
        self.table, self.names, self.numbers, self.action = table, names, numbers, action
        self.seen, self.own = table.memory[len(table.rows), :, : len(numbers)]
        self.bits = self.seen.view(torch.int32)
        self.cells = tuple(self.own)
        self.step = table.step - 1  # of the last call

    def begin(self) -> None:
        """A call begins: tell what is known by now of earlier ones, and when this row was called
        since that was last asked for, which is once a step, ask for it."""
        self.table.poll(copy=self.step == self.table.step)
        self.step = self.table.step

    def finish(self) -> None:
        """What a call has put into `cells` counts. NaN stays."""
        torch.maximum(self.seen, self.own, out=self.seen)


@dataclass(frozen=True)
class Finding:
    """Numbers of one row that were wrong; text: in words. is_finite: none is NaN or infinity."""

    names: Names
    text: str
    is_finite: bool = False


class Table:
    """The rows of one device. step: how often the numbers were asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "A watched attention (fa.guard) runs for the first time while a CUDA graph is "
                "captured; run the model once before."
            )
        self.rows: list[Row] = []
        self.by_key: dict[object, Row] = {}
        # The first call may be under inference mode, and a later one may not.
        with torch.inference_mode(False):
            shape = (ROWS, 2, COLUMNS)
            self.memory = torch.zeros(shape, dtype=torch.float32, device=device)
            self.host = torch.empty(shape, dtype=torch.float32, pin_memory=on_gpu)
            self.limits = torch.full((ROWS, COLUMNS), math.inf)
        self.told: set[int] = set()
        self.arrival = torch.cuda.Event() if on_gpu else None
        self.is_copying = False
        self.step = 0

    def row(self, key: object, names: Names, numbers: Sequence[Number], action: str) -> Row:
        """That of this key, which is new unless there is one."""
        with _lock:
            if key in self.by_key:
                return self.by_key[key]
            place = len(self.rows)
            if place >= ROWS:
                raise NumericsError(
                    f"More than {ROWS} attentions are watched (fa.guard) on {self.device}: watch "
                    "fewer, or call them on fewer streams."
                )
            with torch.inference_mode(False):
                self.limits[place, : len(numbers)] = torch.tensor([n.above for n in numbers])
                row = Row(self, names, numbers, action)
            self.rows.append(row)
            self.by_key[key] = row
            return row

    def poll(self, copy: bool) -> None:
        """Tell what a copy brought that has arrived; with `copy`, send the next one off.

        Does not wait. Raises `NumericsError` for findings whose action is "error".
        """
        if self.arrival is None:
            if copy:
                self.step += 1
                self._tell(self.memory)
        elif self.is_copying or copy:
            if torch.cuda.is_current_stream_capturing():
                return
            if self.is_copying and self.arrival.query():
                self.is_copying = False
                self._tell(self.host)
            if copy and not self.is_copying:
                self._send()

    def wait(self) -> None:
        """Tell all there is."""
        if self.arrival is not None:
            torch.cuda.synchronize(self.device)
            self._send()
            self.arrival.synchronize()
            self.is_copying = False
        self._tell(self.memory if self.arrival is None else self.host)

    def clear(self) -> None:
        """Nothing was seen, and nothing told; rows stay."""
        with _lock:
            self.memory.zero_()
            self.told.clear()
            self.is_copying = False

    def _send(self) -> None:
        assert self.arrival is not None
        count = len(self.rows)
        self.host[:count].copy_(self.memory[:count], non_blocking=True)
        self.arrival.record(torch.cuda.current_stream(self.device))
        self.is_copying = True
        self.step += 1

    def _tell(self, table: Tensor) -> None:
        with _lock:
            count = len(self.rows)
            values = table[:count, 0]
            bad = ~(values <= self.limits[:count])
            new = [i for i in bad.any(1).nonzero().flatten().tolist() if i not in self.told]
            self.told.update(new)
            if not new:
                return
            new.sort(key=lambda i: _order(i, self.rows[i].names))
            made = [_finding(self.rows[i], values[i].tolist(), bad[i].tolist()) for i in new]
            is_error = any(self.rows[i].action == "error" for i in new)
            text = f"{made[0].text}" + _others(made[1:])
            if is_error:  # whoever catches it can go on
                self.clear()
        for finding in made:
            for listener in listeners:
                listener(finding)
        if is_error:
            raise NumericsError(text)
        log.warning("fa_inductor: %s", text)


_lock = threading.RLock()
_tables: dict[torch.device, Table] = {}
listeners: list[Callable[[Finding], None]] = []  # called with each finding, once


def table_of(device: torch.device) -> Table:
    """That of a device, with its index. It is made before code for it runs: what is allocated
    while Inductor warms up for a CUDA graph lies in the graph's own memory."""
    table = _tables.get(device)
    if table is None:
        with _lock:
            table = _tables.get(device) or Table(device)
            _tables[device] = table
    return table


def poll() -> None:
    """What a call of a watched graph does first."""
    for table in list(_tables.values()):
        table.poll(copy=True)


def check() -> None:
    """Wait for the devices, and tell what `fa.guard` saw since it was told last.

    For the end of a run, and where nothing of a step runs in Python, as with CUDA graphs under
    `fa_inductor.register()`. Raises `NumericsError` under `fa.on_guard="error"`.
    """
    errors = []
    for table in list(_tables.values()):
        try:
            table.wait()
        except NumericsError as error:  # the other devices have something to tell, too
            errors.append(str(error))
    if errors:
        raise NumericsError("\n".join(errors))


def clear() -> None:
    """Drop what was seen, told or not: what happens again is told again. Rows stay, so that
    captured CUDA graphs may go on."""
    for table in list(_tables.values()):
        table.clear()


def forget() -> None:
    """Start anew: no rows, nothing told."""
    with _lock:
        _tables.clear()


def _order(place: int, names: Names) -> tuple[bool, int]:
    """A fault spreads as the program runs, which is the order of the rows: forwards first."""
    return names.direction == "backward", place


def _finding(row: Row, values: Sequence[float], bad: Sequence[bool]) -> Finding:
    texts = [
        number.text.format(f"{value:.1e}")
        for number, value, is_bad in zip(row.numbers, values, bad, strict=False)
        if is_bad
    ]
    site, kernel, direction = row.names
    text = f"{direction} of attention {site} on {kernel}: {', '.join(texts)}"
    return Finding(row.names, text, all(map(math.isfinite, values)))


def _others(rest: Sequence[Finding]) -> str:
    if not rest:
        return ""
    names = list(dict.fromkeys(f"{each.names.site} ({each.names.direction})" for each in rest))
    listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"; it is the first, {len(names)} more followed: {listed}"
