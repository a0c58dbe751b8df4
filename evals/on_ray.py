"""The same over a Ray cluster: endpoints that only its nodes can reach are measured from there.

Ray is an engine that exists; nothing here schedules. It is loaded only when asked for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blasst.evals.client import Completions
from blasst.evals.errors import EvalsError, InputError, ServerError
from blasst.evals.eta import Costs
from blasst.evals.identity import Details
from blasst.evals.progress import Progress
from blasst.evals.runner import Runner, RunOptions
from blasst.evals.scaleout import check_equal, share_out
from blasst.evals.sidecar import Sidecar
from blasst.evals.store import Record, ResultStore
from blasst.evals.sweep import (
    Group,
    Plan,
    announce,
    count_pending,
    jobs_of,
    pending_in,
    run_group,
)


@dataclass(frozen=True)
class Endpoint:
    """A server and its sidecar, as the node that measures reaches them."""

    url: str
    sidecar: str
    token: str = ""
    timeout_s: float = 600.0


class _Memory:
    """A store of one task: what it holds travels back to the driver."""

    def __init__(self, done: frozenset[str]) -> None:
        self._done = done
        self.records: list[Record] = []

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def append(self, record: Record) -> None:
        self.records.append(record)


@dataclass(frozen=True)
class Begun:
    """What a node must know of the sweep. first: URL of the server that the driver sees, details:
    what it says. fingerprint: of the results. done: keys that are there."""

    first: str
    details: Details
    fingerprint: str
    done: frozenset[str]


def measure_group(
    endpoint: Endpoint, group: Group, options: RunOptions, name: str | None, begun: Begun
) -> list[Record]:
    """On any node: the missing records of one group. The threshold is put back. Raises InputError
    for another server than the first one."""
    client = Completions(endpoint.url, timeout_s=endpoint.timeout_s)
    sidecar = Sidecar(endpoint.sidecar, token=endpoint.token)
    try:
        memory = _Memory(begun.done)
        runner = Runner(client, sidecar, memory, options, name)
        check_equal(begun.details, begun.first, runner.details, endpoint.url)
        runner.fingerprint = begun.fingerprint
        try:
            run_group(runner, group, Progress(0, quiet=True), None, boxed=False)
        finally:
            runner.restore()
        return memory.records
    finally:
        client.close()
        sidecar.close()


def run_on_ray(
    endpoints: Sequence[Endpoint],
    plan: Plan,
    store: ResultStore,
    options: RunOptions,
    progress: Progress,
    *,
    name: str | None = None,
    address: str | None = None,
    costs: Costs | None = None,
) -> int:
    """As run_everywhere. address: of the cluster; None: Ray's own choice, "local": a new one here.

    Raises InputError without the package ray.
    """
    ray = the_package()
    first = endpoints[0]
    client, sidecar = Completions(first.url), Sidecar(first.sidecar, token=first.token)
    runner = Runner(client, sidecar, store, options, name)
    pending = announce(runner, plan, progress, costs=costs, workers=len(endpoints))
    try:
        remote = ray.remote(measure_group)

        def work(number: int, group: Group) -> None:
            done = frozenset(r["key"] for r in store.records if "key" in r)
            jobs = [job for point in group.points for job in jobs_of(runner, group, point)]
            since = time.monotonic()
            begun = Begun(first.url, runner.details, runner.fingerprint, done)
            try:
                records = ray.get(remote.remote(endpoints[number], group, options, name, begun))
            except ray.exceptions.RayError as e:
                raise _of_a_node(e, endpoints[number].url) from e
            progress.learn(jobs, time.monotonic() - since)
            for record in records:
                store.append(record)
                if record is records[-1]:
                    progress.step(f"{group.task} at {group.length}")
                else:
                    progress.note()

        groups = [g for g in plan.groups() if pending_in(runner, g)]
        with _connected(ray, address):
            share_out(groups, len(endpoints), work)
        return pending - count_pending(runner, plan)
    finally:
        client.close()
        sidecar.close()


def the_package() -> Any:
    """Raises InputError where it is not installed."""
    try:
        import ray
    except ImportError as e:
        raise InputError("--ray needs the package ray (pip install ray), or leave it out") from e
    return ray


def _of_a_node(error: Exception, url: str) -> EvalsError:
    """Its own error where it is one of ours: Ray's words are the node's traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, EvalsError):
        return cause
    last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return ServerError(f"{url} was not measured from its node of the cluster: {last}")


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """A connection of our own is closed again, with what it started; one that was there stays."""
    if ray.is_initialized():
        yield
        return
    ray.init(address=address, log_to_driver=False, include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()
