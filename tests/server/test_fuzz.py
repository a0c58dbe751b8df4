"""Fuzz of the API and attempts to get around its token, over real sockets.

Counts and times of one run are in docs/measurements/drills.md (BLASST_DRILLS=FILE collects them).
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
import urllib.parse

import httpx
import pytest

from blasst.kernels.exchange.desired import FILE_NAME
from blasst.server import app
from blasst.server.audit import AuditLog
from blasst.server.limits import Bucket, Buckets, Limits
from blasst.server.settings import Settings
from blasst.server.sidecar import Sidecar

THRESHOLD = "/v1/blasst/threshold"
CALLS = 10_000

METHODS = ("GET", "PUT", "PUT", "PUT", "DELETE", "POST", "PATCH", "HEAD", "OPTIONS", "TRACE", "X")
PATHS = (
    *(THRESHOLD, THRESHOLD, "/v1/blasst/status", "/v1/blasst/presets", "/v1/blasst/audit"),
    *("/metrics", "/healthz", "/readyz", "/", "/openapi.json", "/static/app.js"),
)
SCALARS = (
    *(None, True, False, 0, 1, -1, 2500, 0.5, 1e308, -0.0, 10**400, 2**63, "", "2500", "\ud800"),
    *([], {}, [1], {"a": 1}, "x" * 600, "\u0000", 126_000, 126_001, 1e-320),
)
FIELDS = ("mag", "lambda", "scale", "off", "target_skip_rate", "preset", "min_context", "reason")


def fuzzed(rng):
    """(method, path, headers, body) of one call; some are right, most nearly."""
    if rng.random() < 0.1:
        right = {"If-Match": "*", "Content-Type": "application/json"}
        return "PUT", THRESHOLD, right, json.dumps({"mag": rng.uniform(1, 9000)}).encode()
    method, path = rng.choice(METHODS), rng.choice(PATHS)
    if rng.random() < 0.2:
        at = rng.randrange(len(path) + 1)
        path = (
            path[:at]
            + rng.choice(("%00", "//", "/..", "%2e", ";", "?x=1", "%", "\u00e9"))
            + path[at:]
        )
        path = urllib.parse.quote(path, safe="/%;?=.:")
    fields = {rng.choice(FIELDS): rng.choice(SCALARS) for _ in range(rng.randrange(4))}
    if rng.random() < 0.3:
        fields = {"mag": rng.uniform(1, 9000)}
    body = json.dumps(fields).encode()
    if rng.random() < 0.2:
        body = rng.choice((body[:-1], rng.randbytes(40), b"[" * 5000, b"{" + body, b"x" * 17_000))
    headers = {"If-Match": rng.choice(("*", '"1"', "W/*", "", "x" * 300))}
    if rng.random() < 0.1:
        headers = {}
    headers["Content-Type"] = rng.choice(("application/json",) * 4 + ("text/plain", ""))
    if rng.random() < 0.1:
        headers[rng.choice(("Host", "Accept", "X-Forwarded-For", "Authorization"))] = "\u00fc{}<>"
    return method, path, headers, None if method in ("GET", "HEAD") else body


@pytest.fixture
def unlimited(tmp_path, monkeypatch):
    """A sidecar in this process without rate limits, which would answer most of a fuzzer."""
    endless = Limits(Bucket(1e9, 1e9), Bucket(1e9, 1e9), Buckets(1e9, 1e9))
    monkeypatch.setattr(app, "Limits", lambda: endless)
    sidecar = Sidecar(Settings(tmp_path / "state", port=0))
    sidecar.prepare(dead_pages_older_than_s=0)
    sidecar.start()
    yield sidecar
    sidecar.stop()


@pytest.mark.slow
def test_10000_fuzzed_calls(unlimited, report):
    """None is answered with a fault of ours, each error says what is wrong, and none is slow."""
    rng = random.Random(5)
    address = urllib.parse.urlsplit(unlimited.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=20)
    counts, slowest, accepted = {}, 0.0, 0
    began = time.monotonic()
    for number in range(CALLS):
        method, path, headers, body = call = fuzzed(rng)
        sent = time.monotonic()
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (ConnectionError, http.client.HTTPException) as e:
            # Closed by the other side after an error on the previous call, as HTTP allows.
            connection.close()
            counts[type(e).__name__] = counts.get(type(e).__name__, 0) + 1
            continue
        slowest = max(slowest, time.monotonic() - sent)
        status = answer.status
        counts[status] = counts.get(status, 0) + 1
        assert status < 500, (number, call, content[:300])
        assert not 300 <= status < 400, (number, call)
        kind = answer.headers["content-type"] or ""
        if status >= 400 and method != "HEAD" and content != b"Invalid HTTP request received.":
            assert kind == "application/problem+json", (call, status, kind)
            assert json.loads(content)["detail"]
        if status in (200, 202) and method == "PUT":
            accepted += 1
    seconds = time.monotonic() - began
    connection.close()
    assert sum(n for s, n in counts.items() if isinstance(s, int)) > 0.98 * CALLS, counts
    assert accepted > 100
    assert {200, 400, 404, 405, 412, 413, 415, 422, 428} <= counts.keys(), counts
    assert slowest < 5.0
    assert httpx.get(unlimited.url + "/readyz", trust_env=False).status_code == 200
    assert AuditLog(unlimited.settings.state_dir).verify() <= accepted + counts[200]
    report(
        calls=CALLS,
        answers={str(k): v for k, v in sorted(counts.items(), key=lambda kv: str(kv[0]))},
        accepted=accepted,
        slowest_ms=round(1000 * slowest),
        seconds=round(seconds, 1),
    )


SMUGGLES = (
    "X-HTTP-Method-Override: GET",
    "X-Original-URL: /healthz",
    "X-Rewrite-URL: /healthz",
    "X-Forwarded-For: 127.0.0.1",
    "X-Forwarded-Host: localhost",
    "Forwarded: for=127.0.0.1",
    "Authorization: Bearer",
    "Authorization: Bearer null",
    "Authorization: Bearer *",
    "Authorization: Basic OmFkbWlu",
    "Cookie: token=admin",
    "Connection: Authorization",
    "Transfer-Encoding: chunked",
    "Content-Length: 0\r\nContent-Length: 5",
    "Upgrade: websocket\r\nConnection: Upgrade",
    "Expect: 100-continue",
)


def test_no_way_around_the_token(blasst, connect, tmp_path, report):
    (tmp_path / "token").write_text("0123456789abcdef" * 2)
    (tmp_path / "token").chmod(0o600)
    folder = tmp_path / "state"
    token = ("--token-file", tmp_path / "token")
    process = blasst("sidecar", "--state-dir", folder, "--port", 0, *token)
    client = connect(process.url())
    address = urllib.parse.urlsplit(process.url())
    paths = [
        *("/v1/blasst/threshold", "//v1/blasst/threshold", "/v1/blasst/threshold/"),
        *("/./v1/blasst/status", "/healthz/../v1/blasst/audit", "/metrics/..%2fv1/blasst/audit"),
        *("http://x/v1/blasst/status", "/v1/blasst/threshold?/healthz", "/V1/BLASST/THRESHOLD"),
        "/v1/blasst/threshold%20",
    ]
    tried = {}
    for method in ("GET", "PUT", "DELETE", "HEAD", "GeT"):
        for path in paths:
            for extra in SMUGGLES:
                request = (
                    f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nIf-Match: *\r\n{extra}\r\n\r\n"
                )
                with socket.create_connection((address.hostname, address.port), timeout=10) as s:
                    s.sendall(request.encode())
                    s.settimeout(5)
                    try:
                        status = int(s.recv(200).split()[1])
                    except (ConnectionError, TimeoutError, IndexError):
                        status = 0
                tried[status] = tried.get(status, 0) + 1
    # 429: the attempts themselves are limited.
    assert set(tried) <= {0, 400, 401, 429}, tried
    assert tried[401] >= 50
    assert tried[429] > 0
    assert not (folder / FILE_NAME).exists()
    right = {"authorization": "Bearer " + "0123456789abcdef" * 2}
    assert client.get(THRESHOLD, headers=right).status_code == 200
    report(attempts=sum(tried.values()), answers={str(k): v for k, v in sorted(tried.items())})
