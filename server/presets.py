"""Calibration presets of a folder, and the one that fits what runs: a target becomes a scale."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blasst.kernels.exchange.layout import RANK, tiles_of
from blasst.kernels.exchange.presets import Preset, PresetError, loads
from blasst.kernels.exchange.stats import StatsPage, open_now
from blasst.kernels.threshold import SkipThreshold
from blasst.server.problems import Problem

_MOST_FILES = 200
_MAX_BYTES = 256 * 1024


@dataclass(frozen=True)
class Found:
    """One file. preset None: it cannot be read. refusal: why it does not fit what runs now, ""
    when it does."""

    name: str
    preset: Preset | None
    refusal: str


@dataclass(frozen=True)
class Running:
    """Models, implementations and tiles of the ranks that run; a preset holds for one of each.

    tiles: rows x keys that vote as one; "" where a rank does not say: its layers differ in it, or
    it is of an older release."""

    models: frozenset[str]
    impls: frozenset[str]
    tiles: frozenset[str]

    @classmethod
    def of(cls, pages: Iterable[StatsPage]) -> Running:
        live = [page.labels for page in pages if page.kind == RANK and page.alive]
        return cls(
            frozenset(labels.get("model_name", "") for labels in live),
            frozenset(labels.get("impl", "") for labels in live),
            frozenset(tiles_of(labels) for labels in live),
        )

    def refusal(self, preset: Preset) -> str:
        """Why this preset must not be used; "" when it may."""
        if not self.models:
            return "no engine runs, so nothing says whether it fits; start the engine first"
        if self.impls != {preset.geometry.impl}:
            return (
                f"calibrated for {preset.geometry} and {', '.join(sorted(self.impls))} runs: its "
                "skip rates would be others; calibrate on this kernel"
            )
        tiles = f"{preset.geometry.tile_m}x{preset.geometry.tile_n}"
        if "" in self.tiles:
            return (
                "the engine does not say how many rows and keys vote as one: it is of an older "
                "release, or its layers differ in it; upgrade it, or set a scale"
            )
        if self.tiles != {tiles}:
            return (
                f"calibrated for {preset.geometry} and tiles of {', '.join(sorted(self.tiles))} "
                "vote: its skip rates would be others; calibrate on this kernel"
            )
        if self.models != {preset.model}:
            return (
                f"calibrated for {preset.model!r} and {', '.join(sorted(self.models))} runs; "
                "calibrate this model"
            )
        return ""


def find(folder: Path, running: Running) -> list[Found]:
    """Every *.json of the folder, in name order; a missing folder has none."""
    try:
        paths = sorted(p for p in folder.iterdir() if p.suffix == ".json")
    except OSError:
        return []
    return [_load(path, running) for path in paths[:_MOST_FILES]]


def threshold(
    found: Iterable[Found], target_skip_rate: float, name: str
) -> tuple[SkipThreshold, str]:
    """The scale for a target through the named preset, or the only one that fits, and where it
    came from in words. Raises Problem:
    404 no such preset, 409 none or several fit, 422 the target is outside what was measured."""
    chosen = [f for f in found if f.name == name] if name else [f for f in found if not f.refusal]
    if name and not chosen:
        raise Problem(
            404, "no-preset", f"There is no preset {name[:80]!r}; GET /v1/blasst/presets has them."
        )
    if len(chosen) != 1 or chosen[0].preset is None or chosen[0].refusal:
        why = chosen[0].refusal if len(chosen) == 1 else f"{len(chosen)} presets fit"
        raise Problem(
            409,
            "preset-unfit",
            f"A target skip rate needs one preset that fits what runs: {why}. Name one with "
            "`preset`, or make one with `blasst ruler calibrate`.",
        )
    try:
        scale = chosen[0].preset.threshold(target_skip_rate)
    except ValueError as e:
        raise Problem(422, "bad-threshold", str(e)) from e
    return scale, f"preset {chosen[0].name}: target skip rate {target_skip_rate:g}"


def _load(path: Path, running: Running) -> Found:
    # A file may have a name that is no text, an answer must not.
    name = os.fsencode(path.stem).decode("utf-8", "replace")
    try:
        with open(path, "rb", buffering=0, opener=open_now) as f:
            data = f.read(_MAX_BYTES + 1) or b""
        if len(data) > _MAX_BYTES:
            raise PresetError(f"it is larger than {_MAX_BYTES} bytes: no preset")
        preset = loads(data.decode("utf-8"))
    except OSError as e:
        return Found(name, None, f"it cannot be read: {e.strerror}")
    except ValueError as e:
        return Found(name, None, str(e))
    return Found(name, preset, running.refusal(preset))
