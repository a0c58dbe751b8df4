"""`blasst serve` with a real vLLM: one life of a deployment, from the start to Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from blasst.kernels.exchange.stats import iter_stats

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MAKE_MODEL = Path(__file__).parents[1] / "plugin" / "scripts" / "make_model.py"
PROMPT_TOKENS = 1200
READY_S = 400.0
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "PYTHONSAFEPATH": "1",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    command = [sys.executable, MAKE_MODEL, folder]
    subprocess.run(command, check=True, env={**os.environ, **ENV}, timeout=120)
    return folder


def metrics(client):
    samples = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("blasst_"):
                key = (sample.name, *sorted(sample.labels.items()))
                samples[key] = sample.value
    return samples


def total(client, name, **labels):
    return sum(
        value
        for key, value in metrics(client).items()
        if key[0] == name and set(labels.items()) <= set(key[1:])
    )


def until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def group_members(pgid):
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == pgid and fields[0] != "Z":
            members.append(int(stat.parent.name))
    return members


def complete(client, text, **xargs):
    body = {"model": "tiny", "prompt": text, "max_tokens": 4, "temperature": 0}
    if xargs:
        body["vllm_xargs"] = xargs
    return client.post("/v1/completions", json=body)


def test_one_life_of_a_deployment(blasst, connect, model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    process = blasst(
        *("serve", model, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port),
        *("--sidecar-port", 0, "--state-dir", tmp_path / "state", "--min-context", 1000),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", 2048),
        env=ENV,
    )
    sidecar = connect(process.url())
    vllm = connect(f"http://127.0.0.1:{port}")

    def ready():
        assert process.popen.poll() is None, process.err.read_text()[-4000:]
        try:
            return vllm.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    until(ready, READY_S)
    (pgid,) = {
        os.getpgid(int(task))
        for task in Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children")
        .read_text()
        .split()
    }
    until(lambda: sidecar.get("/v1/blasst/threshold").json()["converged"])

    prompt = "".join(chr(97 + i % 26) for i in range(PROMPT_TOKENS))
    dense = complete(vllm, prompt)
    assert dense.status_code == 200, dense.text
    until(lambda: total(sidecar, "blasst_prefill_tokens_total", path="dense") >= PROMPT_TOKENS)
    assert total(sidecar, "blasst_tiles_visited_total") == 0

    change = sidecar.put("/v1/blasst/threshold", json={"mag": 2500}, headers={"if-match": '"0"'})
    assert change.json()["generation"] == 1
    until(lambda: sidecar.get("/v1/blasst/threshold").json()["converged"])
    assert complete(vllm, prompt).status_code == 200
    until(lambda: total(sidecar, "blasst_prefill_tokens_total", path="vote") >= PROMPT_TOKENS)

    visited = total(sidecar, "blasst_tiles_visited_total")
    skipped = total(sidecar, "blasst_tiles_skipped_total")
    assert visited > skipped > 0
    for layer in ("0", "1"):
        assert total(sidecar, "blasst_tiles_visited_total", layer=layer) == visited / 2
    assert total(vllm, "blasst_tiles_visited_total") == visited
    assert total(vllm, "blasst_tiles_skipped_total") == skipped
    ttft = "blasst_time_to_first_token_seconds_count"
    for client in (sidecar, vllm):
        for lambda_class in ("dense", "mag_2500_4499"):
            labels = {"lambda_class": lambda_class, "prompt_length_class": "le_2k"}
            assert total(client, ttft, **labels) == 1
    (front_end,) = sidecar.get("/v1/blasst/threshold").json()["front_ends"]
    assert (front_end["generation_read"], front_end["generation_stamped"]) == (1, 1)

    assert complete(vllm, prompt, blasst_mag="off").status_code == 200
    for bad in ({"blasst_mag": -1}, {"blasst_mag": "much"}, {"blasst_nothing": 1}):
        refused = complete(vllm, prompt, **bad)
        assert refused.status_code == 400, (bad, refused.text)
        assert "blasst" in refused.text
    until(lambda: total(sidecar, "blasst_requests_rejected_total") == 3)
    assert total(sidecar, "blasst_tiles_visited_total") == visited

    began = time.monotonic()
    process.popen.send_signal(signal.SIGINT)
    code = process.wait(60)
    assert time.monotonic() - began < 45
    assert code == 0, process.err.read_text()[-4000:]
    assert group_members(pgid) == []
    assert not any(page.alive for page in iter_stats(tmp_path / "state" / "stats"))
    with socket.create_server(("127.0.0.1", port)):
        pass
