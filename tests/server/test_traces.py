"""Spans of the sidecar's calls: made only when asked for, with bounded names, sent by OTLP."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from blasst.server.settings import SettingsError
from blasst.server.traces import Traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans():
    """(Traces, the spans that it has ended)."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Traces(provider), exporter.get_finished_spans
    provider.shutdown()


@pytest.fixture
def traced(spans, tmp_path):
    from fastapi.testclient import TestClient

    from blasst.kernels.exchange.prometheus import PagesCollector
    from blasst.server.app import Parts, create_app
    from blasst.server.control import ControlService
    from blasst.server.settings import Settings

    control = ControlService(tmp_path)
    control.open()
    app = create_app(
        Settings(tmp_path),
        control,
        PagesCollector(tmp_path / "stats"),
        parts=Parts(traces=spans[0]),
    )
    yield TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False), spans[1]
    control.close()


def test_a_change_is_a_span_of_the_callers_trace(traced):
    client, ended = traced
    headers = {"If-Match": "*", "traceparent": PARENT}
    client.put("/v1/blasst/threshold", json={"mag": 2500}, headers=headers)
    (span,) = ended()
    assert span.name == "PUT /v1/blasst/threshold"
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert dict(span.attributes) == {
        "http.request.method": "PUT",
        "http.route": "/v1/blasst/threshold",
        "http.response.status_code": 200,
        "blasst.generation": 1,
        "blasst.threshold": "mag 2500",
    }


def test_callers_choose_no_names_and_refusals_show(traced):
    client, ended = traced
    client.get("/secret-of-a-user?token=x")
    client.request("BREW", "/healthz")
    client.put("/v1/blasst/threshold", json={"mag": -1}, headers={"If-Match": "*"})
    client.get("/healthz", headers={"Host": "elsewhere", "traceparent": "x" * 500})
    names = [(s.name, s.attributes["http.response.status_code"]) for s in ended()]
    assert names == [
        ("GET other", 404),
        ("other /healthz", 405),
        ("PUT /v1/blasst/threshold", 422),
        ("GET /healthz", 403),
    ]
    assert "secret-of-a-user" not in str([dict(s.attributes) for s in ended()])


def test_spans_reach_a_collector_and_its_absence_costs_nothing(blasst, connect, tmp_path):
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for number, port in enumerate((server.server_port, 1)):
        state = tmp_path / f"state-{number}"
        endpoint = f"http://127.0.0.1:{port}"
        options = ("sidecar", "--port", 0, "--state-dir", state)
        process = blasst(*options, "--otlp-endpoint", endpoint)
        client = connect(process.url())
        began = time.monotonic()
        assert client.get("/v1/blasst/threshold").status_code == 200
        assert time.monotonic() - began < 5
        process.popen.terminate()
        assert process.wait() == 0
    server.shutdown()
    server.server_close()
    assert received[0][0] == "/v1/traces"
    assert b"GET /v1/blasst/threshold" in received[0][1]
    assert b"blasst-sidecar" in received[0][1]


def test_without_the_sdk_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"pip install 'blasst\[traces\]'"):
        Traces.to("http://127.0.0.1:4318")
    with pytest.raises(SettingsError, match="--otlp-endpoint 'nowhere' must look like"):
        Traces.to("nowhere")


def test_it_is_loaded_only_when_asked_for():
    code = "import sys, blasst.server.sidecar; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
