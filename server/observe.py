"""What the statistics pages say: who follows, what ranks skipped, how long first tokens took."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence

from blasst.kernels.exchange.desired import DesiredState, DesiredStateError
from blasst.kernels.exchange.layout import (
    FRONT,
    LAMBDA_CLASSES,
    LENGTH_CLASSES,
    RANK,
    RETIRED,
    TTFT_BUCKETS_S,
)
from blasst.kernels.exchange.pages import (
    CachedPages,
    ClassTotals,
    Histogram,
    RankTotals,
    model_totals,
    rank_totals,
)
from blasst.kernels.exchange.schedule import Schedule
from blasst.kernels.exchange.stats import SUFFIX, StatsPage
from blasst.kernels.threshold import lambda_to_mag
from blasst.server import models
from blasst.server.canary import Canary, CanaryState
from blasst.server.control import ControlService
from blasst.server.presets import Found

DEFAULT_MIN_CONTEXT = 8192
"""The plugin's, for a front end of an older release, which does not say."""

_GENERATION_PLAUSIBLE = 1 << 52
"""Half of what desired.json takes: more is damage, and would leave no generation above it."""

Tiles = dict[tuple[int, int], tuple[int, int]]


def highest_generation(pages: Iterable[StatsPage]) -> int:
    """The newest generation that any front end, living or dead, reports."""
    reported = (
        int(page.scalar(name))
        for page in pages
        if page.kind == FRONT
        for name in ("generation_read", "generation_stamped")
    )
    return max((number for number in reported if number <= _GENERATION_PLAUSIBLE), default=0)


def refusal(pages: Iterable[StatsPage]) -> str:
    """Why no layer of any running rank can skip; empty if one can, or while no rank runs."""
    said = [p.labels.get("refusal", "") for p in pages if p.kind == RANK and p.alive]
    return said[0] if said and all(said) else ""


def converged(state: DesiredState, front_ends: Sequence[models.FrontEndView]) -> bool:
    live = [f for f in front_ends if f.alive]
    return bool(live) and all(f.generation_read == state.generation for f in live)


def pending(state: models.ThresholdState) -> bool:
    """A live front end has yet to read this generation. With none there is nobody to wait for."""
    return not state.converged and any(f.alive for f in state.front_ends)


def preset_view(found: Found) -> models.PresetView:
    preset = found.preset
    return models.PresetView(
        name=found.name,
        model=preset.model if preset else None,
        geometry=str(preset.geometry) if preset else None,
        low=preset.fit.low if preset else None,
        high=preset.fit.high if preset else None,
        error=preset.fit.error if preset else None,
        usable=not found.refusal,
        refusal=found.refusal,
    )


def threshold_state(state: DesiredState, cache: CachedPages) -> models.ThresholdState:
    """The desired state as GET and PUT answer it."""
    front_ends = front_end_views(cache.pages())
    threshold = None if isinstance(state.threshold, Schedule) else state.threshold
    fixed = None
    if threshold is not None and threshold.unit != "scale":
        fixed = threshold.skip_lambda()
    mag = None
    if threshold is not None and threshold.unit == "mag":
        mag = threshold.value
    elif fixed:
        mag = lambda_to_mag(fixed)
    return models.ThresholdState(
        generation=state.generation,
        threshold=None
        if threshold is None
        else models.ThresholdValue(unit=threshold.unit, value=threshold.value),
        mag=mag,
        **{"lambda": fixed},
        schedule=_steps(state.threshold) if isinstance(state.threshold, Schedule) else None,
        min_context=state.min_context,
        updated_at=state.updated_at,
        updated_by=state.updated_by,
        reason=state.reason,
        origin=state.origin,
        converged=converged(state, front_ends),
        front_ends=front_ends,
    )


def _steps(schedule: Schedule) -> list[models.StepValue]:
    return [models.StepValue.model_validate(step) for step in schedule.dump()]


def status(
    control: ControlService, cache: CachedPages, canary: Canary | None = None
) -> models.Status:
    """Never fails: an unreadable desired file shows as `error`."""
    pages = cache.pages()
    desired, error = None, ""
    try:
        desired = threshold_state(control.read(), cache)
    except DesiredStateError as e:
        error = str(e)
    ranks = rank_totals(pages)
    totals = model_totals(pages)
    everything: Tiles = {}
    # Pages of a model that ran here before lie in the folder too; layers of two do not add up.
    running = {rank.model_name for rank in ranks if rank.alive}
    for rank in (r for r in ranks if not running or r.model_name in running):
        for where, (visited, skipped) in rank.tiles.items():
            v, s = everything.get(where, (0, 0))
            everything[where] = (v + visited, s + skipped)
    return models.Status(
        desired=desired,
        error=error,
        last_error=None
        if control.tally.last is None
        else models.LastError(**vars(control.tally.last)),
        canary=None if canary is None else _canary(canary.state()),
        converged=desired is not None and desired.converged,
        front_ends=front_end_views(pages),
        ranks=[_rank(rank) for rank in ranks],
        tiles=_table(everything),
        unreadable_pages=cache.unreadable,
        requests_rejected=sum(t.requests_rejected for t in totals.values()),
        desired_read_errors=sum(t.desired_read_errors for t in totals.values()),
        classes=[
            _class(model, key, total)
            for model, of_model in sorted(totals.items())
            for key, total in sorted(of_model.classes.items(), key=lambda item: _order(item[0]))
        ],
    )


def follows(pages: Iterable[StatsPage], generation: int) -> bool:
    """Every front end that runs has read it, and there is one."""
    live = [p for p in pages if p.kind == FRONT and p.alive]
    return bool(live) and all(p.scalar("generation_read") == generation for p in live)


def engine_min_context(pages: Iterable[StatsPage]) -> int:
    """Prompt tokens below which running front ends are dense by their own setting."""
    live = [p.labels.get("min_context", "") for p in pages if p.kind == FRONT and p.alive]
    return max((int(text) for text in live if text.isdecimal()), default=DEFAULT_MIN_CONTEXT)


def _canary(state: CanaryState) -> models.CanaryView:
    return models.CanaryView(
        probes=state.probes,
        agreement=state.agreement,
        control_agreement=state.control,
        nll_increase_nats=state.nll_increase,
        min_agreement=state.bounds.min_agreement,
        max_nll_increase_nats=state.bounds.max_nll_increase,
        breached=state.breached,
        noisy=state.noisy,
        steps=state.steps,
        error=state.error,
    )


def front_end_views(pages: Iterable[StatsPage]) -> list[models.FrontEndView]:
    return [
        models.FrontEndView(
            name=page.name.removesuffix(SUFFIX),
            pid=int(pid) if (pid := page.labels.get("pid", "")).isdecimal() else None,
            model_name=page.labels.get("model_name", ""),
            alive=page.alive,
            generation_read=int(page.scalar("generation_read")),
            generation_stamped=int(page.scalar("generation_stamped")),
            min_context=int(own)
            if (own := page.labels.get("min_context", "")).isdecimal()
            else None,
            age_s=_age(page.updated_at),
        )
        for page in pages
        if page.kind == FRONT and RETIRED not in page.labels
    ]


def quantile(buckets: Sequence[int], q: float) -> float | None:
    """Seconds below which a share q of the observations lies, linear within its bucket."""
    total = sum(buckets)
    if not total:
        return None
    rank = q * total
    for i, cumulative in enumerate(itertools.accumulate(buckets)):
        if cumulative >= rank and buckets[i]:
            if i == len(TTFT_BUCKETS_S):
                break
            low = TTFT_BUCKETS_S[i - 1] if i else 0.0
            share = (rank - (cumulative - buckets[i])) / buckets[i]
            return low + share * (TTFT_BUCKETS_S[i] - low)
    return TTFT_BUCKETS_S[-1]


def _rank(rank: RankTotals) -> models.RankView:
    return models.RankView(
        engine=rank.engine,
        rank=rank.rank,
        model_name=rank.model_name,
        impl=rank.impl,
        geometry=rank.geometry,
        generation_seen=rank.generation_seen,
        layers_voting=rank.layers_voting,
        layers_dense={reason: n for reason, n in rank.layers_dense.items() if n},
        served=rank.served,
        alive=rank.alive,
        age_s=_age(rank.updated_at),
        counters=rank.counters,
        tiles=_table(rank.tiles),
    )


def _table(tiles: Tiles) -> models.TileTable:
    heads = sorted({head for _, head in tiles})
    layers = sorted({layer for layer, _ in tiles})
    empty = (0, 0)
    return models.TileTable(
        kv_heads=heads,
        layers=[
            models.LayerTiles(
                layer=layer,
                visited=[tiles.get((layer, head), empty)[0] for head in heads],
                skipped=[tiles.get((layer, head), empty)[1] for head in heads],
            )
            for layer in layers
        ],
    )


def _class(model: str, key: tuple[str, str], total: ClassTotals) -> models.ClassView:
    return models.ClassView(
        model_name=model,
        lambda_class=key[0],
        prompt_length_class=key[1],
        admitted=total.admitted,
        ttft=_times(total.ttft),
        prefill=_times(total.prefill),
    )


def _times(found: Histogram) -> models.TtftView:
    count, total = found.count, found.sum_s
    return models.TtftView(
        count=count,
        mean_s=total / count if count and math.isfinite(total) else None,
        p50_s=quantile(found.buckets, 0.5),
        p95_s=quantile(found.buckets, 0.95),
    )


def _order(key: tuple[str, str]) -> tuple[int, int]:
    return LENGTH_CLASSES.index(key[1]), LAMBDA_CLASSES.index(key[0])


def _age(updated_at: float) -> float:
    """Wall clock: the writer's time stamp is one too. A clock set back shows as 0."""
    return max(0.0, time.time() - updated_at)
