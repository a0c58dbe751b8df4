"""Drills: a real sidecar is damaged, killed and worn; what it promised must still hold.

Counts and times of one run are in docs/measurements/drills.md (BLASST_DRILLS=FILE collects them).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

import httpx
import pytest

from blasst.kernels.exchange.desired import FILE_NAME, DesiredReader, read_desired
from blasst.server.audit import AuditLog

THRESHOLD = "/v1/blasst/threshold"
CORRUPTIONS = 1000
CHANGES, KILLS = 200, 8
CRASHES = 300
RESTARTS = 1000
SCRAPES = 1000
SOAK_S = 20.0


@pytest.fixture
def start(blasst, connect, tmp_path):
    def run(*arguments):
        process = blasst("sidecar", "--state-dir", tmp_path / "state", "--port", 0, *arguments)
        return process, connect(process.url())

    return run


def put(client, mag):
    return client.put(THRESHOLD, json={"mag": mag}, headers={"if-match": "*"})


def corrupt(rng, good):
    """One damaged version of a good file."""
    kind = rng.randrange(7)
    at = rng.randrange(len(good))
    if kind == 0:
        return good[:at]
    if kind == 1:
        return good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :]
    if kind == 2:
        return good[:at] + rng.randbytes(rng.randrange(1, 40)) + good[at:]
    if kind == 3:
        return rng.randbytes(rng.randrange(200))
    if kind == 4:
        record = json.loads(good)
        record["schema_version"] = rng.choice([-1, 0, 3, 99, None, "1", 1e9])
        return json.dumps(record).encode()
    if kind == 5:
        record = json.loads(good)
        record[rng.choice(list(record))] = rng.choice([None, -1, 1e308, "x", [], {}, True])
        return json.dumps(record).encode()
    return good * rng.randrange(2, 400)


def test_1000_corrupted_control_files(start, tmp_path, report):
    """The front end keeps its last good threshold, the sidecar says so, and nothing falls over."""
    _, client = start()
    put(client, 2500)
    path = tmp_path / "state" / FILE_NAME
    good = path.read_bytes()
    reader = DesiredReader(path.parent)
    state = reader.current()
    rng = random.Random(7)
    refused = 0
    began = time.monotonic()
    for number in range(CORRUPTIONS):
        (tmp_path / "next").write_bytes(corrupt(rng, good))
        os.replace(tmp_path / "next", path)
        assert reader.current() == state
        answer = client.get(THRESHOLD)
        assert answer.status_code in (200, 503), number
        if answer.status_code == 200:
            # Only damage that is none: white space, or a digit that the checksum does not see.
            assert read_desired(path) == state
        else:
            refused += 1
    seconds = time.monotonic() - began
    assert refused > 0.9 * CORRUPTIONS
    assert "blasst_control_state_ok 0.0" in client.get("/metrics").text
    for make in (path.mkdir, lambda: path.symlink_to(path), lambda: os.mkfifo(path)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        make()
        assert client.get(THRESHOLD).status_code == 503
        assert reader.current() == state
        path.rmdir() if path.is_dir() else path.unlink()
    repaired = put(client, 3000).json()
    assert repaired["generation"] > state.generation
    assert reader.current().threshold.value == 3000
    report(files=CORRUPTIONS + 3, refused=refused + 3, seconds=round(seconds, 1))


class History:
    """What one writer asked for and what a reader saw, as (generation, MAG)."""

    def __init__(self, folder):
        self.acknowledged = []
        self.asked = []
        self.seen = []
        self._reader = DesiredReader(folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self):
        while not self._stop.wait(0.001):
            state = self._reader.current()
            if state.generation and (not self.seen or self.seen[-1][0] != state.generation):
                self.seen.append((state.generation, state.threshold.value))

    def end(self):
        self._stop.set()
        self._thread.join()
        return self._reader.errors


def test_kill_9_at_random_moments_of_200_changes(start, tmp_path, report):
    """Generations only rise, no acknowledged change is lost, and every pair (generation, MAG) that
    a front end could see is one that was asked for, in the order of asking."""
    rng = random.Random(11)
    folder = tmp_path / "state"
    process, client = start()
    history = History(folder)
    kills, recoveries = 0, []
    try:
        for mag in range(1000, 1000 + CHANGES):
            if kills < KILLS and rng.random() < 2 * KILLS / CHANGES:
                delay = rng.uniform(0.0, 0.02)
                threading.Timer(delay, process.popen.kill).start()
                kills += 1
            history.asked.append(float(mag))
            try:
                state = put(client, mag).json()
                history.acknowledged.append((state["generation"], state["mag"]))
            except httpx.TransportError:
                process.wait()
                on_disk = read_desired(folder / FILE_NAME)
                last = history.acknowledged[-1] if history.acknowledged else (0, 0)
                assert on_disk.generation >= last[0]
                began = time.monotonic()
                process, client = start()
                assert client.get(THRESHOLD).json()["generation"] == on_disk.generation
                recoveries.append(time.monotonic() - began)
    finally:
        time.sleep(0.05)
        errors = history.end()
    assert errors == 0
    assert recoveries
    generations = [g for g, _ in history.acknowledged]
    assert generations == sorted(set(generations))
    assert [g for g, _ in history.seen] == sorted({g for g, _ in history.seen})
    values = [v for _, v in history.seen]
    assert values == sorted(values)
    assert set(values) <= set(history.asked)
    mags = dict(history.acknowledged)
    assert all(mags.get(g, v) == v for g, v in history.seen)
    records = AuditLog(folder)
    assert records.verify() >= len(history.acknowledged)
    logged = {r["generation"]: r["new"]["threshold"]["value"] for r in records.tail(1000)}
    assert all(logged[g] == v for g, v in history.acknowledged)
    report(
        changes=CHANGES,
        kills=len(recoveries),
        acknowledged=len(generations),
        seen=len(history.seen),
        slowest_restart_s=round(max(recoveries), 2),
    )


CRASH = r"""
import json, os, random, shutil, sys
from pathlib import Path
from blasst.kernels.exchange import desired
from blasst.kernels.exchange.desired import FILE_NAME, read_desired
from blasst.kernels.threshold import SkipThreshold
from blasst.server.control import ControlService, Wish

folder, crashes = Path(sys.argv[1]), int(sys.argv[2])
NAMES = [(os, n) for n in ("fsync", "replace", "pwrite", "fchmod", "ftruncate", "open")]
NAMES.append((shutil, "copyfile"))
rng = random.Random(3)


def child(mag, at, after):
    calls = 0
    for module, name in NAMES:
        def wrapped(*args, _real=getattr(module, name), **kwargs):
            nonlocal calls
            calls += 1
            if calls == at and not after:
                os._exit(9)
            result = _real(*args, **kwargs)
            if calls == at and after:
                os._exit(9)
            return result
        setattr(module, name, wrapped)
    service.set(Wish(SkipThreshold("mag", mag)), "*")
    os._exit(0)


died = finished = 0
points = set()
last = 0
for number in range(crashes):
    service = ControlService(folder)
    service.open()
    before = service.read()
    assert before.generation >= last, (before, last)
    mag, at, after = 1000.0 + number, rng.randrange(1, 20), rng.random() < 0.5
    pid = os.fork()
    if not pid:
        child(mag, at, after)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    service.close()
    now = read_desired(folder / FILE_NAME) if (folder / FILE_NAME).exists() else before
    if code == 9:
        died += 1
        points.add((at, after))
        assert now == before or now.threshold == SkipThreshold("mag", mag), (at, after, now)
    else:
        assert code == 0, code
        finished += 1
        assert now.threshold == SkipThreshold("mag", mag)
    last = max(last, now.generation)
# Nothing is left over, and generations skipped what a crash had announced.
service = ControlService(folder)
service.open()
assert not list(folder.glob(".desired-*"))
count = service.audit.verify()
marks = [r["generation"] for r in service.audit.tail(10_000) if r["result"] == "applied"]
assert marks == sorted(set(marks)), "a generation was given out twice"
print(json.dumps({"died": died, "finished": finished, "points": len(points), "records": count}))
"""


def test_a_crash_between_any_two_steps_of_a_write(tmp_path, report):
    """Old or new, never another; no generation twice; the audit log's chain holds."""
    folder = tmp_path / "state"
    folder.mkdir()
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CRASH, folder, str(CRASHES)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["died"] > CRASHES / 2
    assert result["finished"] > 0
    assert result["points"] >= 20
    report(**result, seconds=round(time.monotonic() - began, 1))


def test_1000_worker_restarts_and_odd_names_add_no_series(tmp_path, fake_engine, report):
    """Pages of dead workers add up in the series of their rank; a name cannot break the text."""
    from blasst.kernels.exchange.prometheus import PagesCollector
    from blasst.server.metrics import MetricsPage
    from blasst.server.sweep import Sweeper

    engine = fake_engine()
    engine.model = 'a"}\n{x="1\\'
    page = engine.rank(0)
    first = page.path.read_bytes()
    name = page.path.name
    text = MetricsPage(PagesCollector(tmp_path / "stats", max_age_s=0), {}, 0).text()
    before = len(re.findall(rb"^blasst_", text, re.M))
    for number in range(RESTARTS):
        (tmp_path / "stats" / name.replace("1000", f"{20_000 + number}")).write_bytes(first)
    began = time.process_time()
    text = MetricsPage(PagesCollector(tmp_path / "stats", max_age_s=0), {}, 0).text()
    seconds = time.process_time() - began
    assert len(re.findall(rb"^blasst_", text, re.M)) == before
    assert f'state="dead"}} {RESTARTS}'.encode() in text
    assert b'\n{x="1' not in text
    collector = PagesCollector(tmp_path / "stats", max_age_s=0)
    assert Sweeper(collector.cache, older_than_s=0.0).sweep() == RESTARTS
    began = time.process_time()
    swept = MetricsPage(collector, {}, 0).text()
    seconds_swept = time.process_time() - began
    tiles = rb"^blasst_tiles_visited_total.*$"
    assert re.findall(tiles, swept, re.M) == re.findall(tiles, text, re.M)
    assert len(list((tmp_path / "stats").iterdir())) == 2
    report(
        restarts=RESTARTS,
        series=before,
        scrape_cpu_ms=round(1000 * seconds),
        swept_scrape_cpu_ms=round(1000 * seconds_swept),
    )


@pytest.mark.parametrize("classes", [2, 8, 24, 108])
def test_what_a_scrape_costs(tmp_path, classes, report):
    """Two front ends and eight ranks of 80 layers; callers choose how many classes there are."""
    from blasst.kernels.exchange.layout import FRONT, RANK, front_fields, rank_fields
    from blasst.kernels.exchange.prometheus import PagesCollector
    from blasst.kernels.exchange.stats import StatsWriter
    from blasst.server.metrics import MetricsPage

    seen = [int(number < classes) for number in range(108)]
    writers = []
    for number in range(2):
        labels, fields = {"model_name": "m"}, front_fields()
        writer = StatsWriter(tmp_path, f"front-{number}", kind=FRONT, labels=labels, fields=fields)
        writer.update(requests_admitted=seen, ttft_count=seen, prefill_count=seen)
        writers.append(writer)
    for number in range(8):
        labels, fields = {"model_name": "m", "rank": str(number)}, rank_fields(80, 1)
        writers.append(
            StatsWriter(tmp_path, f"rank-{number}", kind=RANK, labels=labels, fields=fields)
        )
    page = MetricsPage(PagesCollector(tmp_path, max_age_s=0), {}, 0)
    page.text()
    began = time.process_time()
    text = page.text()
    seconds = time.process_time() - began
    for writer in writers:
        writer.close()
    series = len(re.findall(rb"^\w+[{ ]", text, re.M))
    assert series < 8000
    report(classes=classes, series=series, kb=len(text) // 1000, cpu_ms=round(1000 * seconds))


async def scrape(address):
    """The status of one scrape over a connection of its own; what went wrong, if anything did."""
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    except OSError as e:
        return type(e).__name__
    return int(answer[9:12]) if b"blasst_build_info" in answer else "cut"


def test_1000_scrapes_at_once(start, tmp_path, fake_engine, report):
    """All are answered, from a page that was made a few times."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"needs 4096 open files, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    engine = fake_engine(tmp_path / "state" / "stats")
    engine.rank(0)
    engine.front(42)
    process, client = start()
    address = urllib.parse.urlsplit(process.url())

    async def all_at_once():
        return await asyncio.gather(*(scrape(address) for _ in range(SCRAPES)))

    began = time.monotonic()
    answers = asyncio.run(all_at_once())
    seconds = time.monotonic() - began
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {a: answers.count(a) for a in set(answers)} == {200: SCRAPES}
    assert put(client, 2500).status_code == 202
    report(scrapes=SCRAPES, seconds=round(seconds, 2))


def memory_and_files(pid):
    with open(f"/proc/{pid}/status") as f:
        kib = int(re.search(r"VmRSS:\s+(\d+)", f.read())[1])
    return kib / 1024, len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.slow
def test_soak(start, tmp_path, fake_engine, report):
    """Many kinds of call at once: memory grows by less than 20 MB and no descriptor is left."""
    engine = fake_engine(tmp_path / "state" / "stats")
    engine.rank(0)
    engine.front(42)
    process, client = start()
    address = urllib.parse.urlsplit(process.url())
    pid = process.popen.pid
    rng = random.Random(1)
    counts = {}

    def mix(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            kind = rng.randrange(8)
            if kind == 0:
                status = put(client, rng.randrange(1, 9000)).status_code
            elif kind == 1:
                status = client.put(THRESHOLD, content=rng.randbytes(99)).status_code
            elif kind == 2:
                with socket.create_connection((address.hostname, address.port)) as s:
                    s.sendall(rng.randbytes(20))
                status = "dropped"
            elif kind == 3:
                status = client.get(f"/{rng.random()}").status_code
            else:
                path = ("/metrics", THRESHOLD, "/v1/blasst/status", "/v1/blasst/audit")[kind - 4]
                status = client.get(path).status_code
            counts[status] = counts.get(status, 0) + 1

    mix(SOAK_S / 4)
    time.sleep(0.2)
    before = memory_and_files(pid)
    mix(SOAK_S)
    time.sleep(0.5)
    after = memory_and_files(pid)
    assert counts.keys() <= {200, 202, 404, 415, 429, "dropped"}, counts
    assert after[0] - before[0] < 20
    assert after[1] <= before[1]
    report(
        calls=sum(counts.values()),
        seconds=1.25 * SOAK_S,
        rss_mib=[round(before[0], 1), round(after[0], 1)],
        descriptors=[before[1], after[1]],
    )
