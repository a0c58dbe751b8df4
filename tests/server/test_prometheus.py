"""/metrics: what the pages of ranks and front ends become there."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from blasst.kernels.exchange.layout import (
    LAMBDA_CLASSES,
    LATER_FRONT_FIELDS,
    LATER_RANK_FIELDS,
    LAYER_REASONS,
    LENGTH_CLASSES,
    TTFT_BUCKETS_S,
    front_fields,
    rank_fields,
    ttft_bucket,
)
from blasst.kernels.exchange.pages import CachedPages, rank_totals
from blasst.kernels.exchange.prometheus import MOST_CLASSES, PagesCollector
from blasst.kernels.exchange.stats import Field, StatsWriter
from blasst.server.metrics import MetricsPage
from blasst.server.observe import front_end_views, quantile

CELLS = len(LAMBDA_CLASSES) * len(LENGTH_CLASSES)


class Scraped:
    """A page of text, and its samples by name and labels."""

    def __init__(self, collector: PagesCollector) -> None:
        registry = CollectorRegistry()
        collector.register(registry)
        self.text = generate_latest(registry).decode()
        self.samples = {}
        for family in text_string_to_metric_families(self.text):
            for s in family.samples:
                key = (s.name, tuple(sorted(s.labels.items())))
                assert key not in self.samples, f"two series of one name and labels: {key}"
                self.samples[key] = s.value

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, tuple(sorted(labels.items()))]

    def names(self) -> set[str]:
        return {name for name, _ in self.samples}

    def sum(self, name: str) -> float:
        return sum(v for (n, _), v in self.samples.items() if n == name)


@pytest.fixture
def stats(tmp_path):
    return tmp_path / "stats"


def scrape(stats: Path) -> Scraped:
    return Scraped(PagesCollector(stats))


def test_tiles_carry_absolute_layers_of_every_rank_with_heads_added_up(fake_engine, stats):
    engine = fake_engine()
    engine.rank(0)
    engine.rank(1)
    page = scrape(stats)
    labels = {"engine": "0", "rank": "1", "model_name": "tiny"}
    assert page("blasst_tiles_visited_total", layer="2", **labels) == 200
    assert page("blasst_tiles_skipped_total", layer="2", **labels) == 60
    assert page.sum("blasst_tiles_visited_total") == 100 * 2 * 3 * 2
    rank = {"engine": "0", "rank": "0", "model_name": "tiny"}
    assert page("blasst_prefill_tokens_total", path="vote", **rank) == 4096
    assert page("blasst_prefill_tokens_total", path="dense", **rank) == 0
    assert page("blasst_decode_tokens_total", **rank) == 7


def test_a_dead_page_counts_until_it_is_removed(fake_engine, stats):
    engine = fake_engine()
    engine.rank(0)
    dead = engine.kill(engine.writers[0].path.name)
    dead = dead.rename(dead.with_name("rank-0-0-1.stats"))
    engine.rank(0, visited=1)
    labels = {"engine": "0", "rank": "0", "layer": "0", "model_name": "tiny"}
    page = scrape(stats)
    assert page("blasst_tiles_visited_total", **labels) == 202
    assert page("blasst_stats_pages", state="dead") == 1
    dead.unlink()
    assert scrape(stats)("blasst_tiles_visited_total", **labels) == 2


def test_ttft_histogram_is_cumulative_with_all_buckets_of_the_layout(fake_engine, stats):
    engine = fake_engine()
    engine.front(42)
    engine.requests(0.05, 3000, [0.001, 0.2, 0.2, 1e6])
    page = scrape(stats)
    name = "blasst_time_to_first_token_seconds"
    labels = {"lambda_class": "mag_2500_4499", "prompt_length_class": "le_4k", "model_name": "tiny"}
    assert page(name + "_count", **labels) == 4
    assert page(name + "_sum", **labels) == pytest.approx(1e6 + 0.401)
    assert page(name + "_bucket", le="0.005", **labels) == 1
    assert page(name + "_bucket", le=repr(TTFT_BUCKETS_S[-1]), **labels) == 3
    assert page(name + "_bucket", le="+Inf", **labels) == 4
    counts = [v for (n, _), v in page.samples.items() if n == name + "_bucket"]
    assert len(counts) == len(TTFT_BUCKETS_S) + 1
    assert counts == sorted(counts)
    assert page("blasst_requests_admitted_total", **labels) == 4


def test_only_classes_that_saw_a_request_are_shown(fake_engine, stats):
    engine = fake_engine()
    engine.front(42)
    page = scrape(stats)
    assert "blasst_time_to_first_token_seconds_count" not in page.names()
    assert "blasst_requests_admitted_total" not in page.names()
    engine.requests(None, 100, [0.1])
    page = scrape(stats)
    assert re.findall(r'_seconds_count{[^}]*lambda_class="(\w+)"', page.text) == ["dense"]


def test_front_ends_of_one_model_add_up_and_keep_their_own_generation(fake_engine, stats):
    engine = fake_engine()
    engine.front(1, generation=3)
    engine.requests(0.05, 3000, [0.1])
    engine.front(2, generation=4, stamped=3)
    engine.requests(0.05, 3000, [0.1, 0.2])
    page = scrape(stats)
    assert page.sum("blasst_requests_admitted_total") == 3
    gauge = "blasst_threshold_generation"
    assert page(gauge, state="read", front_end="front-2", model_name="tiny") == 4
    assert page(gauge, state="stamped", front_end="front-2", model_name="tiny") == 3
    lambdas = page("blasst_threshold_lambda", front_end="front-1", model_name="tiny")
    assert lambdas == 0.05
    mag = page("blasst_threshold_mag", front_end="front-1", model_name="tiny")
    assert mag == pytest.approx(-1000 * math.log2(0.05))


def test_a_dense_front_end_shows_no_lambda_and_a_dead_one_no_gauge(fake_engine, stats):
    engine = fake_engine()
    name = engine.front(1, generation=3)
    page = scrape(stats)
    assert "blasst_threshold_lambda" not in page.names()
    assert page("blasst_threshold_generation", state="read", front_end="front-1", model_name="tiny")
    engine.requests(None, 100, [0.1])
    engine.kill(name)
    page = scrape(stats)
    assert "blasst_threshold_generation" not in page.names()
    assert page.sum("blasst_requests_admitted_total") == 1


def test_many_scrapes_read_the_files_once_per_interval(fake_engine, stats, monkeypatch):
    fake_engine().rank(0)
    now = [100.0]
    collector = PagesCollector(stats, max_age_s=0.5, clock=lambda: now[0])
    reads = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: reads.append(path) or listdir(path))
    for _ in range(50):
        list(collector.collect())
    assert reads.count(stats) == 1
    now[0] += 0.6
    list(collector.collect())
    assert reads.count(stats) == 2


def test_the_metrics_page_is_new_soon_and_costs_a_twentieth_of_a_core_at_most(fake_engine, stats):
    fake_engine().rank(0)
    now, made = [100.0], []

    class Slow(PagesCollector):
        def collect(self):
            made.append(now[0])
            now[0] += cost
            yield from super().collect()

    for cost, least in ((0.001, 0.1), (0.05, 1.0), (1.5, 3.5)):
        now[0], made[:] = 100.0, []
        page = MetricsPage(Slow(stats), {}, clock=lambda: now[0])
        while now[0] < 110.0:
            page.text()
            now[0] += 0.01
        apart = [b - a for a, b in itertools.pairwise(made)]
        assert min(apart) >= least - 1e-6
        assert max(apart) <= least + cost + 0.011


def test_registering_reads_nothing(stats, monkeypatch):
    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail("a file was read"))
    PagesCollector(stats).register(CollectorRegistry())


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"BLASSTS1" + bytes(100)])
def test_a_scrape_never_fails_on_foreign_files(fake_engine, stats, content):
    fake_engine().rank(0)
    (stats / "rank-9-9-9.stats").write_bytes(content)
    (stats / "folder.stats").mkdir()
    assert scrape(stats)("blasst_stats_pages", state="live") == 1


TILES = Field("tiles", (1, 1, 2))
SCALARS = [f for f in rank_fields(1, 1)[1:] if f not in LATER_RANK_FIELDS]


@pytest.mark.parametrize(
    ("kind", "labels", "fields"),
    [
        ("front", {}, [Field("requests_admitted", (1,))]),
        ("front", {}, [Field(f.name, f.shape, "d") for f in front_fields()]),
        ("front", {}, [*front_fields(), Field("generation_read", (2,))]),
        ("rank", {}, [TILES]),
        ("rank", {}, SCALARS),
        ("rank", {}, [TILES, *SCALARS, LATER_RANK_FIELDS[0]]),
        ("front", {}, [*front_fields()[:-1]]),
        ("rank", {}, [Field("tiles", (1, 2)), *SCALARS]),
        ("rank", {}, [Field("tiles", (1, 1, 3)), *SCALARS]),
        ("rank", {}, [Field("tiles", (1, 1, 2), "d"), *SCALARS]),
        ("rank", {"first_layer": "-1"}, [TILES, *SCALARS]),
        ("rank", {"first_kv_head": "9" * 5000}, [TILES, *SCALARS]),
        ("other", {}, [TILES, *SCALARS]),
    ],
)
def test_a_page_of_another_layout_is_left_out_and_counted(fake_engine, stats, kind, labels, fields):
    fake_engine().rank(0)
    other = StatsWriter(stats, "other", kind=kind, labels=labels, fields=fields)
    page = scrape(stats)
    assert page("blasst_stats_pages", state="live") == 1
    assert page("blasst_stats_pages", state="unreadable") == 1
    other.close()


def test_labels_cannot_break_out(fake_engine, stats):
    model = 'm"} 1\nblasst_evil{x="\\'
    engine = fake_engine(model=model)
    engine.rank(0)
    engine.front(42)
    page = scrape(stats)
    assert page("blasst_decode_tokens_total", engine="0", rank="0", model_name=model) == 7
    assert "blasst_evil" not in page.names()


def test_the_latest_page_of_a_rank_tells_its_state(fake_engine, stats):
    """A restarted rank: its page is read after or before that of the dead one, by name. The clock
    may have been set back since the dead one wrote."""
    engine = fake_engine()
    for pid, alive in (("1", False), ("2", True), ("3", False)):
        labels = {"engine": "0", "rank": "0", "impl": "cpu" if alive else "old"}
        writer = StatsWriter(
            engine.stats, f"rank-0-0-{pid}", kind="rank", labels=labels, fields=[TILES, *SCALARS]
        )
        writer.update(tiles=[2, 1])
        if alive:
            engine.writers.append(writer)
        else:
            writer.detach()
            with writer.path.open("r+b") as page:
                page.seek(24)
                page.write(struct.pack("<d", time.time() + 3600))
    live = engine.writers[-1]
    live.update(tiles=[2, 1])
    (total,) = rank_totals(CachedPages(stats).pages())
    assert (total.alive, total.impl, total.tiles[0, 0]) == (True, "cpu", (6, 3))
    page = scrape(stats)
    ages = [labels for name, labels in page.samples if name == "blasst_stats_age_seconds"]
    assert ages == [(("process", "rank-0-0-2"),)]


def test_quantiles_are_linear_within_a_bucket():
    buckets = [0] * (len(TTFT_BUCKETS_S) + 1)
    assert quantile(buckets, 0.5) is None
    buckets[10] = 4
    low, high = TTFT_BUCKETS_S[9], TTFT_BUCKETS_S[10]
    assert quantile(buckets, 0.25) == pytest.approx(low + 0.25 * (high - low))
    assert quantile(buckets, 1.0) == pytest.approx(high)
    buckets[0] = 4
    assert quantile(buckets, 0.25) == pytest.approx(TTFT_BUCKETS_S[0] / 2)
    buckets[-1] = 100
    assert quantile(buckets, 0.95) == TTFT_BUCKETS_S[-1]


def test_a_page_from_the_future_is_of_now(fake_engine, stats):
    engine = fake_engine()
    engine.front(42)
    with engine.writers[-1].path.open("r+b") as page:
        page.seek(24)
        page.write(struct.pack("<d", time.time() + 3600))
    assert front_end_views(CachedPages(stats).pages())[0].age_s == 0
    assert scrape(stats)("blasst_stats_age_seconds", process="front-42") == 0


def test_no_folder_is_no_pages(tmp_path):
    page = scrape(tmp_path / "absent")
    assert page("blasst_stats_pages", state="live") == 0
    assert "blasst_build_info" in page.names()


def test_importing_the_module_does_not_import_prometheus_client():
    code = (
        "import sys, blasst.kernels.exchange.prometheus as p;"
        "sys.exit('prometheus_client' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_callers_cannot_make_more_classes_than_are_bounded(fake_engine, stats):
    """Both labels follow from what a caller sends: one that uses every class."""
    engine = fake_engine()
    engine.front(42)
    collector = PagesCollector(stats, max_age_s=0)
    engine.requests(None, 1000, [0.1])
    engine.requests(0.9, 1 << 22, [0.1])
    Scraped(collector)
    lambdas = [None, 0.0, 1e-4, 2**-8, 2**-5, 2**-3, 2**-2, 2**-1.2, 0.9]
    for skip_lambda in lambdas:
        for i in range(len(LENGTH_CLASSES)):
            if (skip_lambda, 1024 << i) != (0.9, 1 << 21):
                engine.requests(skip_lambda, 1024 << i, [0.1, 0.2])
    page = Scraped(collector)
    name = "blasst_time_to_first_token_seconds_count"
    assert sum(n == name for n, _ in page.samples) == MOST_CLASSES + 1
    assert page.sum(name) == 2 + 2 * (len(lambdas) * len(LENGTH_CLASSES) - 1)
    assert page.sum("blasst_requests_admitted_total") == page.sum(name)
    # What was shown before stays shown, few as its requests are: its counter does not fall.
    labels = {"lambda_class": "mag_lt_1000", "prompt_length_class": "gt_1m", "model_name": "tiny"}
    assert page(name, **labels) == 1
    assert page(name, **dict.fromkeys(labels, "other") | {"model_name": "tiny"}) > 0
    assert len(page.samples) < 2 * 123 * (MOST_CLASSES + 1)


def test_a_5_percent_change_shows_in_the_buckets():
    """Half the counts of a bucket move: the quantile follows to within 2 percentage points."""
    rng = random.Random(0)
    before = [rng.lognormvariate(math.log(1.194), 0.15) for _ in range(4000)]
    quantiles = []
    for factor in (1.0, 0.95):
        buckets = [0] * (len(TTFT_BUCKETS_S) + 1)
        for seconds in before:
            buckets[ttft_bucket(factor * seconds)] += 1
        quantiles.append(quantile(buckets, 0.5))
    assert quantiles[1] / quantiles[0] - 1 == pytest.approx(-0.05, abs=0.02)


def test_layers_and_generations_of_ranks_and_requests_that_fell_back(fake_engine, stats):
    engine = fake_engine()
    engine.rank(0).update(
        layers_voting=2, layers_dense=[int(r == "sinks") for r in LAYER_REASONS], generation_seen=7
    )
    engine.front(42, generation=7)
    engine.writers[-1].update(requests_dense=[3, 0, 1], prefill_count=[5] * CELLS)
    page = scrape(stats)
    rank = {"engine": "0", "rank": "0", "model_name": "tiny"}
    assert page("blasst_layers", path="vote", reason="", **rank) == 2
    assert page("blasst_layers", path="dense", reason="sinks", **rank) == 1
    assert page.sum("blasst_layers") == 3
    assert page("blasst_rank_generation", **rank) == 7
    model = {"model_name": "tiny"}
    assert page("blasst_fallbacks_total", reason="below_min_context", **model) == 3
    assert page("blasst_fallbacks_total", reason="streamed_input", **model) == 0
    assert page("blasst_fallbacks_total", reason="pooling", **model) == 1


def test_lambda_in_force_by_length_class(fake_engine, stats):
    engine = fake_engine()
    engine.front(42)
    lambdas = [math.nan] * 4 + [0.25] * (len(LENGTH_CLASSES) - 4)
    engine.writers[-1].update(threshold_classes=lambdas)
    page = scrape(stats)
    labels = {"front_end": "front-42", "model_name": "tiny"}
    assert page("blasst_threshold_class_lambda", prompt_length_class="le_16k", **labels) == 0.25
    shown = [n for n, _ in page.samples if n == "blasst_threshold_class_lambda"]
    assert len(shown) == len(LENGTH_CLASSES) - 4


def test_pages_of_release_0_1_0_still_count(fake_engine, stats):
    """They lack the fields and labels that came later."""
    stats.mkdir()
    old_front = [f for f in front_fields() if f not in LATER_FRONT_FIELDS]
    front = StatsWriter(stats, "front-1", kind="front", labels={}, fields=old_front)
    front.update(
        ttft_count=[1] * CELLS,
        requests_admitted=[1] * CELLS,
        generation_read=4,
        desired_read_errors=2,
    )
    rank = StatsWriter(stats, "rank-0-0-1", kind="rank", labels={}, fields=[TILES, *SCALARS])
    rank.update(tiles=[10, 4], decode_tokens=5)
    page = scrape(stats)
    assert page("blasst_stats_pages", state="unreadable") == 0
    assert page.sum("blasst_requests_admitted_total") == CELLS
    assert page.sum("blasst_tiles_skipped_total") == 4
    assert page.sum("blasst_fallbacks_total") == 0
    assert page.sum("blasst_desired_read_errors_total") == 2
    assert "blasst_prefill_seconds_count" not in page.names()
    for writer in (front, rank):
        writer.close()
