"""Work spread over processes, each with one torch thread, and results in a file of JSON lines."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
AHEAD = 2  # tasks for each process that are handed over before one is done


def spread(
    work: Callable[[T], R], tasks: Iterable[T], workers: int = 1, limit_s: float = math.inf
) -> Iterator[R]:
    """Results in the order in which they are ready; 1 worker: in order, in this process.

    work, its argument and its result must pickle. limit_s: no task starts later. An error of
    `work` is raised here; BrokenProcessPool when a process ended.
    """
    end = time.monotonic() + limit_s
    waiting = itertools.takewhile(lambda _: time.monotonic() < end, tasks)
    if workers == 1:
        yield from map(work, waiting)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        first = itertools.islice(waiting, AHEAD * workers)
        running = {pool.submit(work, task) for task in first}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(work, task) for task in itertools.islice(waiting, len(done))}
            for future in done:
                yield future.result()


def _one_thread() -> None:
    torch.set_num_threads(1)


class Ledger:
    """Results in a file of JSON lines, one added at a time. path None: kept in memory alone.

    rows: what the file held, then what was added. A last line that was cut off is removed.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                path.write_text(whole)
            self.rows = [json.loads(line) for line in whole.splitlines()]

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row, sort_keys=True) + "\n")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    """--workers, --limit and --out, of programs that spread work and keep a ledger."""
    parser.add_argument("--workers", type=_count, default=1, help="processes (default: this one)")
    parser.add_argument(
        "--limit", type=float, default=math.inf, metavar="SECONDS", help="start nothing later"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="keep results here as JSON lines; what it has "
        "of the same PTX is not run again"
    )  # fmt: skip
