"""Connections that waste time, a Unix socket and TLS, over real sockets."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import socket
import time
import urllib.parse

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from blasst.server import cli, connections
from blasst.server.settings import Settings, SettingsError
from blasst.server.sidecar import Sidecar

THRESHOLD = "/v1/blasst/threshold"
IDLE, MOST = 150, 100


@pytest.fixture
def make_sidecar(tmp_path):
    running = []

    def start(**settings):
        sidecar = Sidecar(Settings(tmp_path / "state", port=0, **settings))
        running.append(sidecar)
        sidecar.prepare(dead_pages_older_than_s=0)
        sidecar.start()
        return sidecar

    yield start
    for sidecar in running:
        sidecar.stop()


@pytest.fixture
def dial():
    with contextlib.ExitStack() as stack:

        def connect(sidecar):
            parts = urllib.parse.urlsplit(sidecar.url)
            return stack.enter_context(
                socket.create_connection((parts.hostname, parts.port), timeout=10)
            )

        yield connect


def ends_within(s, seconds):
    """The peer closes or resets; the seconds it took."""
    s.settimeout(seconds)
    began = time.monotonic()
    with contextlib.suppress(ConnectionResetError):
        while s.recv(65536):
            pass
    return time.monotonic() - began


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: x"])
def test_idle_connections_keep_nobody_out(make_sidecar, dial, sent, monkeypatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", MOST)
    sidecar = make_sidecar()
    held = []
    for _ in range(IDLE):
        held.append(dial(sidecar))
        held[-1].sendall(sent)
    began = time.monotonic()
    for _ in range(20):
        assert httpx.get(sidecar.url + "/healthz", trust_env=False).status_code == 200
    assert time.monotonic() - began < connections.REQUEST_TIMEOUT_S
    # Those that waited longest made room.
    assert ends_within(held[0], 5) < 5


def test_one_who_says_nothing_or_drips_a_header_is_cut(make_sidecar, dial, monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 1.0)
    sidecar = make_sidecar()
    silent, dripping, served = (dial(sidecar) for _ in range(3))
    served.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert served.recv(4096).startswith(b"HTTP/1.1 200")
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        for byte in b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nA: " + b"a" * 1000:
            dripping.sendall(bytes([byte]))
            time.sleep(0.05)
            if time.monotonic() - began > 8:
                pytest.fail("a header that drips was waited for")
    assert ends_within(silent, 5) < 5
    assert ends_within(served, 5) < 5


def test_one_who_never_takes_the_answer_is_cut(make_sidecar, dial, monkeypatch):
    monkeypatch.setattr(connections, "ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 1.0)
    sidecar = make_sidecar()
    greedy = dial(sidecar)
    request = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    greedy.settimeout(3)

    def ask_on():
        began = time.monotonic()
        while time.monotonic() - began < 8:
            with contextlib.suppress(TimeoutError):
                greedy.sendall(request * 100)

    with pytest.raises(ConnectionError):
        ask_on()
    assert httpx.get(sidecar.url + "/healthz", trust_env=False).status_code == 200


def test_headers_have_a_limit(make_sidecar, dial):
    sidecar = make_sidecar()
    s = dial(sidecar)
    with contextlib.suppress(ConnectionError):
        s.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nA: " + b"a" * 100_000)
    s.settimeout(5)
    with contextlib.suppress(ConnectionError):
        assert s.recv(4096).startswith(b"HTTP/1.1 400")


def test_a_unix_socket_is_for_its_owner_alone(make_sidecar, tmp_path):
    path = tmp_path / "s"
    sidecar = make_sidecar(uds=path)
    assert sidecar.url == f"unix://{path}"
    assert (path.stat().st_mode & 0o777) == 0o600
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        answer = client.put(
            f"http://localhost{THRESHOLD}", json={"mag": 2500}, headers={"if-match": "*"}
        )
        assert (answer.status_code, answer.json()["updated_by"]) == (200, "local")
        assert client.get(f"http://evil{THRESHOLD}").status_code == 403
    with pytest.raises(SettingsError, match="cannot listen on"):
        Sidecar(Settings(tmp_path / "other", uds=path)).prepare(dead_pages_older_than_s=0)
    sidecar.stop()
    assert not path.exists()


def test_the_unix_socket_of_a_killed_sidecar_is_replaced(make_sidecar, tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    make_sidecar(uds=path)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        assert client.get("http://localhost/healthz").status_code == 200


@pytest.fixture
def certificate(tmp_path):
    """A certificate for 127.0.0.1 and its key, made now."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "blasst test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(True, None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    key_file.chmod(0o600)
    return cert_file, key_file


def test_tls_and_the_command_line_over_it(make_sidecar, certificate, capsys):
    cert, key = certificate
    sidecar = make_sidecar(tls_cert=cert, tls_key=key)
    assert sidecar.url.startswith("https://127.0.0.1:")
    command = ["threshold", "set", "--mag", "2500", "--json", "--url", sidecar.url]
    assert cli.main(command) == 1
    assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err
    assert cli.main([*command, "--ca-file", str(cert)]) == 0
    assert json.loads(capsys.readouterr().out)["mag"] == 2500
    assert cli.main([*command, "--ca-file", str(key)]) == 2


def test_tls_files_that_cannot_work_are_refused(tmp_path, certificate):
    cert, key = certificate
    for bad in ({"tls_cert": key, "tls_key": key}, {"tls_cert": tmp_path / "no", "tls_key": key}):
        with pytest.raises(SettingsError, match="cannot be used"):
            Settings(tmp_path, **bad).check_tls()
    key.chmod(0o644)
    with pytest.raises(SettingsError, match=r"TLS key .* has mode 0644"):
        Settings(tmp_path, tls_cert=cert, tls_key=key).check_tls()


@pytest.mark.parametrize(("files", "most"), [(-1, 2048), (10**6, 2048), (1024, 896), (10, 64)])
def test_connections_leave_room_for_other_files(files, most):
    assert connections.most_connections(files) == most
