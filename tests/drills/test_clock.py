"""The machine's clock jumps by hours and years: limits, ages, counters and changes do not care."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from blasst.deploy.drills import processes
from blasst.deploy.drills.control import call, change
from blasst.kernels.exchange.layout import FRONT, front_fields
from blasst.kernels.exchange.stats import StatsWriter, iter_stats
from blasst.plugin import front_hooks
from blasst.plugin.front_end import FrontEnd
from blasst.plugin.settings import Settings
from blasst.plugin.stamp import Stamp, stamped
from blasst.server.audit import AuditLog

DAY_S = 86_400
JUMPS_S = (365 * DAY_S, -365 * DAY_S, 3600, -20 * 365 * DAY_S, -DAY_S, 0)
CALLS = 40


@pytest.fixture
def library(tmp_path):
    """clock.c, compiled."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("moving the clock of a process needs a C compiler (cc, gcc or clang)")
    path = tmp_path / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, source], check=True)
    return path


@pytest.fixture
def moved(library, tmp_path):
    """A sidecar whose clock is moved by writing into the file "clock"; a live front end's page."""
    (tmp_path / "state" / "stats").mkdir(parents=True)
    labels = {"pid": "1", "model_name": "m", "vllm_version": "0.32.0"}
    page = StatsWriter(
        tmp_path / "state" / "stats", "front-1", kind=FRONT, labels=labels, fields=front_fields()
    )
    clock = tmp_path / "clock"
    clock.write_text("0")
    port = processes.free_port()
    env = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(clock)}
    log = tmp_path / "log"
    service = processes.sidecar(tmp_path / "state", port, log, env)
    try:
        service.wait_ready(60)
        yield SimpleNamespace(port=port, clock=clock, page=page, state=tmp_path / "state", log=log)
    finally:
        service.stop()
        page.close()


def test_a_sidecar_whose_clock_jumps(moved):
    stamps, generation = [], 0
    began = time.monotonic()
    for number, jump in enumerate(JUMPS_S):
        moved.clock.write_text(str(jump))
        write = change(moved.port, 1000.0 + number)
        assert write.generation == generation + 1, jump
        generation = write.generation
        moved.page.update(generation_read=generation)
        stamps.append(call(moved.port, "GET")[1]["updated_at"][:4])
        # More calls than one second's allowance of refused ones, fewer than that of good ones.
        for _ in range(CALLS):
            status, state = call(moved.port, "GET")
            assert (status, state["generation"]) == (200, generation), jump
        time.sleep(1.1)  # the page of metrics is cached for a second
        assert call(moved.port, "GET")[1]["converged"], jump
        url = f"http://127.0.0.1:{moved.port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
        ages = [float(x) for x in re.findall(r"^blasst_stats_age_seconds\{.*\} (\S+)$", text, re.M)]
        assert len(ages) == 1, jump
        assert ages[0] >= 0, jump
        assert 'blasst_stats_pages{state="live"} 1.0' in text
    assert time.monotonic() - began < 60
    # The clock really was moved.
    assert len(set(stamps)) >= 3, stamps
    assert AuditLog(moved.state).verify() == len(JUMPS_S)
    records = [json.loads(x) for x in (moved.state / "audit.jsonl").read_text().splitlines()]
    assert [r["generation"] for r in records] == list(range(1, len(JUMPS_S) + 1))
    assert "Traceback" not in moved.log.read_text()


@pytest.mark.parametrize("jump_s", [-DAY_S, DAY_S])
def test_a_time_to_first_token_is_not_of_the_wall_clock(tmp_path, monkeypatch, jump_s):
    (tmp_path / "stats").mkdir()
    front = FrontEnd(Settings(state_dir=tmp_path), "tiny", "0.32.0", None)
    try:
        extra = stamped(None, Stamp(0.1, 1))
        request = SimpleNamespace(
            request_id="r",
            sampling_params=SimpleNamespace(extra_args=extra),
            prompt_token_ids=[1] * 500,
            arrival_time=time.time(),
        )
        state = SimpleNamespace()
        processor = SimpleNamespace(request_states={"r": state}, _blasst=front)
        front_hooks._remember(lambda *args: None)(processor, request, "text")
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        output = SimpleNamespace(request_id="r", new_token_ids=[5])
        front_hooks._watch_first_tokens(lambda *args: None)(processor, [output])
    finally:
        monkeypatch.undo()
        front.close()
    (page,) = iter_stats(tmp_path / "stats", FRONT)
    assert sum(page.arrays["ttft_count"]) == 1
    assert 0.0 <= sum(page.arrays["ttft_sum_seconds"]) < 60.0
