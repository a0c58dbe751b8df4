"""The rules fire and clear as promised; every query of rules and dashboard runs on real metrics."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from blasst.deploy.drills import dashboard
from blasst.kernels.exchange.layout import FRONT, RANK, front_fields, rank_fields
from blasst.kernels.exchange.stats import StatsWriter
from blasst.server.settings import Settings
from blasst.server.sidecar import Sidecar

RULES = "prometheus/blasst.rules.yml"
DASHBOARD = "grafana/dashboards/blasst.json"
COMMON = {"pid": "1", "model_name": "m"}


def alerts(load):
    return [r for g in load(RULES)[0]["groups"] for r in g["rules"] if "alert" in r]


def expressions(deploy, load):
    """(where, query) of every rule and panel; Grafana's variables as it would fill them in."""
    for group in load(RULES)[0]["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]
    board = json.loads((deploy / DASHBOARD).read_text())
    for place in [*board["panels"], *board["annotations"]["list"]]:
        for target in place.get("targets", [place]):
            query = target["expr"]
            for name, value in (
                ("$__rate_interval", "1m"),
                ("$__interval", "1m"),
                ("$model_name", ".*"),
                ("$prompt_length_class", ".*"),
            ):
                query = query.replace(name, value)
            yield place.get("title") or place["name"], query


def test_rules_pass_their_unit_tests(program, deploy):
    for arguments in (
        ("check", "rules", deploy / RULES),
        ("check", "config", deploy / "prometheus/prometheus.yml"),
        ("test", "rules", deploy / "prometheus/blasst.test.yml"),
    ):
        done = subprocess.run(
            [program("promtool"), *arguments], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_broken_rule_fails_the_unit_tests(program, deploy, tmp_path):
    """The tests can fail: with one comparison turned round they do."""
    text = (deploy / RULES).read_text()
    assert text.count("< 0.5 *") == 1
    (tmp_path / "blasst.rules.yml").write_text(text.replace("< 0.5 *", "> 0.5 *"))
    tests = tmp_path / "blasst.test.yml"
    tests.write_text((deploy / "prometheus/blasst.test.yml").read_text())
    done = subprocess.run([program("promtool"), "test", "rules", tests], capture_output=True)
    assert done.returncode != 0
    assert b"BlasstSkipRateDrop" in done.stdout + done.stderr


def test_every_alert_is_tested_documented_and_labelled(load, deploy):
    tested = {}
    for test in load("prometheus/blasst.test.yml")[0]["tests"]:
        for case in test.get("alert_rule_test", ()):
            fires = bool(case.get("exp_alerts"))
            tested.setdefault(case["alertname"], set()).add(fires)
    runbook = (deploy.parent / "docs" / "operate.md").read_text()
    headings = {h.lower() for h in re.findall(r"^### (\w+)$", runbook, re.M)}
    names = {a["alert"] for a in alerts(load)}
    assert len(names) == len(alerts(load)) >= 16
    for alert in alerts(load):
        name = alert["alert"]
        assert tested.get(name) == {True, False}, f"{name} is not seen both firing and silent"
        assert alert["labels"]["severity"] in ("info", "warning", "critical"), name
        assert alert["annotations"].keys() == {"summary", "description", "runbook"}, name
        assert alert["annotations"]["runbook"] == f"docs/operate.md#{name.lower()}"
        assert name.lower() in headings, f"docs/operate.md has no cure for {name}"
    assert headings <= {n.lower() for n in names}


def test_the_rule_object_of_kubernetes_is_the_rules_file(load):
    (resource,) = load("kubernetes/base/prometheusrule.yaml")
    assert resource["spec"] == load(RULES)[0]


def test_the_dashboard_follows_vllms_conventions(deploy):
    board = json.loads((deploy / DASHBOARD).read_text())
    assert (board["uid"], board["id"]) == ("blasst-overview", None)
    assert "vllm" in board["tags"]
    assert next(v["name"] for v in board["templating"]["list"]) == "datasource"
    ids = [p["id"] for p in board["panels"]]
    assert len(ids) == len(set(ids)) >= 12
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        used = set(re.findall(r"blasst_\w+", " ".join(t["expr"] for t in panel["targets"])))
        named = {re.sub(r"_(sum|count|bucket)$", "", name) for name in used}
        for name in named:
            assert name in panel["description"], f"{panel['title']} does not name {name}"
        assert "rate(" not in str(panel["targets"]).replace("[$__rate_interval]", "") or all(
            "[$__rate_interval]" in t["expr"] for t in panel["targets"] if "rate(" in t["expr"]
        )
    places = [tuple(p["gridPos"][k] for k in "xy") for p in board["panels"]]
    assert len(places) == len(set(places))


def rank_page(stats, rank):
    return StatsWriter(
        stats,
        f"rank-0-{rank}-1",
        kind=RANK,
        labels={
            **COMMON,
            "engine": "0",
            "rank": str(rank),
            "impl": "cpu",
            "first_layer": "0",
            "first_kv_head": str(rank),
            "refusal": "",
        },
        fields=rank_fields(2, 1),
    )


@pytest.fixture
def metrics_url(tmp_path):
    """A real sidecar over the pages of two ranks and a front end whose counters move."""
    stats = tmp_path / "state" / "stats"
    stats.mkdir(parents=True)
    ranks = [rank_page(stats, r) for r in range(2)]
    fields = {f.name: f for f in front_fields()}
    front = StatsWriter(
        stats,
        "front-1",
        kind=FRONT,
        labels={**COMMON, "vllm_version": "0.32.0"},
        fields=front_fields(),
    )
    sidecar = Sidecar(Settings(tmp_path / "state", port=0))
    sidecar.prepare(dead_pages_older_than_s=0)
    sidecar.start()

    def advance(n):
        for rank in ranks:
            rank.update(
                tiles=[100 * n, 40 * n] * 2,
                prefill_tokens_vote=1000 * n,
                prefill_tokens_dense=10 * n,
                unstamped_requests=n,
            )
        table = [n] * fields["ttft_count"].size
        buckets = [n if i % 121 == 50 else 0 for i in range(fields["ttft_bucket"].size)]
        front.update(
            requests_admitted=table,
            ttft_count=table,
            ttft_sum_seconds=[0.5 * n] * len(table),
            ttft_bucket=buckets,
            prefill_bucket=buckets,
            prefill_count=table,
            prefill_sum_seconds=[0.3 * n] * len(table),
            requests_dense=[n] * fields["requests_dense"].size,
            generation_read=0,
            desired_read_errors=n,
            requests_rejected=n,
            threshold_lambda=0.05,
            threshold_mag=4322.0,
        )

    advance(1)
    yield sidecar.url, advance
    sidecar.stop()
    for writer in (*ranks, front):
        writer.close()


@pytest.fixture
def prometheus(program, tmp_path, metrics_url, deploy):
    """A Prometheus that scrapes it every second, with our rules; its address."""
    url, advance = metrics_url
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(deploy / RULES)],
        "scrape_configs": [
            {
                "job_name": "blasst-sidecar",
                "static_configs": [{"targets": [urllib.parse.urlsplit(url).netloc]}],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    yield f"http://127.0.0.1:{port}", advance
    process.kill()
    process.wait()


def query(url: str, text: str) -> list[object]:
    address = f"{url}/api/v1/query?" + urllib.parse.urlencode({"query": text})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=30) as answer:
        result = json.load(answer)
    assert result["status"] == "success", result
    return list(result["data"]["result"])


def test_every_query_runs_on_a_real_prometheus(prometheus, deploy, load, tmp_path):
    url, advance = prometheus
    deadline = time.monotonic() + 60
    number = 1
    while True:
        assert time.monotonic() < deadline, (tmp_path / "prometheus.log").read_text()[-2000:]
        time.sleep(0.5)
        number += 1
        advance(number)
        try:
            if len(query(url, "blasst_build_info[1m]")[0]["values"]) >= 6:
                break
        except (OSError, IndexError):
            continue
    panels = {p["title"] for p in json.loads((deploy / DASHBOARD).read_text())["panels"]}
    empty = panels
    # A scrape that a busy machine missed makes its series stale until the next one.
    while empty and time.monotonic() < deadline:
        number += 1
        advance(number)
        time.sleep(0.5)
        answers = [(where, query(url, text)) for where, text in expressions(deploy, load)]
        empty = {where for where, found in answers if not found} & panels
    assert empty == set()
    ratio = query(
        url, "sum(rate(blasst_tiles_skipped_total[1m])) / sum(rate(blasst_tiles_visited_total[1m]))"
    )
    assert float(ratio[0]["value"][1]) == pytest.approx(0.4)
    page = dashboard.draw(url, deploy / DASHBOARD, minutes=1)
    assert page.count("<svg") == len(panels)
    assert "No data" not in page
    assert "layer 1: 40%" in page


def test_rules_and_dashboard_name_only_metrics_that_exist(metrics_url, deploy, load):
    url, _ = metrics_url
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    exist = set(re.findall(r"^(blasst_\w+)", text, re.M))
    # Only with --token-file, --follow, --vllm-metrics and --canary.
    exist |= {"blasst_token_files_ok", "blasst_followed_file_ok", "blasst_upstream_up"}
    exist |= {f"blasst_canary_{name}" for name in ("breached", "noisy", "probes_total")}
    for where, expression in expressions(deploy, load):
        plain = re.sub(r"\w+:blasst_\w+:\w+", "", expression)
        assert set(re.findall(r"\bblasst_\w+", plain)) <= exist, where


def test_the_makefile_fetches_promtool():
    root = Path(__file__).parents[2]
    assert ".ci/promtool" in (root / "Makefile").read_text()


def test_a_drawn_line_ends_where_its_values_end():
    runs = dashboard._runs([(0, 1.0), (4, 1.0), (8, 1.0), (80, 1.0), (84, 2.0)])
    assert [len(run) for run in runs] == [3, 2]
    lines = [dashboard.Line("x", [(0, 1.0), (4, 1.0), (80, 1.0), (84, 2.0)])]
    assert dashboard._series(lines, "short", 600, 200).count("<polyline") == 2
