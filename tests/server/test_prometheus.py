from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from blasst.kernels.exchange.layout import TTFT_BUCKETS_S
from blasst.kernels.exchange.prometheus import PagesCollector


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


def test_a_page_of_another_layout_is_left_out(fake_engine, stats):
    from blasst.kernels.exchange.stats import Field, StatsWriter

    stats.mkdir()
    other = StatsWriter(
        stats, "front-7", kind="front", labels={}, fields=[Field("requests_admitted", (1,))]
    )
    assert scrape(stats)("blasst_stats_pages", state="live") == 0
    other.close()


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
