from __future__ import annotations

import math
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from blasst.kernels.exchange.layout import TTFT_BUCKETS_S, front_fields, rank_fields
from blasst.kernels.exchange.pages import CachedPages, rank_totals
from blasst.kernels.exchange.prometheus import PagesCollector
from blasst.kernels.exchange.stats import Field, StatsWriter
from blasst.server.observe import front_end_views, quantile


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


def test_tiles_carry_absolute_layer_and_head_of_every_rank(fake_engine, stats):
    engine = fake_engine()
    engine.rank(0)
    engine.rank(1)
    page = scrape(stats)
    labels = {"engine": "0", "rank": "1", "kv_head": "3", "model_name": "tiny"}
    assert page("blasst_tiles_visited_total", layer="2", **labels) == 100
    assert page("blasst_tiles_skipped_total", layer="2", **labels) == 30
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
    labels = {"engine": "0", "rank": "0", "layer": "0", "kv_head": "0", "model_name": "tiny"}
    page = scrape(stats)
    assert page("blasst_tiles_visited_total", **labels) == 101
    assert page("blasst_stats_pages", state="dead") == 1
    dead.unlink()
    assert scrape(stats)("blasst_tiles_visited_total", **labels) == 1


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
SCALARS = rank_fields(1, 1)[1:]


@pytest.mark.parametrize(
    ("kind", "labels", "fields"),
    [
        ("front", {}, [Field("requests_admitted", (1,))]),
        ("front", {}, [Field(f.name, f.shape, "d") for f in front_fields()]),
        ("front", {}, [*front_fields(), Field("generation_read", (2,))]),
        ("rank", {}, [TILES]),
        ("rank", {}, SCALARS),
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
    """A restarted rank: its page is read after or before that of the dead one, by name."""
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
