"""`vllm serve MODEL --attention-backend blasst`, over HTTP, and what it refuses."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from blasst.kernels.exchange.desired import DesiredState, write_desired
from blasst.kernels.exchange.stats import iter_stats
from blasst.kernels.threshold import SkipThreshold
from blasst.plugin.bench_server import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = "attention is all you need " * 30
READY_S = 240
ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_BLASST_MIN_CONTEXT": "100",
    "VLLM_BLASST_STATS_INTERVAL_S": "0.1",
}


def command(model: Path, port: int) -> list[str]:
    vllm = Path(sys.executable).with_name("vllm")
    if not vllm.exists():
        pytest.skip("the command `vllm` is not installed")
    options = "--served-model-name tiny --dtype float32 --max-model-len 2048 --enforce-eager"
    where = ["--host", "127.0.0.1", "--port", str(port), "--attention-backend", "blasst"]
    return [str(vllm), "serve", str(model), *options.split(), *where]


@dataclass
class Server:
    url: str
    state: Path
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    def complete(self, **xargs: Any) -> tuple[int, dict[str, Any]]:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "vllm_xargs": xargs}
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as e:
            with e:
                return e.code, json.load(e)

    def metric(self, pattern: str) -> float:
        """Sum of the samples whose name and labels match, after the pages were written."""
        time.sleep(0.8)
        found = re.findall(rf"^{pattern}.* ([0-9.e+-]+)$", self.get("/metrics"), re.M)
        return sum(float(value) for value in found)


@pytest.fixture(scope="module")
def server(
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    clean_environment: Callable[[dict[str, str]], dict[str, str]],
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    state = folder / "state"
    state.mkdir()
    port = free_port()
    log = folder / "log"
    env = clean_environment({**ENGINE, "VLLM_BLASST_STATE_DIR": str(state)})
    with (
        open(log, "wb") as out,
        subprocess.Popen(
            command(tiny_model, port), env=env, stdout=out, stderr=subprocess.STDOUT
        ) as process,
    ):
        made = Server(f"http://127.0.0.1:{port}", state, process, log)
        try:
            wait_until_ready(made)
            yield made
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_ready(server: Server) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        assert server.process.poll() is None, server.log.read_text()[-4000:]
        try:
            server.get("/health")
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.3)
    pytest.fail(f"not ready in {READY_S} s: {server.log.read_text()[-4000:]}")


def test_the_table_is_printed_and_no_setting_is_called_unknown(server: Server) -> None:
    log = server.log.read_text()
    assert "2 of 2 layers skip" in log
    assert "skips on cpu" in log
    assert "Unknown vLLM environment variable" not in log


def test_a_request_decides_for_itself(server: Server) -> None:
    before = server.metric('blasst_prefill_tokens_total.*path="vote"')
    assert server.complete(blasst_mag=500)[0] == 200
    assert server.complete(blasst_mag="500")[0] == 200
    assert server.complete(blasst_mag="off")[0] == 200
    assert server.complete()[0] == 200
    assert server.metric('blasst_prefill_tokens_total.*path="vote"') > before
    assert server.metric("blasst_tiles_skipped_total") > 0
    assert server.metric('blasst_requests_admitted_total.*"mag_lt_1000"') == 2
    timed = 'blasst_time_to_first_token_seconds_count.*lambda_class="mag_lt_1000"'
    assert server.metric(timed) == 2
    assert server.metric("blasst_unstamped_requests_total") == 0


@pytest.mark.parametrize(
    "xargs",
    [
        {"blasst_mag": -1},
        {"blasst_mag": "many"},
        {"blasst_mag": 1e9},
        {"blasst_mag": [1]},
        {"blasst_mag": 2500, "blasst_lambda": 0.1},
        {"blasst_mga": 2500},
        {"blasst_stamp": "x"},
    ],
)
def test_bad_arguments_get_a_400_and_disturb_nothing(server: Server, xargs: dict[str, Any]) -> None:
    status, body = server.complete(**xargs)
    assert status == 400
    assert "give one of blasst_mag, blasst_lambda, blasst_scale" in body["error"]["message"]
    assert server.complete()[0] == 200


def test_the_threshold_changes_while_serving(server: Server) -> None:
    write_desired(server.state, DesiredState(1, SkipThreshold("mag", 4500)))
    assert server.metric('blasst_threshold_generation.*state="read"') == 1
    assert server.metric("blasst_threshold_mag") == 4500
    assert server.complete()[0] == 200
    assert server.metric('blasst_threshold_generation.*state="stamped"') == 1
    assert server.metric('blasst_requests_admitted_total.*"mag_4500_6999"') == 1
    write_desired(server.state, DesiredState(2, None))
    assert server.complete()[0] == 200
    assert server.metric('blasst_requests_admitted_total.*"mag_4500_6999"') == 1
    assert server.metric('blasst_threshold_generation.*state="stamped"') == 2
    (server.state / "desired.json").write_text("not json")
    assert server.complete()[0] == 200
    assert server.metric("blasst_desired_read_errors_total") == 1


def test_a_client_that_leaves_is_forgotten(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 900, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    for _ in range(3):
        with socket.create_connection((host, int(port))) as s:
            s.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            time.sleep(0.05)
    assert server.complete()[0] == 200


def test_pages_outlive_the_server_and_say_that_it_is_gone(server: Server) -> None:
    """Last: stops the server."""
    alive = list(iter_stats(server.state / "stats"))
    assert sorted(page.kind for page in alive) == ["front", "rank"]
    assert all(page.alive for page in alive)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(timeout=60)
    end = time.monotonic() + 30
    while any(p.alive for p in iter_stats(server.state / "stats")) and time.monotonic() < end:
        time.sleep(0.2)
    dead = {page.kind: page for page in iter_stats(server.state / "stats")}
    assert not any(page.alive for page in dead.values())
    assert dead["rank"].scalar("prefill_tokens_vote") > 0
    assert sum(dead["front"].arrays["ttft_count"]) > 10


def test_a_bad_setting_ends_the_start_with_one_clear_line(
    tiny_model: Path, clean_environment: Callable[[dict[str, str]], dict[str, str]]
) -> None:
    env = clean_environment({**ENGINE, "VLLM_BLASST_MAG": "lots"})
    done = subprocess.run(
        command(tiny_model, free_port()),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    last = [line for line in done.stdout.splitlines() if line.strip()][-1]
    assert last.startswith(
        "blasst: error: VLLM_BLASST_MAG: mag 'lots' is not a number; give one such as 2500"
    )
    assert "Traceback" not in done.stdout
