"""The front end's page: classes, times, generations; refusals by the workers' own verdict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blasst.kernels.exchange.desired import DesiredState, write_desired
from blasst.kernels.exchange.layout import LAMBDA_CLASSES, LENGTH_CLASSES, TTFT_BUCKETS_S
from blasst.kernels.exchange.schedule import Schedule
from blasst.kernels.exchange.stats import StatsPage, iter_stats
from blasst.kernels.threshold import SkipThreshold
from blasst.plugin import front_end
from blasst.plugin.admission import AdmissionError
from blasst.plugin.front_end import FrontEnd, cell
from blasst.plugin.rank import Rank, RankShape
from blasst.plugin.settings import Settings
from blasst.plugin.stamp import Stamp

MAG = SkipThreshold("mag", 2500)
Make = Callable[..., FrontEnd]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[FrontEnd] = []
    (tmp_path / "stats").mkdir()

    def front_end(refusal: str | None = None, threshold: SkipThreshold | None = None) -> FrontEnd:
        settings = Settings(
            state_dir=tmp_path, threshold=threshold, min_context=10, stats_interval_s=0.05
        )
        made.append(FrontEnd(settings, "tiny", "0.32.0", refusal))
        return made[-1]

    yield front_end
    for front in made:
        front.close()


def page(folder: Path, front: FrontEnd | None = None) -> StatsPage:
    if front is not None:
        front.close()
    (found,) = iter_stats(folder / "stats", "front")
    return found


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_every_cell_is_distinct() -> None:
    lambdas = [None, 0.0, 1e-4, 2**-8, 2**-5, 2**-3, 2**-2, 2**-1.2, 0.9]
    lengths = [1024 << i for i in range(len(LENGTH_CLASSES))]
    cells = {cell(Stamp(v), n) for v in lambdas for n in lengths}
    assert cells == set(range(len(LAMBDA_CLASSES) * len(LENGTH_CLASSES)))


def test_admissions_and_first_tokens_are_counted_by_class(make: Make, tmp_path: Path) -> None:
    front = make()
    stamps = [front.admit(wish, n) for wish, n in ((MAG, 500), (MAG, 5), (None, 2000))]
    assert [s.skip_lambda for s in stamps] == [2**-2.5, None, None]
    front.first_token(cell(stamps[0], 500), 0.0101)
    front.first_token(cell(stamps[0], 500), 2.0)
    found = page(tmp_path, front)
    voting = cell(Stamp(2**-2.5), 500)
    assert found.arrays["requests_admitted"][voting] == 1
    assert sum(found.arrays["requests_admitted"]) == 3
    assert found.arrays["ttft_count"][voting] == 2
    assert found.arrays["ttft_sum_seconds"][voting] == pytest.approx(2.0101)
    width = len(TTFT_BUCKETS_S) + 1
    buckets = found.arrays["ttft_bucket"][voting * width : (voting + 1) * width]
    edges = [TTFT_BUCKETS_S[i] for i, n in enumerate(buckets) if n]
    assert edges[0] == pytest.approx(0.0101, rel=0.1)
    assert edges[1] == pytest.approx(2.0, rel=0.1)
    assert found.labels["vllm_version"] == "0.32.0"


def test_generations_show_while_idle_and_once_stamped(make: Make, tmp_path: Path) -> None:
    front = make(threshold=MAG)
    assert page(tmp_path).scalar("threshold_mag") == 2500
    write_desired(tmp_path, DesiredState(4, SkipThreshold("lambda", 0.0)))
    assert wait_for(lambda: page(tmp_path).scalar("generation_read") == 4)
    idle = page(tmp_path)
    assert idle.scalar("generation_stamped") == 0
    assert idle.scalar("threshold_lambda") == 0.0
    assert math.isnan(idle.scalar("threshold_mag"))
    assert front.admit(None, 100) == Stamp(0.0, 4)
    assert wait_for(lambda: page(tmp_path).scalar("generation_stamped") == 4)


def test_a_corrupt_file_is_counted_and_told_once(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "desired.json").write_text("{}")
    front = make()
    assert front.admit(None, 100).skip_lambda is None
    time.sleep(0.2)
    assert page(tmp_path, front).scalar("desired_read_errors") == 1
    assert len([r for r in caplog.records if "schema_version" in r.getMessage()]) == 1


def test_refused_requests_are_counted(make: Make, tmp_path: Path) -> None:
    front = make(refusal="no layer can")
    with pytest.raises(AdmissionError):
        front.wish({"blasst_mag": "x"})
    with pytest.raises(AdmissionError, match="no layer can"):
        front.admit(MAG, 100)
    assert front.admit("off", 100) == Stamp(None)
    found = page(tmp_path, front)
    assert found.scalar("requests_rejected") == 2
    assert sum(found.arrays["requests_admitted"]) == 1


@pytest.mark.parametrize(
    ("refusals", "admitted"), [(["amx layout"], False), (["amx layout", ""], True), ([""], True)]
)
def test_what_the_workers_found_decides(
    make: Make, tmp_path: Path, refusals: list[str], admitted: bool
) -> None:
    ranks = [
        Rank(
            RankShape("0", str(i), "tiny", 1, 1, refusal=refusal),
            tmp_path / "stats",
            interval_s=60,
            device="cpu",
        )
        for i, refusal in enumerate(refusals)
    ]
    front = make()
    if admitted:
        assert front.admit(MAG, 100).skip_lambda == 2**-2.5
    else:
        with pytest.raises(AdmissionError, match="amx layout"):
            front.admit(MAG, 100)
    assert front.admit(None, 100) == Stamp(None)
    for rank in ranks:
        rank.close()


def test_workers_of_an_earlier_start_do_not_decide(make: Make, tmp_path: Path) -> None:
    shape = RankShape("0", "0", "tiny", 1, 1)
    Rank(shape, tmp_path / "stats", interval_s=60, device="cpu").close()
    shape = RankShape("0", "1", "tiny", 1, 1, refusal="amx layout")
    now = Rank(shape, tmp_path / "stats", interval_s=60, device="cpu")
    with pytest.raises(AdmissionError, match="amx layout"):
        make().admit(MAG, 100)
    now.close()


def test_serving_goes_on_without_a_place_for_the_page(tmp_path: Path) -> None:
    front = FrontEnd(Settings(private_stats_dir=tmp_path / "gone"), "tiny", "0.32.0", None)
    assert front.admit(MAG, 10_000).skip_lambda == 2**-2.5
    front.close()


def test_a_min_context_that_no_prompt_reaches_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(front_end.logger, level, lambda text, *a: lines.append(text % a))
    (tmp_path / "stats").mkdir()
    front = FrontEnd(Settings(state_dir=tmp_path, threshold=MAG), "tiny", "0.32.0", None, 4096)
    assert lines == [
        "blasst: mag 2500 is the deployment's threshold (generation 0), for prompts from 8192 "
        "tokens",
        "blasst: nothing can skip: min_context is 8192 and this engine takes prompts of at most "
        "4096 tokens; lower min_context (VLLM_BLASST_MIN_CONTEXT, or --min-context of blasst "
        "serve)",
    ]
    write_desired(tmp_path, DesiredState(1, None, min_context=512))
    assert wait_for(lambda: len(lines) == 3)
    front.close()
    assert "none, dense, is the deployment's threshold (generation 1)" in lines[2]
    assert "from 512 tokens" in lines[2]


def test_streamed_input_runs_dense_and_refuses_a_threshold_of_its_own(
    make: Make, tmp_path: Path
) -> None:
    front = make(threshold=MAG)
    assert front.wish_of_streamed(None) == "off"
    assert front.wish_of_streamed("off") == "off"
    with pytest.raises(AdmissionError, match="mag 2500 cannot hold for streamed input"):
        front.wish_of_streamed(MAG)
    assert page(tmp_path, front).scalar("requests_rejected") == 1


def test_a_schedule_decides_by_length_and_shows_by_class(make: Make, tmp_path: Path) -> None:
    schedule = Schedule.parse("1k=off,4k=mag:7000,rest=scale:500")
    write_desired(tmp_path, DesiredState(3, schedule))
    front = make()
    found = [front.admit(None, n).skip_lambda for n in (5, 1024, 1025, 4096, 5000)]
    assert found == [None, None, 2**-7.0, 2**-7.0, 0.1]
    assert front.admit(MAG, 500).skip_lambda == 2**-2.5
    assert front.admit("off", 5000).skip_lambda is None
    shown = page(tmp_path, front)
    lambdas = shown.arrays["threshold_classes"]
    assert math.isnan(lambdas[0])
    assert lambdas[1:4] == (2**-7.0, 2**-7.0, 500 / 8192)
    assert math.isnan(shown.scalar("threshold_lambda"))
    # A step that is dense is no fallback.
    assert shown.arrays["requests_dense"] == (0, 0, 0)


def test_requests_that_run_dense_under_a_threshold_are_counted(make: Make, tmp_path: Path) -> None:
    front = make(threshold=MAG)
    for wish, tokens in ((None, 5), (MAG, 5), ("off", 5), (None, 50)):
        front.admit(wish, tokens)
    assert front.wish_of_streamed(None) == "off"
    assert front.wish_of_streamed("off") == "off"
    front.count_dense("pooling")
    assert page(tmp_path, front).arrays["requests_dense"] == (2, 1, 1)


def test_without_a_threshold_nothing_falls_back(make: Make, tmp_path: Path) -> None:
    front = make()
    front.admit(None, 5)
    front.wish_of_streamed(None)
    front.count_dense("pooling")
    assert page(tmp_path, front).arrays["requests_dense"] == (0, 0, 0)


def test_prefill_times_have_tables_of_their_own(make: Make, tmp_path: Path) -> None:
    front = make()
    at = cell(front.admit(MAG, 500), 500)
    front.prefill(at, 0.5)
    found = page(tmp_path, front)
    assert (found.arrays["prefill_count"][at], found.arrays["prefill_sum_seconds"][at]) == (1, 0.5)
    assert sum(found.arrays["prefill_bucket"]) == 1
    assert sum(found.arrays["ttft_count"]) == 0
