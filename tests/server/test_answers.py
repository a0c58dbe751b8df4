"""What the sidecar answers on paths other than the threshold, and the files of its page."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_status_adds_ranks_up_and_keeps_them_apart(client, fake_engine):
    engine = fake_engine()
    engine.rank(0)
    engine.rank(1)
    engine.front(42)
    engine.requests(0.05, 3000, [0.1, 0.2, 0.3])
    engine.requests(None, 100, [0.01])
    status = client.get("/v1/blasst/status").json()
    assert status["tiles"]["kv_heads"] == [0, 1, 2, 3]
    assert status["tiles"]["layers"][1] == {
        "layer": 1,
        "visited": [100] * 4,
        "skipped": [20] * 4,
    }
    assert [(r["rank"], r["tiles"]["kv_heads"]) for r in status["ranks"]] == [
        ("0", [0, 1]),
        ("1", [2, 3]),
    ]
    assert status["ranks"][0]["impl"] == "cpu"
    assert status["ranks"][0]["counters"]["prefill_tokens_vote"] == 4096
    dense, vote = status["classes"]
    assert (dense["lambda_class"], dense["prompt_length_class"]) == ("dense", "le_1k")
    assert (vote["lambda_class"], vote["admitted"]) == ("mag_2500_4499", 3)
    assert vote["ttft"]["count"] == 3
    assert vote["ttft"]["mean_s"] == pytest.approx(0.2)
    assert vote["ttft"]["p50_s"] == pytest.approx(0.2, rel=0.1)
    assert vote["ttft"]["p95_s"] == pytest.approx(0.3, rel=0.1)


def test_every_answer_carries_the_security_headers(client):
    for path in ("/", "/static/app.js", "/v1/blasst/threshold", "/nothing", "/metrics"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_the_page_loads_nothing_from_elsewhere():
    static = Path(__file__).parents[2] / "server" / "static"
    for file in static.iterdir():
        text = file.read_text()
        assert text.isascii(), file.name
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), file.name
        assert "https://" not in text, file.name
        assert "innerHTML" not in text, file.name
