"""Skip rate against lambda on a running server, and the curve through it.

The server's own kernel counts, so the geometry is its own; each prompt brings its lambda along.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from blasst.evals.cells import Results
from blasst.evals.errors import InputError, ServerError
from blasst.evals.packages import Say
from blasst.evals.runner import Runner
from blasst.evals.samples import Sample
from blasst.kernels.exchange.presets import Preset, PresetFit, PresetGeometry
from blasst.kernels.threshold import SparsityCurve

LAMBDAS = tuple(2.0**-e for e in (14, 12, 10, 8, 7, 6, 5, 4, 3, 2.5, 2, 1.5, 1, 0.5))
"""From MAG 14000 to MAG 500."""
_USABLE = (0.01, 0.97)
"""Skip rates outside are flat against lambda: a logarithm through them says nothing."""
LOOSE = 0.1
"""Above this error of a skip rate the curve is no promise."""
_TILES = {"hopper": (64, 128), "blackwell": (128, 128)}
_OTHERS = (128, 128)
_ROWS, _KEYS = (32, 64, 128, 256), (64, 128, 256)


@dataclass(frozen=True)
class RatePoint:
    """Tiles of all layers and heads, summed over the prompts of one length at one lambda.
    prompt_tokens: their mean length."""

    length: int
    prompt_tokens: float
    skip_lambda: float
    visited: int
    skipped: int

    @property
    def rate(self) -> float:
        return self.skipped / self.visited


@dataclass(frozen=True)
class Calibration:
    """heads: query heads of the model."""

    points: tuple[RatePoint, ...]
    geometry: PresetGeometry
    heads: int


def measure(
    runner: Runner,
    samples: Sequence[Sample],
    heads: int | None,
    say: Say,
    lambdas: Sequence[float] = LAMBDAS,
) -> Calibration:
    """One pass over the prompts of each length, each under every lambda. heads: query heads, if
    known. Raises ServerError when the counters do not fit the prompts."""
    tiles: dict[tuple[int, float], tuple[int, int]] = {}
    geometry, found_heads = None, heads or 0
    impl, said = runner.sidecar.impl(), runner.kernels.partition(":")[2]
    for number, sample in enumerate(samples):
        say(f"calibrating: prompt {number + 1} of {len(samples)}, {sample.length} tokens")
        for skip_lambda in lambdas:
            visited, skipped, by_layer = _send(runner, sample, skip_lambda)
            if geometry is None:
                layer = next(iter(by_layer.values()))
                geometry, found_heads = geometry_of(impl, layer, len(sample.prompt), heads, said)
            _check(by_layer, len(sample.prompt), geometry, found_heads)
            v, s = tiles.get((sample.length, skip_lambda), (0, 0))
            tiles[sample.length, skip_lambda] = (v + visited, s + skipped)
    if geometry is None:
        raise InputError("no prompt to calibrate with; give --count 1 or more")
    sizes = {length: [len(s.prompt) for s in samples if s.length == length] for length, _ in tiles}
    points = tuple(
        RatePoint(length, sum(sizes[length]) / len(sizes[length]), skip_lambda, *counted)
        for (length, skip_lambda), counted in sorted(tiles.items())
    )
    return Calibration(points, geometry, found_heads)


def points_of(results: Results) -> list[RatePoint]:
    """The same out of a sweep's results: every threshold with its counters."""
    found = []
    for length in results.lengths:
        for point in results.points:
            if point is None:
                continue
            cells = [results.cell(point, task, length) for task in results.tasks]
            counted = [c for c in cells if c.visited]
            if not counted:
                continue
            tokens = sum(c.prompt_tokens * c.samples for c in counted) / sum(
                c.samples for c in counted
            )
            found.append(
                RatePoint(
                    length,
                    tokens,
                    point.skip_lambda(round(tokens)),
                    sum(c.visited for c in counted),
                    sum(c.skipped for c in counted),
                )
            )
    return found


def fit(points: Sequence[RatePoint]) -> tuple[SparsityCurve, PresetFit]:
    """Least squares of ln(lambda L) = ln a + b s. Raises InputError on too few usable points."""
    usable = [p for p in points if _USABLE[0] <= p.rate <= _USABLE[1] and p.skip_lambda > 0]
    rates = [p.rate for p in usable]
    if len(usable) < 3 or max(rates) - min(rates) < 0.1:
        raise InputError(
            f"{len(usable)} of {len(points)} points skip between {_USABLE[0]:.0%} and "
            f"{_USABLE[1]:.0%}: too few for a curve; calibrate at longer lengths"
        )
    scales = [math.log(p.skip_lambda * p.prompt_tokens) for p in usable]
    mean_rate, mean_scale = sum(rates) / len(rates), sum(scales) / len(scales)
    spread = sum((s - mean_rate) ** 2 for s in rates)
    slope = (
        sum((s - mean_rate) * (y - mean_scale) for s, y in zip(rates, scales, strict=True)) / spread
    )
    if slope <= 0:
        raise InputError("the skip rate does not rise with lambda: the counters are wrong")
    curve = SparsityCurve(math.exp(mean_scale - slope * mean_rate), slope)
    errors = [abs(curve.target(p.skip_lambda * p.prompt_tokens) - p.rate) for p in usable]
    lengths = tuple(sorted({p.length for p in usable}))
    return curve, PresetFit(max(errors), len(usable), min(rates), max(rates), lengths)


def preset_of(
    model: str, geometry: PresetGeometry, points: Sequence[RatePoint], data: str, server: str
) -> Preset:
    """server: the version that served."""
    curve, found = fit(points)
    versions = {"blasst": version("blasst"), "server": server or "unknown"}
    return Preset(model, geometry, curve, found, data, versions)


def tiles(tokens: int, rows: int, keys: int) -> int:
    """Tiles that a causal prompt of so many tokens visits in one query head."""
    return sum(-(-min((m + 1) * rows, tokens) // keys) for m in range(-(-tokens // rows)))


def geometry_of(
    impl: str, visited: int, tokens: int, heads: int | None, said: str = ""
) -> tuple[PresetGeometry, int]:
    """(geometry, query heads) that make so many visited tiles of a layer. said: rows x keys as the
    server names them. heads None: taken from that, or from the geometry that this impl usually
    has. Raises ServerError when none fits."""
    usual = _TILES.get(impl, _OTHERS)
    others = [(m, n) for m in _ROWS for n in _KEYS if (m, n) != usual]
    found = [usual, *(others if heads else [])]
    if said:
        named = PresetGeometry.parse(f"{impl}:{said}")
        found = [(named.tile_m, named.tile_n)]
    for rows, keys in found:
        count = tiles(tokens, rows, keys)
        if visited == heads * count if heads else visited % count == 0:
            return PresetGeometry(impl, rows, keys), visited // count
    raise ServerError(
        f"{visited} tiles were visited for {tokens} tokens: no known geometry of {impl} makes so "
        "many; serve with --max-num-batched-tokens of a multiple of 256, and with nobody else"
    )


def query_heads(model: Path | None) -> int | None:
    """Of a Hugging Face folder; None where it does not say."""
    if model is None:
        return None
    try:
        heads = json.loads((model / "config.json").read_text("utf-8"))["num_attention_heads"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return int(heads)


def _send(runner: Runner, sample: Sample, skip_lambda: float) -> tuple[int, int, dict[int, int]]:
    """(visited, skipped, layer -> visited) of one prompt."""
    before = runner.sidecar.counters()
    runner.client.generate(runner.model.name, sample.prompt, 1, {"blasst_lambda": skip_lambda})
    after = runner.sidecar.settled(before, len(sample.prompt) - 1, runner.options.settle_s)
    moved = after.since(before)
    if not moved.visited:
        raise ServerError(
            f"lambda {skip_lambda:g} on {len(sample.prompt)} tokens visited no tile: the server "
            "ignores vllm_xargs, or min_context is above this length"
        )
    return moved.visited, moved.skipped, {n: v for n, (v, _) in moved.layers.items() if v}


def _check(by_layer: dict[int, int], tokens: int, geometry: PresetGeometry, heads: int) -> None:
    expected = heads * tiles(tokens, geometry.tile_m, geometry.tile_n)
    wrong = {layer: n for layer, n in by_layer.items() if n != expected}
    if wrong:
        layer, count = next(iter(wrong.items()))
        raise ServerError(
            f"layer {layer} visited {count} tiles for {tokens} tokens, geometry {geometry} makes "
            f"{expected}; other traffic, or chunks that are no multiple of the tile"
        )
