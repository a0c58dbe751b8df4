"""One sweep over several endpoints: each takes the next group, all write to one store."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence

from blasst.evals.errors import EvalsError, InputError
from blasst.evals.eta import Costs
from blasst.evals.identity import Details
from blasst.evals.progress import Progress
from blasst.evals.runner import Runner
from blasst.evals.sweep import (
    Group,
    Plan,
    announce,
    count_pending,
    pending_in,
    run_group,
    run_sweep,
)

Work = Callable[[int, Group], None]
"""Measure a group on endpoint number i, and keep its records."""


def run_everywhere(
    runners: Sequence[Runner], plan: Plan, progress: Progress, costs: Costs | None = None
) -> int:
    """Measure what is missing and return how many measurements that were.

    All runners share one store and must be of equal servers: a sample may run on any of them, and
    its key is the same. Raises InputError when they differ.
    """
    first = runners[0]
    if len(runners) == 1:
        return run_sweep(first, plan, progress, costs=costs)
    for other in runners[1:]:
        check_equal(first.details, first.client.url, other.details, other.client.url)
    pending = announce(first, plan, progress, others=runners[1:], costs=costs, workers=len(runners))
    if not pending:
        return 0

    def work(endpoint: int, group: Group) -> None:
        run_group(runners[endpoint], group, progress, None, boxed=False)

    try:
        share_out([g for g in plan.groups() if pending_in(first, g)], len(runners), work)
    finally:
        for runner in runners:
            with contextlib.suppress(EvalsError):
                runner.restore()
    return pending - count_pending(first, plan)


def check_equal(first: Details, first_url: str, other: Details, url: str) -> None:
    """Raises InputError naming what differs."""
    differ = [name for name, value in first.items() if other[name] != value]
    if differ:
        words = ", ".join(f"{name} {first[name]} and {other[name]}" for name in differ)
        raise InputError(
            f"{first_url} and {url} are different servers ({words}); one sweep needs equal ones"
        )


def share_out(groups: Sequence[Group], endpoints: int, work: Work) -> None:
    """Each endpoint works in a thread of its own, one group at a time, in the plan's order.

    The first error ends all after the group at which they are, and is raised.
    """
    todo: queue.SimpleQueue[Group] = queue.SimpleQueue()
    for group in groups:
        todo.put(group)
    stop = threading.Event()
    errors: list[BaseException] = []

    def serve(endpoint: int) -> None:
        while not stop.is_set():
            try:
                group = todo.get_nowait()
            except queue.Empty:
                return
            try:
                work(endpoint, group)
            except BaseException as e:
                errors.append(e)
                stop.set()

    threads = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(endpoints)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        stop.set()
        raise
    if errors:
        raise errors[0]
