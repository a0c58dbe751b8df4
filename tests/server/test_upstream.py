"""vLLM's metrics on the sidecar's page: asked for once, bounded, and never in the way of ours."""

from __future__ import annotations

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Info, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from blasst.server import upstream
from blasst.server.tally import Tally
from blasst.server.upstream import Upstream, foreign

TEXT = """# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m} \\" # {"} 3.0
# HELP blasst_tiles_visited_total Ours.
# TYPE blasst_tiles_visited_total counter
blasst_tiles_visited_total{layer="0"} 7.0
python_gc_objects_collected_total 1.5e+03 1700000000000
# a remark
vllm:x_bucket{le="+Inf"} NaN
"""


class Engine:
    """Answers /metrics with `text`, `wait_s` late, and counts who asked."""

    def __init__(self):
        self.text, self.kind, self.status = TEXT.encode(), "text/plain; version=0.0.4", 200
        self.wait_s, self.asked, self.location = 0.0, 0, None
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                engine.asked += 1
                time.sleep(engine.wait_s)
                self.send_response(engine.status)
                self.send_header("Content-Type", engine.kind)
                if engine.location:
                    self.send_header("Location", engine.location)
                self.send_header("Content-Length", str(len(engine.text)))
                self.end_headers()
                self.wfile.write(engine.text)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def engine():
    made = Engine()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_ours_are_left_out_and_the_rest_stays_as_it_is():
    kept = foreign(TEXT)
    assert "blasst_" not in kept
    samples = [s for f in text_string_to_metric_families(kept) for s in f.samples]
    assert [(s.name, s.value) for s in samples[:2]] == [
        ("vllm:num_requests_running", 3.0),
        ("python_gc_objects_collected_total", 1500.0),
    ]
    assert foreign("") == ""


def test_labels_may_hold_what_unicode_calls_the_end_of_a_line():
    line = 'a{model_name="x\u2028y\x85\\\\z",le="}"} 1.0\n'
    assert foreign(line) == line


@given(st.floats(), st.text())
def test_whatever_prometheus_client_writes_is_taken_as_it_is(value, label):
    registry = CollectorRegistry()
    Gauge("a", label.replace("\r", ""), ["b", "c"], registry=registry).labels(label, "d").set(value)
    Info("e", "E.", registry=registry).info({"f": label})
    page = generate_latest(registry).decode()
    assert foreign(page) == page


def test_a_type_that_prometheus_does_not_know_is_left_out():
    assert foreign("# TYPE a info\n# HELP a A.\na 1\n# TYPE b gauge\n") == (
        "# HELP a A.\na 1\n# TYPE b gauge\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        *("<html>", "name", "{} 5", "a b c d", "1a 5", "a x", "a 1_0", "a 0x1p3", "a 1e999"),
        *("a{!} 1", 'a{b="c} 1', 'a{b=""c""} 1', 'a{b="c"d="e"} 1', 'a{1b="c"} 1', "a \u0661"),
    ],
)
def test_what_is_no_prometheus_text_is_refused(text):
    with pytest.raises(ValueError, match="no Prometheus text"):
        foreign("up 1\n" + text)


def test_many_scrapes_ask_once_an_interval_and_one_at_a_time(engine):
    now = [0.0]
    found = Upstream(engine.url, Tally(), clock=lambda: now[0])
    engine.wait_s = 0.3
    threads = [threading.Thread(target=found.text) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (engine.asked, found.up) == (1, True)
    now[0] = 0.9
    assert b"vllm:num_requests_running" in found.text()
    assert engine.asked == 1
    now[0] = 1.1
    found.text()
    assert engine.asked == 2


def test_a_failure_takes_its_part_off_the_page_and_is_counted_once(engine, monkeypatch):
    monkeypatch.setattr(upstream, "MAX_BYTES", 10_000)
    tally = Tally()
    found = Upstream(engine.url, tally, max_age_s=0.0)
    assert found.text()
    for change in (
        {"status": 500},
        {"kind": "text/html"},
        {"text": b"up 1\n" * 10_000},
        {"text": b"\xff 1\n"},
        {"text": b"<html>"},
        {"wait_s": 3.0},
        {"status": 302, "location": "http://127.0.0.1:1/"},
    ):
        monkeypatch.setattr(upstream, "TIMEOUT_S", 0.3 if "wait_s" in change else 20.0)
        before = {name: getattr(engine, name) for name in change}
        vars(engine).update(change)
        assert (found.text(), found.up) == (b"", False), change
        assert found.text() == b""
        vars(engine).update(before)
        monkeypatch.setattr(upstream, "TIMEOUT_S", 20.0)
        assert found.text(), change
    assert tally.errors()["upstream-metrics"] == 7
    assert tally.last.kind == "upstream-metrics"


def test_one_that_never_comes_back_takes_its_old_part_off_the_page(engine, monkeypatch):
    now = [0.0]
    found = Upstream(engine.url, Tally(), clock=lambda: now[0])
    assert found.text()
    answered = threading.Event()
    monkeypatch.setattr(found, "_ask", lambda: answered.wait(20) and b"late 1\n")
    now[0] = 2.0
    thread = threading.Thread(target=found.text)
    thread.start()
    while not found._asking:
        time.sleep(0.01)
    now[0] = 3.0
    assert found.text(), "it may still come"
    now[0] = 20.0
    assert (found.text(), found.up) == (b"", False)
    answered.set()
    thread.join()
    assert (found.text(), found.up) == (b"late 1\n", True)


def test_an_endless_drip_is_given_up(monkeypatch):
    monkeypatch.setattr(upstream, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
                try:
                    while True:
                        connection.send(b"#")
                        time.sleep(0.05)
                except OSError:
                    return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        began = time.monotonic()
        found = Upstream(f"http://127.0.0.1:{listener.getsockname()[1]}", Tally())
        assert found.text() == b""
        assert time.monotonic() - began < 5
        thread.join(5)


def test_on_one_port_when_asked(blasst, connect, engine, tmp_path):
    options = ("sidecar", "--port", 0, "--state-dir", tmp_path / "state")
    process = blasst(*options, "--vllm-metrics", "--engine-url", engine.url)
    client = connect(process.url())
    text = client.get("/metrics").text
    assert "vllm:num_requests_running{" in text
    assert "blasst_upstream_up 1.0" in text
    assert "blasst_tiles_visited_total{" not in text
    families = [f.name for f in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))
    # No caller chooses where it asks.
    client.get("/metrics?url=http://127.0.0.1:1", headers={"X-Forwarded-Host": "other"})
    engine.server.shutdown()
    engine.server.server_close()
    time.sleep(1.1)
    text = client.get("/metrics").text
    assert "blasst_upstream_up 0.0" in text
    assert "vllm:" not in text
    assert 'blasst_control_errors_total{kind="upstream-metrics"} 1.0' in text
