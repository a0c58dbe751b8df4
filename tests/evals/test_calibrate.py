"""Calibration of a server whose curve is known, and the presets that come of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blasst.evals.calibrate import RatePoint, fit, geometry_of, measure, query_heads, tiles
from blasst.evals.errors import InputError, ServerError
from blasst.evals.prompts import PromptEncoder
from blasst.evals.runner import Runner
from blasst.evals.samples import Sample, generate
from blasst.evals.store import ResultStore
from blasst.evals.tasks import Haystack
from blasst.kernels.exchange.presets import PresetGeometry, curve_of_config, loads
from blasst.server.cli import main

Connect = Callable[..., Runner]
A, B = 20.0, 5.0


def quiet(text: str) -> None:
    """Nobody listens."""


@pytest.fixture
def prompts(encoder: PromptEncoder, haystack: Haystack) -> list[Sample]:
    make = [generate("vt", n, 1, seed=1, encoder=encoder, haystack=haystack) for n in (1024, 3000)]
    return [sample for made in make for sample in made]


@pytest.mark.parametrize(("impl", "rows"), [("cpu", 128), ("hopper", 64)])
def test_the_curve_of_the_server_is_found(
    impl: str, rows: int, fake: Any, connect: Connect, prompts: list[Sample], tmp_path: Path
) -> None:
    fake.impl, fake.curve = impl, (4, rows, A, B)
    with ResultStore(tmp_path / "r") as store:
        found = measure(connect(store), prompts, 4, quiet)
    assert found.geometry == PresetGeometry(impl, rows, 128)
    assert found.heads == 4
    assert len(found.points) == 2 * 14
    curve, quality = fit(found.points)
    assert curve.a == pytest.approx(A, rel=0.05)
    assert curve.b == pytest.approx(B, rel=0.02)
    assert quality.error < 0.02
    assert quality.lengths == (1024, 3000)
    lambdas = {body["vllm_xargs"]["blasst_lambda"] for body in fake.prompts}
    assert len(lambdas) == 14


def test_counters_that_fit_no_geometry_are_an_error(
    fake: Any, connect: Connect, prompts: list[Sample], tmp_path: Path
) -> None:
    with ResultStore(tmp_path / "r") as store:
        with pytest.raises(ServerError, match="no known geometry of cpu"):
            measure(connect(store), prompts, 4, quiet)
        fake.faults = {"ignores-threshold"}
        with pytest.raises(ServerError, match="visited no tile"):
            measure(connect(store), prompts, 4, quiet)


def test_the_geometry_that_the_server_names_is_the_one_that_must_fit() -> None:
    both = tiles(1024, 128, 128) * 8
    assert geometry_of("triton", both, 1024, 8)[0] == PresetGeometry("triton", 128, 128)
    with pytest.raises(ServerError, match="no known geometry"):
        geometry_of("triton", both, 1024, 8, "128x64")
    count = tiles(1024, 128, 64)
    found = geometry_of("triton", 8 * count, 1024, None, "128x64")
    assert found == (PresetGeometry("triton", 128, 64), 8)


def test_tiles_by_hand() -> None:
    assert tiles(128, 128, 128) == 1
    assert tiles(129, 128, 128) == 1 + 2
    assert tiles(512, 128, 128) == 1 + 2 + 3 + 4
    assert tiles(256, 64, 128) == 1 + 1 + 2 + 2
    assert geometry_of("cpu", 9 * 10, 512, 9) == (PresetGeometry("cpu", 128, 128), 9)
    assert geometry_of("triton", 9 * 20, 512, 9)[0] == PresetGeometry("triton", 64, 128)
    assert geometry_of("hopper", 8 * 20, 512, None) == (PresetGeometry("hopper", 64, 128), 8)


def point(rate: float, length: int = 4096, a: float = A) -> RatePoint:
    skip_lambda = a * math.exp(B * rate) / length
    return RatePoint(length, length, skip_lambda, 10_000, round(10_000 * rate))


def test_flat_ends_do_not_bend_the_curve() -> None:
    good = [point(0.1), point(0.5), point(0.8), point(0.3, 8192)]
    flat = [RatePoint(4096, 4096, 1e-6, 10_000, 0), RatePoint(4096, 4096, 0.9, 10_000, 9_990)]
    curve, quality = fit([*good, *flat])
    assert (curve.a, curve.b) == (pytest.approx(A, rel=1e-3), pytest.approx(B, rel=1e-3))
    assert (quality.points, quality.low, quality.high) == (4, 0.1, 0.8)


def test_error_is_the_largest_difference_of_a_rate() -> None:
    _, quality = fit([point(0.1), point(0.4), point(0.8), point(0.1, 8192, 2 * A)])
    assert 0.05 < quality.error < 0.2


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ([], "too few"),
        ([point(0.5), point(0.52), point(0.55)], "too few"),
        (
            [
                RatePoint(4096, 4096, 0.1, 100, 90),
                RatePoint(4096, 4096, 0.2, 100, 50),
                point(0.5),
                RatePoint(4096, 4096, 0.5, 100, 10),
            ],
            "does not rise",
        ),
    ],
)
def test_no_curve_is_better_than_a_wrong_one(points: list[RatePoint], why: str) -> None:
    with pytest.raises(InputError, match=why):
        fit(points)


def test_query_heads_of_a_model_folder(tmp_path: Path) -> None:
    assert query_heads(tmp_path) is None
    (tmp_path / "config.json").write_text('{"num_attention_heads": 9}')
    assert query_heads(tmp_path) == 9


def test_the_verb_writes_a_preset_and_converts_it(
    fake: Any, fake_url: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.curve = (4, 128, A, B)
    out, config = tmp_path / "p.json", tmp_path / "config.json"
    argv = ["ruler", "calibrate", "--url", fake_url, "--sidecar", fake_url, "--tasks", "vt"]
    argv += ["--model", str(tiny_model), "--lengths", "1024", "3000", "--count", "1"]
    assert main([*argv, "--out", str(out)]) == 0
    preset = loads(out.read_text())
    assert preset.model == "fake-model"
    assert fake.threshold is None
    config.write_text('{"model_type": "llama"}')
    argv = ["ruler", "preset", str(out), "--target", "0.5", "--to-config", str(config)]
    assert main(argv) == 0
    body = json.loads(config.read_text())
    assert body["model_type"] == "llama"
    assert curve_of_config(body) == (preset.curve, 0.5)
    back = ["ruler", "preset", str(tmp_path / "b.json"), "--from-config", str(config)]
    back += ["--model-name", "fake-model"]
    assert main([*back, "--geometry", "hopper:64x128"]) == 2
    assert "calibrated for cpu:128x128, not for --geometry hopper" in capsys.readouterr().err
    assert main(back) == 0
    again = loads((tmp_path / "b.json").read_text())
    assert (again.curve, again.geometry, again.fit) == (preset.curve, preset.geometry, preset.fit)
    del body["sparse_attention_config"]["producer"]  # as others write it
    config.write_text(json.dumps(body))
    assert main(back) == 2
    assert main([*back, "--geometry", "cpu:128x128"]) == 0
    assert loads((tmp_path / "b.json").read_text()).curve == preset.curve
    assert main(["ruler", "preset", str(out), "--target", "0.999"]) == 2
    assert "outside" in capsys.readouterr().err
