"""The sidecar as a real process: sockets, signals, disks, and death at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
from pathlib import Path

import httpx
import pytest

from blasst.kernels.exchange.desired import FILE_NAME, DesiredReader, read_desired
from blasst.kernels.exchange.pages import CachedPages
from blasst.server import cli
from blasst.server.observe import front_end_views, highest_generation
from blasst.server.settings import Settings
from blasst.server.sidecar import Sidecar
from blasst.server.sweep import Sweeper

THRESHOLD = "/v1/blasst/threshold"


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def sidecar(blasst, connect, state):
    def start(*arguments, folder=state):
        process = blasst("sidecar", "--state-dir", folder, "--port", 0, *arguments)
        return process, connect(process.url())

    return start


def put(client, mag, if_match="*"):
    return client.put(THRESHOLD, json={"mag": mag}, headers={"if-match": if_match})


def raw(url, request):
    """One raw HTTP exchange; the status code."""
    parts = urllib.parse.urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as s:
        s.sendall(request)
        return int(s.recv(4096).split()[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_stops_on_a_signal(sidecar, state, number):
    process, client = sidecar()
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").status_code == 200
    assert put(client, 2500).json()["generation"] == 1
    assert (state.stat().st_mode & 0o777) == 0o700
    began = time.monotonic()
    process.popen.send_signal(number)
    assert process.wait() == 0
    assert time.monotonic() - began < 8
    assert process.err.read_text() == ""


def test_head_of_health_answers_like_get(sidecar, state):
    _, client = sidecar()
    for path in ("/healthz", "/readyz"):
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == client.get(path).headers["content-length"]
    (state / FILE_NAME).write_text("{")
    assert client.head("/readyz").status_code == 503
    assert client.head("/healthz").status_code == 200


def test_a_second_sidecar_on_one_folder_is_refused(sidecar, blasst, state):
    _, client = sidecar()
    second = blasst("sidecar", "--state-dir", state, "--port", 0)
    assert second.wait() == 2
    assert "already has a sidecar" in second.error()
    assert put(client, 2500).status_code == 200


def test_a_taken_port_is_refused_and_gives_the_folder_back(blasst, sidecar, state):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = blasst("sidecar", "--state-dir", state, "--port", port)
        assert process.wait() == 2
        assert f"cannot listen on 127.0.0.1:{port}" in process.error()
    assert not state.exists()
    sidecar()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "without a token"),
        (("--port", "70000"), "outside 0..65535"),
        (("--token-file", "/nonexistent/token"), "cannot be read"),
        (("--host", "no-such-host.invalid", "--token-file", "TOKEN"), "cannot be resolved"),
        (("--state-dir", "/proc/nothing"), "state folder /proc/nothing cannot be used"),
        (("--state-dir", "/dev/null"), "cannot be used"),
        (("--port", "eight"), "invalid int value"),
        (("--state-dir", ""), "--state-dir: is empty"),
    ],
)
def test_a_start_that_cannot_work_is_one_line(refused, state, tmp_path, arguments, message):
    (tmp_path / "token").write_text("x" * 32)
    (tmp_path / "token").chmod(0o600)
    given = [tmp_path / "token" if a == "TOKEN" else a for a in arguments]
    assert message in refused("sidecar", "--state-dir", state, "--port", 0, *given)


def test_a_user_without_a_home_is_told_to_name_a_folder(refused, monkeypatch, state, capsys):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert "give --state-dir" in refused("sidecar", "--port", 0)
    with pytest.raises(SystemExit) as end:
        cli.main(["sidecar", "--help"])
    assert end.value.code == 0
    capsys.readouterr()
    # A folder that is named is enough: the next complaint is of the port.
    assert "outside 0..65535" in refused("sidecar", "--state-dir", state, "--port", -1)


def test_kill_9_between_writes_loses_nothing(sidecar, state):
    """Acknowledged generations only rise and survive, whenever the process is killed."""
    acknowledged = 0
    reader = None
    for round_ in range(4):
        process, client = sidecar()
        assert client.get(THRESHOLD).json()["generation"] >= acknowledged
        killer = threading.Timer(0.1 + 0.1 * round_, process.popen.kill)
        killer.start()
        try:
            for i in range(10_000):
                answer = put(client, 1000 + i)
                assert answer.status_code == 200
                assert answer.json()["generation"] > acknowledged
                acknowledged = answer.json()["generation"]
        except httpx.TransportError:
            pass
        killer.join()
        assert process.wait() == -signal.SIGKILL
        on_disk = read_desired(state / FILE_NAME)
        assert on_disk.generation in (acknowledged, acknowledged + 1)
        reader = reader or DesiredReader(state)
        assert reader.current() == on_disk
        assert reader.errors == 0
    assert acknowledged >= 10


def test_100_puts_from_threads_over_the_wire(sidecar):
    _, client = sidecar()
    generations = []

    def change(i):
        for j in range(10):
            generations.append(put(client, 1000 + 10 * i + j).json()["generation"])

    threads = [threading.Thread(target=change, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(generations) == list(range(1, 101))


def test_path_and_host_tricks_over_a_raw_socket(sidecar, tmp_path):
    token = "0123456789abcdef" * 2
    (tmp_path / "token").write_text(token)
    (tmp_path / "token").chmod(0o600)
    process, client = sidecar("--token-file", tmp_path / "token")
    url = process.url()
    paths = [
        "/v1/blasst/threshold",
        "//v1/blasst/threshold",
        "/healthz/../v1/blasst/threshold",
        "/static/%2e%2e/v1/blasst/threshold",
        "/%2e%2e/v1/blasst/threshold",
        "http://127.0.0.1/v1/blasst/threshold",
        "/v1/blasst/threshold?/healthz",
        "/healthz%3f/../v1/blasst/threshold",
        "/v1/blasst/threshold#/healthz",
    ]
    for path in paths:
        for host in ("127.0.0.1", "evil/?", "x/#", "/healthz?"):
            status = raw(url, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert status in (400, 401), (path, host, status)
    authorized = {"authorization": f"Bearer {token}"}
    assert client.get(THRESHOLD, headers=authorized).status_code == 200
    assert client.get("/healthz").status_code == 200


def test_a_body_without_end_is_cut_off(sidecar):
    process, _ = sidecar()
    request = (
        b"PUT /v1/blasst/threshold HTTP/1.1\r\nHost: 127.0.0.1\r\nIf-Match: *\r\n"
        b"Content-Type: application/json\r\nContent-Length: 9999999999\r\n\r\n"
    )
    assert raw(process.url(), request) == 413


def test_a_body_that_never_ends_gives_its_connection_back(monkeypatch, state):
    monkeypatch.setattr("blasst.server.app.BODY_TIMEOUT_S", 0.5)
    sidecar = Sidecar(Settings(state, port=0))
    sidecar.prepare(dead_pages_older_than_s=0)
    sidecar.start()
    request = (
        b"PUT /v1/blasst/threshold HTTP/1.1\r\nHost: 127.0.0.1\r\nIf-Match: *\r\n"
        b"Content-Type: application/json\r\nContent-Length: 20\r\n\r\n{"
    )
    assert raw(sidecar.url, request) == 408
    sidecar.stop()


def test_it_listens_on_one_loopback_socket_only(sidecar):
    process, _ = sidecar()
    pid = process.popen.pid
    inodes = {
        os.readlink(link)[8:-1]
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(link).startswith("socket:")
    }
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(fields[1])
    assert [address.partition(":")[0] for address in listening] == ["0100007F"]


@pytest.fixture
def small_disk(tmp_path):
    """A 256 KiB tmpfs."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "blasst-test", str(folder)]
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small tmpfs needs root")
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs failed: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path):
    with path.open("wb", buffering=0) as f, contextlib.suppress(OSError):
        while True:
            f.write(b"x" * 4096)


def test_a_full_disk_is_507_and_recovers_without_a_restart(sidecar, small_disk):
    process, client = sidecar(folder=small_disk)
    assert put(client, 2500).json()["generation"] == 1
    filler = small_disk / "filler"
    fill(filler)
    refused = put(client, 1000)
    assert refused.status_code == 507
    assert refused.json()["type"] == "urn:blasst:problem:no-space"
    assert client.get(THRESHOLD).json()["mag"] == 2500
    assert client.get("/readyz").status_code == 503
    assert not list(small_disk.glob(".desired-*"))
    filler.unlink()
    assert put(client, 1000).json()["generation"] == 2
    assert client.get("/readyz").status_code == 200
    process.popen.terminate()
    assert process.wait() == 0


def test_a_read_only_folder_is_503_and_recovers(sidecar, small_disk):
    process, client = sidecar(folder=small_disk)
    put(client, 2500)
    remount = ["mount", "-o", "remount,bind,ro", str(small_disk)]
    subprocess.run(["mount", "--bind", str(small_disk), str(small_disk)], check=True)
    try:
        subprocess.run(remount, check=True)
        # The sidecar's own working view is by path: the bind mount lies over it.
        refused = put(client, 1000)
        assert refused.status_code == 503
        assert refused.json()["type"] == "urn:blasst:problem:state-unwritable"
        assert "Read-only" in refused.json()["detail"]
        assert client.get(THRESHOLD).json()["mag"] == 2500
        assert client.get("/readyz").status_code == 503
    finally:
        subprocess.run(["umount", "-l", str(small_disk)], check=True)
    assert put(client, 1000).json()["generation"] == 2
    process.popen.terminate()
    assert process.wait() == 0


def test_starting_on_a_full_disk_is_one_line(blasst, small_disk):
    fill(small_disk / "filler")
    process = blasst("sidecar", "--state-dir", small_disk, "--port", 0)
    assert process.wait() == 2
    assert "No space left" in process.error()


def test_200_scrapes_do_not_read_the_pages_200_times(sidecar, fake_engine, state):
    process, client = sidecar()
    engine = fake_engine(state / "stats")
    engine.rank(0)
    page = state / "stats" / engine.front(1)
    time.sleep(0.6)
    before, began = bytes_read(process.popen.pid), time.monotonic()
    for _ in range(200):
        assert "blasst_tiles_visited_total{" in client.get("/metrics").text
    read = (bytes_read(process.popen.pid) - before) / page.stat().st_size
    # One reading in half a second, and slack for what else the process reads.
    assert 0.5 < read < 10 + 2 * (time.monotonic() - began), f"{read:.1f} readings"


def bytes_read(pid):
    """By read and pread; sockets are not in it."""
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])


def test_a_start_beside_a_running_engine_lets_no_counter_fall(sidecar, fake_engine, state):
    engine = fake_engine(state / "stats")
    dead = engine.kill(engine.front(1))
    data = bytearray(dead.read_bytes())
    data[24:32] = bytes(8)
    dead.write_bytes(data)
    retired = dead.with_name("retired-" + "0" * 16 + ".stats")
    retired.write_bytes(data)
    live = engine.front(2)
    sidecar()
    names = sorted(p.name for p in (state / "stats").iterdir())
    assert names == sorted([dead.name, retired.name, live]), "what is old is added up later"


def test_pages_of_the_dead_are_added_up_while_it_runs(sidecar, fake_engine, state):
    cache = CachedPages(state / "stats", max_age_s=0)
    engine = fake_engine(state / "stats")
    dead = engine.kill(engine.front(1, generation=3))
    live = engine.front(2)
    sweeper = Sweeper(cache, older_than_s=0.2, every_s=0.1)
    assert sweeper.sweep() == 0
    sweeper.start()
    end = time.monotonic() + 10
    while dead.exists() and time.monotonic() < end:
        time.sleep(0.02)
    sweeper.stop()
    retired, kept = sorted(p.name for p in (state / "stats").iterdir())[::-1]
    assert (retired[:8], kept) == ("retired-", live)
    # Who is gone is no longer shown, what it counted and knew is.
    assert [f.name for f in front_end_views(cache.pages())] == [live.removesuffix(".stats")]
    assert highest_generation(cache.pages()) == 3


def test_a_sweep_puts_a_schedule_back(sidecar):
    from blasst.evals.sidecar import Sidecar
    from blasst.kernels.threshold import SkipThreshold

    _, client = sidecar()
    steps = [{"up_to": 16384, "off": True}, {"up_to": 65536, "mag": 7000.0}, {"scale": 400.0}]
    wish = {"schedule": steps, "min_context": 5}
    client.put("/v1/blasst/threshold", json=wish, headers={"if-match": "*"})
    deployment = Sidecar(str(client.base_url))
    initial = deployment.get()
    assert deployment.put(SkipThreshold("mag", 2500)).schedule == ()
    deployment.put(initial.threshold, min_context=initial.min_context, schedule=initial.schedule)
    deployment.close()
    now = client.get("/v1/blasst/threshold").json()
    assert (now["generation"], now["min_context"], len(now["schedule"])) == (3, 5, 3)
    assert now["schedule"][1] == {"up_to": 65536, "threshold": {"unit": "mag", "value": 7000.0}}


def test_what_a_killed_writer_left_is_removed_at_the_start(sidecar, state):
    state.mkdir()
    (state / ".desired-x1").write_text("{")
    (state / ".desired-x1.previous").write_text("{")
    (state / "notes").write_text("of somebody else")
    sidecar()
    assert sorted(p.name for p in state.iterdir()) == [".control.lock", "notes", "stats"]


def test_json_of_the_command_line_agrees_with_the_api(sidecar, blasst):
    process, client = sidecar()
    command = blasst("threshold", "set", "--mag", 2500, "--json", "--url", process.url())
    assert command.wait() == 0
    assert json.loads(command.out.read_text()) == client.get(THRESHOLD).json()
