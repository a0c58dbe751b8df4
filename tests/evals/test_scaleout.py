"""Several endpoints, a cost estimate, and the verbs around a sweep."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blasst.evals.cells import collect
from blasst.evals.client import Completions
from blasst.evals.errors import InputError, ServerError
from blasst.evals.estimate import estimate
from blasst.evals.on_ray import Begun, Endpoint, measure_group, run_on_ray
from blasst.evals.progress import Progress
from blasst.evals.recommend import as_words, recommend
from blasst.evals.runner import Runner, RunOptions
from blasst.evals.samples import Sample, write_samples
from blasst.evals.scaleout import run_everywhere
from blasst.evals.sidecar import Sidecar
from blasst.evals.store import ResultStore, read_results
from blasst.evals.sweep import Plan
from blasst.evals.thresholds import parse_points
from blasst.server.cli import main

POINTS = parse_points(["dense", "1000"], [], [])
Urls = list[str]


@pytest.fixture
def two(fake_module: ModuleType) -> Iterator[tuple[list[Any], Urls]]:
    """Two equal servers, with their URLs."""
    fakes = [fake_module.Fake(delay_s=0.02), fake_module.Fake(delay_s=0.02)]
    with fake_module.serving(fakes[0]) as a, fake_module.serving(fakes[1]) as b:
        yield fakes, [a, b]


@pytest.fixture
def runners_on() -> Iterator[Callable[..., list[Runner]]]:
    closing: list[Any] = []

    def make(urls: Urls, store: ResultStore, concurrency: int = 2) -> list[Runner]:
        found = []
        for url in urls:
            client, sidecar = Completions(url, timeout_s=20), Sidecar(url)
            closing.extend((client, sidecar))
            options = RunOptions(settle_s=0.5, concurrency=concurrency)
            found.append(Runner(client, sidecar, store, options))
        return found

    yield make
    for client in closing:
        client.close()


def answers(path: Path) -> dict[str, Any]:
    names = ("match", "gold_nll", "prediction", "threshold", "sample", "pass")
    return {
        r["key"]: {n: r.get(n) for n in names} for r in read_results(path) if r["kind"] == "sample"
    }


def test_two_endpoints_give_what_one_gives(
    tmp_path: Path, two: tuple[list[Any], Urls], runners_on: Any, samples: list[Sample]
) -> None:
    fakes, urls = two
    plan = Plan(POINTS, samples, chunk=1, timed=1)
    for name, used in (("one", urls[:1]), ("two", urls)):
        with ResultStore(tmp_path / name) as store:
            done = run_everywhere(runners_on(used, store), plan, Progress(0, quiet=True))
            assert done == 12
        if name == "one":
            assert fakes[0].prompts
            assert not fakes[1].prompts
    assert fakes[1].prompts
    assert answers(tmp_path / "one") == answers(tmp_path / "two")
    assert [f.threshold for f in fakes] == [None, None]
    with ResultStore(tmp_path / "two") as store:
        assert run_everywhere(runners_on(urls, store), plan, Progress(0, quiet=True)) == 0


def test_unequal_endpoints_are_refused(
    tmp_path: Path, two: tuple[list[Any], Urls], runners_on: Any, samples: list[Sample]
) -> None:
    fakes, urls = two
    fakes[0].served, fakes[1].served = {"dtype": "bfloat16"}, {"dtype": "float32"}
    words = "different servers .dtype bfloat16 and float32.; one sweep needs equal ones"
    with ResultStore(tmp_path / "r") as store, pytest.raises(InputError, match=words):
        run_everywhere(runners_on(urls, store), Plan(POINTS, samples), Progress(0, quiet=True))


def test_a_fault_on_one_endpoint_ends_all_and_restores(
    tmp_path: Path, two: tuple[list[Any], Urls], runners_on: Any, samples: list[Sample]
) -> None:
    fakes, urls = two
    fakes[1].faults = {"ignores-threshold"}
    plan = Plan(POINTS, samples, chunk=1, timed=0)
    with ResultStore(tmp_path / "r") as store, pytest.raises(ServerError, match="ignores the"):
        run_everywhere(runners_on(urls, store), plan, Progress(0, quiet=True))
    assert [f.threshold for f in fakes] == [None, None]


def test_a_group_measured_far_away_gives_the_same_records(
    tmp_path: Path, two: tuple[list[Any], Urls], runners_on: Any, samples: list[Sample]
) -> None:
    """What a Ray task does, without Ray."""
    _, urls = two
    plan = Plan(POINTS, samples, chunk=2, timed=0)
    options = RunOptions(settle_s=0.5, concurrency=2)
    endpoint = Endpoint(urls[0], urls[0])
    with ResultStore(tmp_path / "r") as store:
        (runner,) = runners_on(urls[:1], store)
        run_everywhere([runner], plan, Progress(0, quiet=True))
    begun = Begun(urls[0], runner.details, runner.fingerprint, frozenset())
    records = [r for g in plan.groups() for r in measure_group(endpoint, g, options, None, begun)]
    assert {r["key"] for r in records} == set(answers(tmp_path / "r"))
    done = replace(begun, done=frozenset(r["key"] for r in records))
    assert measure_group(endpoint, plan.groups()[0], options, None, done) == []
    other = replace(begun, details=runner.details | {"weights": "abc"})
    with pytest.raises(InputError, match=r"weights abc and unknown"):
        measure_group(endpoint, plan.groups()[0], options, None, other)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster of this machine. Its package is installed beside the environment, where no
    engine imports it, or in it."""
    apart = Path(sys.prefix) / "ray"
    with pytest.MonkeyPatch.context() as patch:
        if (apart / "ray").is_dir():
            patch.syspath_prepend(apart)
            patch.setenv("PYTHONPATH", str(apart))
        if importlib.util.find_spec("ray") is None:
            pytest.skip(f"the package ray is neither installed nor in {apart}")
        import ray

        ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()


def on_ray(urls: Urls, plan: Plan, path: Path) -> int:
    options = RunOptions(settle_s=0.5, concurrency=2)
    with ResultStore(path) as store:
        endpoints = [Endpoint(url, url) for url in urls]
        return run_on_ray(endpoints, plan, store, options, Progress(0, quiet=True))


def test_on_a_ray_cluster_of_this_machine(
    cluster: str,
    tmp_path: Path,
    two: tuple[list[Any], Urls],
    runners_on: Any,
    samples: list[Sample],
) -> None:
    """The records of one process, times apart; both servers worked; nothing is measured again."""
    fakes, urls = two
    plan = Plan(POINTS, samples, chunk=2, timed=0)
    assert on_ray(urls, plan, tmp_path / "r") == 8
    assert all(fake.prompts for fake in fakes)
    assert [f.threshold for f in fakes] == [None, None]
    with ResultStore(tmp_path / "one") as store:
        run_everywhere(runners_on(urls[:1], store), plan, Progress(0, quiet=True))
    assert answers(tmp_path / "r") == answers(tmp_path / "one")
    assert on_ray(urls, plan, tmp_path / "r") == 0


def test_unequal_servers_of_a_cluster_are_refused(
    cluster: str, tmp_path: Path, two: tuple[list[Any], Urls], samples: list[Sample]
) -> None:
    fakes, urls = two
    fakes[1].max_model_len = 2048
    words = r"^http\S+ and http\S+ are different servers \(max_model_len 4096 and 2048\)"
    with pytest.raises(InputError, match=words):
        on_ray(urls, Plan(POINTS, samples, chunk=2, timed=0), tmp_path / "r")


def test_without_ray_the_option_says_so(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    plan = Plan(POINTS, samples)
    with ResultStore(tmp_path / "r") as store, pytest.raises(InputError, match="pip install ray"):
        run_on_ray([Endpoint("x", "y")], plan, store, RunOptions(), Progress(0, quiet=True))


def test_the_estimate_counts_what_is_left(
    tmp_path: Path, two: tuple[list[Any], Urls], runners_on: Any, samples: list[Sample]
) -> None:
    _, urls = two
    plan = Plan(POINTS, samples, chunk=2, timed=1)
    with ResultStore(tmp_path / "r") as store:
        (runner,) = runners_on(urls[:1], store)
        found = estimate(runner, plan)
        assert found.requests == 2 * (4 * 2 + 2)
        assert found.prompt_tokens == pytest.approx(20 * 900, rel=0.15)
        # 20 requests of 30 ms to the first text and more, and a second for each of 8 cells
        assert 8.6 < found.seconds < 60
        assert "20 requests" in found.words()
        assert 8 < found.least < found.seconds
        (alone,) = runners_on(urls[:1], store, 1)
        one = estimate(alone, plan)
        assert one.least == pytest.approx(one.seconds)
        run_everywhere([runner], plan, Progress(0, quiet=True))
        assert estimate(runner, plan).requests == 0


def test_the_verbs_from_samples_to_a_recommendation(
    tmp_path: Path,
    two: tuple[list[Any], Urls],
    samples: list[Sample],
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, urls = two
    file, out = tmp_path / "s.jsonl", tmp_path / "r.jsonl"
    write_samples(file, (replace(s, data=f"{s.task}.json: made up, sha256 0") for s in samples))
    argv = ["ruler", "run", "--samples", str(file), "--out", str(out), "--mag", "dense", "1000"]
    argv += ["--settle", "1", "--url", *urls, "--sidecar", *urls]
    assert main([*argv, "--dry-run"]) == 0
    assert "at most about" in capsys.readouterr().err
    assert not out.exists()
    assert main(argv) == 0
    assert len(answers(out)) == 2 * (4 + 4)
    texts = collect(read_results(out)).plan["data"]
    assert texts["niah_single_2.json"] == texts["vt.json"] == "made up, sha256 0"
    capsys.readouterr()
    assert main(["ruler", "verdict", str(out), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["outcome"] == "INCONCLUSIVE"
    assert main(["ruler", "recommend", str(out)]) == 2
    assert "recommended: dense" in capsys.readouterr().out
    assert main(["ruler", "verdict", str(tmp_path / "none")]) == 3
    assert main([*argv[:-1]]) == 2


def results_with(
    ttft: dict[str, float], worse: dict[str, float], *, timed: int = 400, noise: float = 0.0
) -> Any:
    """400 samples of one task; threshold key -> TTFT, and share of answers lost. noise: share by
    which every other time is longer."""
    plan: dict[str, Any] = {"kind": "plan", "fingerprint": "f", "server": {}, "at": 0.0}
    plan |= {"thresholds": list(ttft), "lengths": [4096], "tasks": ["vt"]}
    records = [plan]
    for key, seconds in ttft.items():
        for i in range(400):
            record = {"kind": "sample", "fingerprint": "f", "threshold": key, "task": "vt"}
            record |= {"pass": "both", "length": 4096, "prompt_sha256": str(i), "tokens": []}
            record |= {"prompt_tokens": 4000, "gold_nll": 0.1, "prediction": "x"}
            record |= {"match": float(i >= 400 * worse.get(key, 0.0))}
            record |= {"ttft_s": seconds * (1 + noise * (i % 2) * (key != "dense"))}
            record["pass"] = "both" if i < timed else "accuracy"
            records.append(record | {"visited": 1, "skipped": 0, "layers": []})
    return collect(records)


@pytest.mark.parametrize(
    ("ttft", "worse", "key", "outcome"),
    [
        (
            {"mag:7000.0": 0.9, "mag:2500.0": 0.7, "mag:1000.0": 0.6},
            {"mag:1000.0": 0.2},
            "MAG 2500",
            "GO",
        ),
        ({"mag:7000.0": 1.1}, {}, "dense", "NO-GO"),
        ({"mag:1000.0": 0.5}, {"mag:1000.0": 0.2}, "dense", "NO-GO"),
        ({"mag:1000.0": 0.5}, {"mag:1000.0": 0.01}, "dense", "INCONCLUSIVE"),
    ],
)
def test_the_fastest_of_those_that_are_go(
    ttft: dict[str, float], worse: dict[str, float], key: str, outcome: str
) -> None:
    found = recommend(results_with({"dense": 1.0} | ttft, worse))
    assert found.outcome == outcome
    assert f"recommended: {key} (" in as_words(found)


@pytest.mark.parametrize("seconds", [0.0, float("nan"), -1.0])
def test_a_time_that_is_none_is_one_clear_error(seconds: float) -> None:
    with pytest.raises(InputError, match="has a TTFT of"):
        recommend(results_with({"dense": 1.0, "mag:1000.0": seconds}, {}))


@pytest.mark.parametrize(
    ("timed", "noise", "outcome"),
    [
        (400, 0.0, "GO"),
        (8, 0.01, "GO"),
        (8, 0.09, "INCONCLUSIVE"),
        (1, 0.0, "INCONCLUSIVE"),
        (2, 0.01, "INCONCLUSIVE"),
    ],
)
def test_a_gain_within_the_noise_is_none(timed: int, noise: float, outcome: str) -> None:
    """5% faster, but every other time is longer: by how much, and over how many prompts?"""
    ttft = {"dense": 1.0, "mag:2500.0": 0.95}
    found = recommend(results_with(ttft, {}, timed=timed, noise=noise))
    assert found.outcome == outcome
    assert (found.point is not None) == (outcome == "GO")
    (candidate,) = found.candidates
    assert ("too few prompts" in as_words(found)) == (timed <= 2)
    assert candidate.ttft.ratio == pytest.approx(0.95 * (1 + noise) ** 0.5 if timed > 1 else 0.95)
