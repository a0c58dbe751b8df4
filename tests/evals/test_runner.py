"""The runner against a server that behaves, and against each way of not behaving."""

from __future__ import annotations

import io
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blasst.evals.cells import collect
from blasst.evals.client import Completions
from blasst.evals.errors import EvalsError, InputError, ServerError
from blasst.evals.progress import Progress
from blasst.evals.prompts import PromptEncoder
from blasst.evals.runner import Runner
from blasst.evals.samples import Sample, write_samples
from blasst.evals.sidecar import Sidecar, parse_counters
from blasst.evals.store import ResultStore, read_results
from blasst.evals.sweep import Plan, run_sweep
from blasst.evals.thresholds import parse_points
from blasst.evals.timebox import TimeBox
from blasst.kernels.threshold import SkipThreshold

Connect = Callable[..., Runner]
POINTS = parse_points(["dense", "1000"], ["0"], [])


def sweep(connect: Connect, path: Path, plan: Plan, **options: Any) -> int:
    with ResultStore(path) as store:
        return run_sweep(connect(store, **options), plan, Progress(0, quiet=True))


def test_a_sweep_measures_every_cell(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    fake.answers = {s.prompt: "it is " + " ".join(s.answers) for s in samples if s.index == 0}
    path = tmp_path / "r.jsonl"
    assert sweep(connect, path, Plan(POINTS, samples)) == 12
    results = collect(read_results(path))
    assert [c.samples for c in results.cells] == [2] * 6
    for cell in results.cells:
        assert cell.score == 50.0
        assert cell.ttft_s >= 0.03
        assert cell.gold_nll == pytest.approx(0.1 + (cell.skip_lambda or 0.0))
    by_point = {c.skip_lambda: c.skip_rate for c in results.cells}
    assert by_point[0.5] == pytest.approx(0.375, abs=0.01)
    assert by_point[0.0] == 0.0
    assert by_point[None] != by_point[None]
    assert results.plan["server"]["blasst_version"] == "1.2"
    assert results.layer_rates[("mag:1000.0", 1024)][1] == pytest.approx(0.5, abs=0.01)
    assert fake.threshold is None


def test_requests_are_what_they_must_be(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    sweep(connect, tmp_path / "r.jsonl", Plan(POINTS, samples[:1]))
    salts = [body["cache_salt"] for body in fake.prompts]
    assert len(set(salts)) == len(salts)
    scored = [b for b in fake.prompts if "prompt_logprobs" in b]
    assert [tuple(b["prompt"]) for b in scored] == [samples[0].prompt + samples[0].gold] * 3
    measured = [b for b in fake.prompts if b["max_tokens"] == samples[0].max_tokens]
    assert [tuple(b["prompt"]) for b in measured] == [samples[0].prompt] * 3
    assert all(b["stream"] and b["temperature"] == 0 for b in measured)


def test_a_finished_sweep_sends_nothing_and_a_longer_one_only_the_rest(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    path = tmp_path / "r.jsonl"
    sweep(connect, path, Plan(POINTS, samples[:2]))
    fake.prompts.clear()
    puts = len(fake.puts)
    assert sweep(connect, path, Plan(POINTS, samples[:2])) == 0
    assert not fake.prompts
    assert len(fake.puts) == puts
    assert sweep(connect, path, Plan(POINTS, samples[:3])) == 3


def test_another_answer_budget_is_another_measurement(
    tmp_path: Path, connect: Connect, samples: list[Sample]
) -> None:
    path = tmp_path / "r.jsonl"
    plan = Plan(POINTS[:1], samples[:1])
    sweep(connect, path, plan)
    assert sweep(connect, path, plan, max_tokens=5) == 1


@pytest.mark.parametrize("timed", [None, 1], ids=["one pass", "two passes"])
def test_results_cut_off_anywhere_are_completed_to_the_same(
    timed: int | None, tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    path = tmp_path / "r.jsonl"
    plan = Plan(POINTS[:2], samples[:2], timed=timed)
    sweep(connect, path, plan)
    whole = path.read_bytes()
    measured = {r["key"]: r.get("gold_nll") for r in read_results(path) if r["kind"] == "sample"}
    rate = {c.point: c.skip_rate for c in collect(read_results(path)).cells}[POINTS[1]]
    rng = random.Random(5)
    cuts = [0, len(whole) - 1, whole.index(b"\n"), whole.index(b"\n") + 1]
    for cut in [*cuts, *rng.sample(range(len(whole)), 6)]:
        path.write_bytes(whole[:cut])
        sweep(connect, path, plan)
        again = [r for r in read_results(path) if r["kind"] == "sample"]
        assert len(again) == len(measured), f"cut at byte {cut}"
        assert {r["key"]: r.get("gold_nll") for r in again} == measured
        found = {c.point: c.skip_rate for c in collect(read_results(path)).cells}
        assert found[POINTS[1]] == pytest.approx(rate, rel=0.01)


def test_a_killed_process_resumes(
    tmp_path: Path, fake: Any, fake_url: str, tiny_model: Path, samples: list[Sample]
) -> None:
    fake.delay_s = 0.05
    file, out = tmp_path / "s.jsonl", tmp_path / "r.jsonl"
    write_samples(file, iter(samples))
    blasst = str(Path(sys.executable).with_name("blasst"))
    command = [blasst, "ruler", "run", "--samples", str(file), "--url", fake_url]
    command += [
        "--sidecar",
        fake_url,
        "--mag",
        "dense",
        "1000",
        "--concurrency",
        "1",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not out.exists() or out.read_bytes().count(b"\n") < 4:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    had = out.read_bytes().count(b"\n") - 1
    assert 3 <= had < 8
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "resuming" in again.stderr
    assert "left about" in again.stderr
    assert "skip rate" in again.stdout
    results = [r for r in read_results(out) if r["kind"] == "sample"]
    assert len({r["key"] for r in results}) == len(results) == 8


def test_a_terminated_process_puts_the_threshold_back(
    tmp_path: Path, fake: Any, fake_url: str, samples: list[Sample]
) -> None:
    fake.delay_s = 0.1
    fake.threshold = {"unit": "mag", "value": 7000.0}
    file, out = tmp_path / "s.jsonl", tmp_path / "r.jsonl"
    write_samples(file, iter(samples))
    blasst = str(Path(sys.executable).with_name("blasst"))
    command = [blasst, "ruler", "run", "--samples", str(file), "--url", fake_url]
    command += ["--sidecar", fake_url, "--mag", "1000", "--concurrency", "1", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not fake.puts:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"resumes" in errors
    assert fake.threshold == {"unit": "mag", "value": 7000.0}
    assert fake.min_context == 512


FAULTS = {
    "ignores-threshold": "ignores the threshold",
    "no-tiles": "skip counters of this server are wrong",
    "dense-tiles": "skip counters of this server are wrong",
    "over-skips": "skip counters of this server are wrong",
    "foreign-traffic": "other traffic",
    "frozen-counters": "counters show 0 of",
    "never-converges": "not in force after",
    "changes-threshold": "threshold changed",
    "keeps-its-own": "ignores what it is told",
    "loses-races": "at the same moment",
    "no-blasst": "does not run the blasst backend",
    "adds-a-token": "adds or cuts tokens",
    "cuts-prompts": "truncates prompts",
    "breaks-off": "ended before the answer did",
    "breaks-off-late": "ended before the answer did",
    "ignores-max-tokens": "it ignores max_tokens",
    "other-context": "accepted min_context 512 but now has 7",
    "refuses": "HTTP 400: no room",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_with_a_fault_is_an_error(
    fault: str, tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    fake.faults = {fault}
    path = tmp_path / "r.jsonl"
    with pytest.raises(ServerError, match=FAULTS[fault]):
        sweep(connect, path, Plan(POINTS, samples[:1]))
    voting = [r for r in read_results(path) if r["kind"] == "sample" and r["threshold"] != "dense"]
    assert not voting


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("fault", ["never-ends", "only-pings"])
def test_an_answer_that_never_ends_is_an_error(
    concurrency: int, fault: str, tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    """Each line of it comes soon enough."""
    plan = Plan(POINTS[:1], samples[:1], timed=0)
    words = "had not ended its answer after 0.5 s; raise --timeout"
    with ResultStore(tmp_path / "r.jsonl") as store:
        runner = connect(store, concurrency=concurrency)
        runner.activate(None, samples[0])
        fake.faults, runner.client.timeout_s = {fault}, 0.5
        with pytest.raises(ServerError, match=words):
            runner._answers(plan.samples, "accuracy")


def test_a_fault_that_begins_in_the_middle_is_an_error(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    class Late(Progress):
        def step(self, what: str) -> None:
            super().step(what)
            fake.faults = {"ignores-threshold"}

    with (
        ResultStore(tmp_path / "r.jsonl") as store,
        pytest.raises(ServerError, match="ignores the threshold"),
    ):
        run_sweep(connect(store), Plan(POINTS[1:2], samples), Late(0, quiet=True))
    assert sum(r["kind"] == "sample" for r in read_results(tmp_path / "r.jsonl")) == 1
    assert fake.threshold is None


def test_a_threshold_that_someone_sets_again_in_a_cell_is_an_error(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    class Meddler(Progress):
        def step(self, what: str) -> None:
            super().step(what)
            fake.generation += 1  # to the same threshold: no counter tells

    with (
        ResultStore(tmp_path / "r.jsonl") as store,
        pytest.raises(ServerError, match="changed during the cell"),
    ):
        run_sweep(connect(store), Plan(POINTS[1:2], samples[:2]), Meddler(0, quiet=True))
    assert sum(r["kind"] == "sample" for r in read_results(tmp_path / "r.jsonl")) == 1


def test_prompts_below_min_context_are_expected_to_run_dense(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    one_of_each, said = samples[::2], io.StringIO()
    floor = len(one_of_each[1].prompt)
    assert len(one_of_each[0].prompt) < floor
    with ResultStore(tmp_path / "r.jsonl") as store:
        plan = Plan(POINTS[1:2], one_of_each)
        run_sweep(connect(store, min_context=floor), plan, Progress(0, said))
    short, long = (r for r in read_results(tmp_path / "r.jsonl") if r["kind"] == "sample")
    assert short["visited"] == 0 < long["visited"]
    assert f"1 of 2 prompts are below min_context {floor} and run dense" in said.getvalue()


def test_time_that_is_up_ends_the_sweep_between_samples(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    for path, (end, hard_end), groups in (
        (tmp_path / "a", (-1.0, -1.0), 1),
        (tmp_path / "b", (600.0, -1.0), 1),
        (tmp_path / "c", (600.0, 600.0), 4),
    ):
        now = time.monotonic()
        said: list[str] = []
        progress = Progress(0, quiet=True)
        progress.say = said.append  # type: ignore[method-assign]
        with ResultStore(path) as store:
            plan = Plan(POINTS, samples, by_round=True)
            done = run_sweep(connect(store), plan, progress, TimeBox(now + end, now + hard_end))
        assert done == 3 * groups
        found = [r for r in read_results(path) if r["kind"] == "sample"]
        assert {(r["task"], r["index"]) for r in found[:3]} == {("niah_single_2", 0)}
        assert set(Counter((r["task"], r["index"]) for r in found).values()) == {3}
        words = "the time is up; left out: vt at 1024; 1 sample instead of 2: niah_single_2 at 1024"
        assert said == ([] if groups == 4 else [words])


class Clock(Progress):
    """Each measurement takes `seconds[i]`, the last one from then on; nothing else takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        super().__init__(0, quiet=True)
        self.now, self.seconds, self.said = 0.0, list(seconds), ""
        clock = SimpleNamespace(monotonic=lambda: self.now, time=time.time)
        monkeypatch.setattr("blasst.evals.sweep.time", clock)

    def step(self, what: str) -> None:
        super().step(what)
        self.now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]

    def say(self, text: str) -> None:
        self.said = text


@pytest.mark.parametrize(
    ("seconds", "groups", "ends"),
    [
        ([10.0], 4, 120.0),
        ([11.0], 3, 99.0),  # a fourth would end in time, but not with the margin
        ([10.0] * 4 + [95.0, 10.0], 1, 135.0),  # dropped when the rest cannot end by hard_end
        ([100.0], 1, 300.0),  # slow from the start: still one whole comparison
    ],
)
def test_groups_are_whole_or_left_out(
    seconds: list[float],
    groups: int,
    ends: float,
    tmp_path: Path,
    connect: Connect,
    samples: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "r.jsonl"
    clock = Clock(monkeypatch, *seconds)
    plan = Plan(POINTS, samples, by_round=True)
    with ResultStore(path) as store:
        done = run_sweep(connect(store), plan, clock, TimeBox(128.0, 140.0))
    assert (done, clock.now) == (3 * groups, ends)
    found = Counter((r["task"], r["index"]) for r in read_results(path) if r["kind"] == "sample")
    assert list(found.values()) == [3] * groups
    assert ("left out" in clock.said or "instead of" in clock.said) == (groups < 4)


def test_each_group_runs_under_every_point_before_the_next(
    tmp_path: Path, connect: Connect, samples: list[Sample]
) -> None:
    path = tmp_path / "r.jsonl"
    longer = [replace(s, length=2048, prompt=s.prompt[1:]) for s in samples]
    sweep(connect, path, Plan(POINTS, [*longer, *samples], by_round=True))
    found = [r for r in read_results(path) if r["kind"] == "sample"]
    order = [(r["index"], r["length"], r["task"]) for r in found]
    tasks = ("niah_single_2", "vt")
    groups = [(i, n, task) for i in (0, 1) for n in (1024, 2048) for task in tasks]
    assert order == [group for group in groups for _ in POINTS]
    first = [r["threshold"] for r in found[::3]]
    keys = ["dense", "mag:1000.0", "lambda:0.0"]
    assert first == (keys * 3)[:8]
    assert all({r["threshold"] for r in found[i : i + 3]} == set(keys) for i in range(0, 24, 3))


def test_every_kind_of_path_is_warmed_up_once_for_a_length(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    sweep(connect, tmp_path / "r.jsonl", Plan(POINTS, samples))
    warming = [b for b in fake.prompts if b["max_tokens"] == 2]
    assert [tuple(b["prompt"]) for b in warming] == [samples[0].prompt] * 2


def test_lengths_beyond_the_server_are_refused(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    fake.max_model_len = 1000
    with pytest.raises(InputError, match="1024 is beyond the server's max_model_len 1000"):
        sweep(connect, tmp_path / "r.jsonl", Plan(POINTS, samples))
    assert not fake.prompts


def test_samples_of_another_tokenizer_are_refused(
    tmp_path: Path, fake: Any, connect: Connect, encoder: PromptEncoder, samples: list[Sample]
) -> None:
    plan = Plan(POINTS[:1], samples[:1])
    fake.texts = {samples[0].prompt: encoder.decode(samples[0].prompt)}
    assert sweep(connect, tmp_path / "r.jsonl", plan) == 1
    fake.texts = {}
    with pytest.raises(InputError, match="another tokenizer"):
        sweep(connect, tmp_path / "s.jsonl", plan)


def test_a_model_that_is_not_served_is_refused(fake_url: str) -> None:
    client = Completions(fake_url)
    with pytest.raises(InputError, match="serves fake-model, not 'other'"):
        client.model("other")
    client.close()


def test_no_server_is_one_clear_error() -> None:
    client, sidecar = Completions("http://127.0.0.1:9"), Sidecar("http://127.0.0.1:9")
    with pytest.raises(ServerError, match=r"no server at http://127.0.0.1:9 .*blasst serve"):
        client.model()
    with pytest.raises(ServerError, match=r"no sidecar at http://127.0.0.1:9 "):
        sidecar.get()
    client.close()
    sidecar.close()


def test_something_else_than_a_server_is_one_clear_error(fake_url: str) -> None:
    client, sidecar = Completions(fake_url + "/docs"), Sidecar(fake_url + "/docs")
    for call in (client.model, sidecar.get, sidecar.counters):
        with pytest.raises(EvalsError, match="HTTP 404"):
            call()
    client.close()
    sidecar.close()


def test_counters_believe_the_slowest_rank_and_add_up_engines() -> None:
    def line(path: str, engine: int, rank: int, value: int) -> str:
        labels = f'path="{path}",engine="{engine}",rank="{rank}",model_name="a\\"b,c"'
        return f"blasst_prefill_tokens_total{{{labels}}} {value}.0"

    tokens = [line("vote", 0, 0, 90), line("vote", 0, 1, 70), line("vote", 1, 0, 5)]
    tokens += [line("dense", 0, 0, 3), line("dense", 0, 1, 3)]
    tiles = [
        f'blasst_tiles_{kind}_total{{engine="0",rank="{rank}",layer="2",kv_head="0"}} {value}'
        for kind, rank, value in (("visited", 0, 10), ("visited", 1, 10), ("skipped", 1, 4))
    ]
    found = parse_counters("\n".join([*tokens, *tiles]))
    assert (found.vote_tokens, found.dense_tokens) == (75, 3)
    assert found.layers == {2: (20, 4)}


@pytest.mark.parametrize("bad", ["-5", "nan", "abc", "1e9", "0"])
def test_bad_magnitudes_are_refused(bad: str) -> None:
    with pytest.raises(InputError, match=r"MAG|mag"):
        parse_points([bad], [], [])


def test_points_keep_their_order_and_come_once() -> None:
    points = parse_points(["2500", "dense", "2500.0"], ["0.5"], ["100"])
    assert points == [
        SkipThreshold("mag", 2500),
        None,
        SkipThreshold("lambda", 0.5),
        SkipThreshold("scale", 100),
    ]
