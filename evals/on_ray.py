"""The same over a Ray cluster: endpoints that only its nodes can reach are measured from there.

Ray is an engine that exists; nothing here schedules. It is loaded only when asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blasst.evals.client import Completions
from blasst.evals.errors import InputError
from blasst.evals.progress import Progress
from blasst.evals.runner import Runner, RunOptions
from blasst.evals.scaleout import share_out
from blasst.evals.sidecar import Sidecar
from blasst.evals.store import Record, ResultStore
from blasst.evals.sweep import Group, Plan, announce, count_pending, pending_in, run_group
from blasst.evals.timebox import work_of


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


def measure_group(
    endpoint: Endpoint, group: Group, options: RunOptions, name: str | None, done: frozenset[str]
) -> list[Record]:
    """On any node: the missing records of one group. The threshold is put back."""
    client = Completions(endpoint.url, timeout_s=endpoint.timeout_s)
    sidecar = Sidecar(endpoint.sidecar, token=endpoint.token)
    try:
        memory = _Memory(done)
        runner = Runner(client, sidecar, memory, options, name)
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
) -> int:
    """As run_everywhere. address: of the cluster; None: Ray's own choice, "local": a new one here.

    Raises InputError without the package ray.
    """
    try:
        import ray
    except ImportError as e:
        raise InputError("--ray needs the package ray (pip install ray), or leave it out") from e
    first = endpoints[0]
    client, sidecar = Completions(first.url), Sidecar(first.sidecar, token=first.token)
    runner = Runner(client, sidecar, store, options, name)
    pending = announce(runner, plan, progress)
    try:
        remote = ray.remote(measure_group)

        def work(number: int, group: Group) -> None:
            done = frozenset(r["key"] for r in store.records if "key" in r)
            records = ray.get(remote.remote(endpoints[number], group, options, name, done))
            if any(record["fingerprint"] != runner.fingerprint for record in records):
                raise InputError(
                    f"{endpoints[number].url} serves another model, version or setting than "
                    f"{first.url}; one sweep needs equal servers"
                )
            for record in records:
                store.append(record)
                if record is records[-1]:
                    progress.step(f"{group.task} at {group.length}", work_of(group.length))
                else:
                    progress.note(work_of(group.length))

        groups = [g for g in plan.groups() if pending_in(runner, g)]
        with _connected(ray, address):
            share_out(groups, len(endpoints), work)
        return pending - count_pending(runner, plan)
    finally:
        client.close()
        sidecar.close()


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
