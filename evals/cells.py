"""Results as cells: one number of each kind per threshold, task and length."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blasst.evals.errors import MALFORMED, InputError
from blasst.evals.identity import said_by_all, same_server
from blasst.evals.metrics import task_score
from blasst.evals.store import Record
from blasst.evals.thresholds import Point, key_of, lambda_at, mag_at, order_of, point_of


@dataclass(frozen=True)
class Cell:
    """samples 0: nothing measured, every number is NaN. score: 0..100. gold_nll: nats a token.
    ttft_s: median seconds. visited, skipped: P.V tiles of all samples."""

    point: Point
    task: str
    length: int
    samples: int
    prompt_tokens: float
    score: float
    gold_nll: float
    ttft_s: float
    visited: int
    skipped: int

    @property
    def skip_rate(self) -> float:
        """skipped / visited; NaN where nothing was visited."""
        return self.skipped / self.visited if self.visited else math.nan

    @property
    def skip_lambda(self) -> float | None:
        return lambda_at(self.point, self.length)

    @property
    def mag(self) -> float | None:
        return mag_at(self.point, self.length)


@dataclass(frozen=True)
class Results:
    """Cells of one server: the full grid of points x tasks x lengths, holes included.

    accuracy: the records that hold an answer. layer_rates: (threshold key, length) -> layer -> skip
    rate. others: samples in the file that
    belong to another server, model or setting and are left out. times: those with a TTFT.
    """

    points: tuple[Point, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    cells: tuple[Cell, ...]
    layer_rates: dict[tuple[str, int], dict[int, float]]
    plan: Record
    others: int
    accuracy: tuple[Record, ...]
    times: tuple[Record, ...] = ()

    def cell(self, point: Point, task: str, length: int) -> Cell:
        wanted = (key_of(point), task, length)
        return next(c for c in self.cells if (key_of(c.point), c.task, c.length) == wanted)


def collect(records: Sequence[Record]) -> Results:
    """Of the server that the last plan in the file names, and of those plans that say nothing else
    of theirs (files of two releases put together). Raises InputError without any, or when a
    record is not as `blasst ruler` writes it."""
    try:
        return _collect(records)
    except MALFORMED as e:
        raise InputError(
            f"the results lack a field or hold a wrong type ({e!r}): the file was edited or is of "
            "another release; measure again with another --out"
        ) from e


def _collect(records: Sequence[Record]) -> Results:
    plans = [r for r in records if r["kind"] == "plan"]
    if not plans:
        raise InputError("the results hold no plan; make them with `blasst ruler sweep` or `run`")
    plan = plans[-1]
    same = [p for p in plans if p is plan or same_server(p, plan)]
    of_it = {p["fingerprint"] for p in same}
    samples = [r for r in records if r["kind"] == "sample"]
    # Measured again (with its NLL, or another answer budget): the last time counts.
    ours = [
        *{
            (r["threshold"], r["task"], r["length"], r["prompt_sha256"], r["pass"]): r
            for r in samples
            if r["fingerprint"] in of_it
        }.values()
    ]
    for other in same:
        _check_plan(other)
    for record in ours:
        _check_numbers(record)
    points = sorted(
        {key: point_of(key) for p in same for key in p["thresholds"]}.values(), key=order_of
    )
    tasks = list(dict.fromkeys(task for p in same for task in p["tasks"]))
    lengths = sorted({length for p in same for length in p["lengths"]})
    grid: dict[tuple[str, str, int], list[Record]] = {}
    for record in ours:
        grid.setdefault((record["threshold"], record["task"], record["length"]), []).append(record)
    cells = tuple(
        _cell(point, task, length, grid.get((key_of(point), task, length), []))
        for length in lengths
        for task in tasks
        for point in points
    )
    return Results(
        points=tuple(points),
        tasks=tuple(tasks),
        lengths=tuple(lengths),
        cells=cells,
        layer_rates=_layer_rates(ours),
        plan=plan | _of_all(same),
        others=sum(r["fingerprint"] not in of_it for r in samples),
        accuracy=tuple(_answered(ours)),
        times=tuple(_timed(ours)),
    )


def _check_plan(plan: Record) -> None:
    """Raises TypeError for lists that hold something else, or nothing."""
    if not isinstance(plan.get("server", {}), dict):
        raise TypeError(f"server {plan['server']!r}")
    for name, kind in (("thresholds", str), ("tasks", str), ("lengths", int)):
        values = plan[name]
        if not isinstance(values, list) or not values or {*map(type, values)} != {kind}:
            raise TypeError(f"{name} {values!r}")


def _check_numbers(record: Record) -> None:
    """Raises ValueError for what no measurement gives and a verdict would be made of. An NLL or
    a time that is NaN only has no mean."""
    bounds = {"prompt_tokens": (1, math.inf), "visited": (0, math.inf)}
    bounds["skipped"] = (0, record["visited"])
    if record["pass"] != "ttft":
        bounds["match"] = (0, 1)
    for name, (low, high) in bounds.items():
        if not low <= float(record[name]) <= high:
            raise ValueError(f"{name} {record[name]!r}")


def _of_all(plans: Sequence[Record]) -> Record:
    """What differs between sweeps into one file, of all of them: the last one alone would not do
    it again."""
    seeds = {seed for plan in plans for seed in plan.get("seeds", ())}
    modes = dict.fromkeys(plan.get("mode", "balanced") for plan in plans)
    data = {name: origin for plan in plans for name, origin in plan.get("data", {}).items()}
    found = {"seeds": sorted(seeds), "mode": ", ".join(modes), "data": data}
    known = {"server": said_by_all(plans)} if "server" in plans[-1] else {}
    return known | (found if seeds else {})


def _answered(records: Sequence[Record]) -> list[Record]:
    """Each prompt once, also when it was answered in passes of two kinds."""
    return _last(r for r in records if r["pass"] != "ttft")


def _timed(records: Sequence[Record]) -> list[Record]:
    return _last(r for r in records if r["pass"] != "accuracy")


def _last(records: Iterable[Record]) -> list[Record]:
    found = {(r["threshold"], r["task"], r["length"], r["prompt_sha256"]): r for r in records}
    return [*found.values()]


def _cell(point: Point, task: str, length: int, records: list[Record]) -> Cell:
    answered = _answered(records)
    timed = [float(r["ttft_s"]) for r in _timed(records)]

    def mean(name: str, among: list[Record]) -> float:
        values = [float(r[name]) for r in among if r[name] is not None]
        return statistics.fmean(values) if values else math.nan

    return Cell(
        point=point,
        task=task,
        length=length,
        samples=len(answered) or len(timed),
        prompt_tokens=mean("prompt_tokens", records),
        score=task_score([r["match"] for r in answered]),
        gold_nll=mean("gold_nll", answered),
        ttft_s=statistics.median(timed) if timed else math.nan,
        visited=sum(r["visited"] for r in records),
        skipped=sum(r["skipped"] for r in records),
    )


def _layer_rates(records: Sequence[Record]) -> dict[tuple[str, int], dict[int, float]]:
    sums: dict[tuple[str, int], dict[int, list[int]]] = {}
    for record in records:
        layers = sums.setdefault((record["threshold"], record["length"]), {})
        for layer, visited, skipped in record["layers"]:
            pair = layers.setdefault(layer, [0, 0])
            pair[0] += visited
            pair[1] += skipped
    return {
        key: {layer: s / v for layer, (v, s) in sorted(layers.items()) if v}
        for key, layers in sums.items()
    }
