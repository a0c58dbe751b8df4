"""Who may read and write: tokens, open paths, Host headers, loopback."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from blasst.kernels.exchange.prometheus import PagesCollector
from blasst.server.app import OPEN_PATHS, create_app
from blasst.server.control import ControlService
from blasst.server.settings import Settings, SettingsError
from blasst.server.tokens import Tokens

TOKEN = "0123456789abcdef0123456789abcdef"
GUARDED = [
    ("GET", "/v1/blasst/threshold"),
    ("PUT", "/v1/blasst/threshold"),
    ("DELETE", "/v1/blasst/threshold"),
    ("GET", "/v1/blasst/status"),
    ("GET", "/v1/blasst/presets"),
    ("GET", "/v1/blasst/audit"),
]
HOSTS = ["evil/?", "x/#", "127.0.0.1/healthz?", "/metrics", "localhost@evil", ""]


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def make_client():
    opened = []

    def make(settings):
        control = ControlService(settings.state_dir)
        control.open()
        opened.append(control)
        app = create_app(settings, control, PagesCollector(settings.stats_dir))
        return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)

    yield make
    for control in opened:
        control.close()


@pytest.fixture
def guarded(make_client, tmp_path, token_file):
    return make_client(Settings(tmp_path, host="0.0.0.0", token_file=token_file))


def call(client, method, path, **headers):
    headers = {"content-type": "application/json", "if-match": "*", **headers}
    return client.request(method, path, content=json.dumps({"mag": 2500}), headers=headers)


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN} {TOKEN}",
        f"Bearer {TOKEN.upper()}",
    ],
)
def test_every_guarded_route_refuses_all_but_the_token(guarded, method, path, authorization):
    headers = {} if authorization is None else {"authorization": authorization}
    response = call(guarded, method, path, **headers)
    assert response.status_code == 401
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert TOKEN not in response.text


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_token_opens_every_route(guarded, method, path, scheme):
    assert call(guarded, method, path, authorization=f"{scheme} {TOKEN}").status_code == 200


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_pages_and_probes_need_no_token(guarded, path):
    assert guarded.get(path).status_code == 200


@pytest.mark.parametrize("path", OPEN_PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_open_paths_are_open_to_reading_only(guarded, path, method):
    assert guarded.request(method, path).status_code == 401


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize("host", HOSTS)
def test_a_host_header_opens_nothing(guarded, method, path, host):
    assert call(guarded, method, path, host=host).status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "//v1/blasst/threshold",
        "/v1//blasst/threshold",
        "/%76%31/blasst/threshold",
        "/%2e%2e/v1/blasst/threshold",
        "/metrics/%2e%2e/v1/blasst/threshold",
        "/static/..%2fv1/blasst/threshold",
        "/healthz/../v1/blasst/threshold",
        "/v1/blasst/threshold/",
        "/V1/blasst/threshold",
        "/v1/blasst/threshold;x",
        "/healthz;/v1/blasst/threshold",
        "/v1/blasst/threshold%00",
        "/static/app.js/../../v1/blasst/threshold",
        "/nothing",
        "/static/",
        "/static/nothing.js",
    ],
)
def test_path_tricks_open_nothing(guarded, path):
    for method in ("GET", "PUT", "HEAD"):
        response = call(guarded, method, path)
        assert response.status_code == 401, (method, path)


def test_a_refused_write_writes_nothing(guarded, tmp_path):
    call(guarded, "PUT", "/v1/blasst/threshold", authorization="Bearer wrong")
    assert not (tmp_path / "desired.json").exists()


def test_two_authorization_headers_are_none(guarded):
    headers = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer x")]
    assert guarded.get("/v1/blasst/status", headers=headers).status_code == 401


def test_the_document_declares_the_token(guarded):
    document = guarded.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    for method, path in GUARDED:
        operation = document["paths"][path][method.lower()]
        assert operation["security"] == [{"token": []}]
        assert "401" in operation["responses"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8300", 200),
        ("localhost", 200),
        ("[::1]:8300", 200),
        ("127.0.0.2", 200),
        ("rebound.example.org", 403),
        ("127.0.0.1.example.org", 403),
        ("evil/?", 403),
        ("", 403),
    ],
)
def test_without_a_token_only_loopback_names_are_served(make_client, tmp_path, host, status):
    client = make_client(Settings(tmp_path))
    for path in ("/v1/blasst/threshold", "/metrics", "/"):
        response = client.get(path, headers={"host": host})
        assert response.status_code == status, path


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_no_listening_beyond_loopback_without_a_token(tmp_path, host, token_file):
    with pytest.raises(SettingsError, match="without a token"):
        Settings(tmp_path, host=host)
    Settings(tmp_path, host=host, token_file=token_file)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_loopback_needs_no_token(tmp_path, host):
    Settings(tmp_path, host=host)


@pytest.mark.parametrize(
    "content", ["", "\n", "short", "with a space in the middle", "two\nlines" * 4, "x" * 5000]
)
def test_an_unusable_token_file_is_refused_without_showing_it(tmp_path, content):
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(SettingsError, match="openssl rand") as error:
        Tokens(path)
    assert not content.strip() or content.strip() not in str(error.value)


def test_a_missing_token_file_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="cannot be read"):
        Tokens(tmp_path / "absent")


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_have_bounds(tmp_path, port):
    with pytest.raises(SettingsError, match="outside"):
        Settings(tmp_path, port=port)


def test_the_knobs_of_the_sidecar_are_these():
    assert list(Settings.__dataclass_fields__) == [
        "state_dir",
        "host",
        "port",
        "token_file",
        "read_token_file",
        "uds",
        "tls_cert",
        "tls_key",
        "presets_dir",
        "follow",
        "canary",
        "engine_url",
        "vllm_metrics",
        "otlp_endpoint",
    ]


def test_secrets_are_compared_in_constant_time_and_urls_never_trusted():
    source = Path(__file__).parents[2] / "server"
    tree = ast.parse((source / "tokens.py").read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert "compare_digest" in names
    for file in source.rglob("*.py"):
        text = file.read_text()
        assert "request.url" not in text, file.name
        assert "pickle" not in text, file.name
