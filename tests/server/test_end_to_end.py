"""`blasst serve` with a real vLLM: one life of a deployment, from the start to Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from blasst.kernels.exchange.layout import SERVED
from blasst.kernels.exchange.stats import iter_stats
from blasst.kernels.threshold import SkipThreshold
from blasst.server.canary import Canary
from blasst.server.canary_plan import Bounds, CanaryPlan
from blasst.server.control import ControlService, Wish
from blasst.server.probe import Endpoint, Prompt

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


def put(sidecar, body):
    answer = sidecar.put("/v1/blasst/threshold", json=body, headers={"if-match": "*"})
    assert answer.status_code in (200, 202), answer.text
    until(lambda: sidecar.get("/v1/blasst/threshold").json()["converged"])


def check_page_and_schedule(sidecar, vllm, prompt):
    """One port has vLLM's metrics, too; a prompt's length chooses its threshold."""
    text = sidecar.get("/metrics").text
    assert "vllm:time_to_first_token_seconds_count{" in text
    assert "blasst_upstream_up 1.0" in text
    names = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(names) == len(set(names))
    prefill = "blasst_prefill_seconds_count"
    assert total(vllm, prefill, lambda_class="mag_2500_4499") == 1
    assert total(sidecar, "blasst_layers", path="vote") == 2
    (rank,) = sidecar.get("/v1/blasst/status").json()["ranks"]
    assert (rank["geometry"], rank["generation_seen"]) == ("128x128", 1)
    assert sorted(rank["served"]) == sorted(SERVED)
    assert len(rank["served"]["weights"]) == 16
    assert rank["served"]["dtype"] == "float32"
    steps = [{"up_to": PROMPT_TOKENS - 100, "off": True}, {"mag": 7000}]
    put(sidecar, {"schedule": steps, "min_context": 100})
    admitted = "blasst_requests_admitted_total"
    before = total(sidecar, admitted, lambda_class="dense")
    assert complete(vllm, prompt[: PROMPT_TOKENS - 200]).status_code == 200
    assert complete(vllm, prompt).status_code == 200
    until(lambda: total(sidecar, admitted, lambda_class="mag_7000_9999") == 1)
    assert total(sidecar, admitted, lambda_class="dense") == before + 1
    until(lambda: sidecar.get("/v1/blasst/status").json()["ranks"][0]["generation_seen"] == 2)


def check_canary(sidecar, url, prompt, tmp_path):
    """Probes of a real engine: a lambda that skips nearly all is noticed, one that skips nothing
    is not."""
    folder = tmp_path / "canary"
    folder.mkdir()
    control = ControlService(folder)
    control.open()
    prompts = (Prompt(prompt), Prompt(prompt[::-1]))
    # A model of random weights: its answers hardly depend on what attention skips.
    bounds = Bounds(max_nll_increase=0.001)
    plan = CanaryPlan(prompts, Endpoint(url), bounds, min_probes=2, max_tokens=8)
    for threshold, stepped in ((SkipThreshold("lambda", 0.0), 0), (SkipThreshold("mag", 50), 1)):
        put(sidecar, {threshold.unit: threshold.value, "min_context": 100})
        control.set(Wish(threshold, 100), "*")
        canary = Canary(plan, control, lambda generation: True, lambda: 0)
        assert [canary.probe() for _ in range(2)] == ["ok", "ok"], canary.state().error
        state = canary.state()
        assert (state.steps, state.breached, state.noisy) == (stepped, stepped == 1, False), state
    assert control.read().threshold == SkipThreshold("mag", 550)
    control.close()


def check_dense_then_vote(sidecar, vllm, prompt):
    """One prompt before and after the first threshold; the tiles that it visited with a vote."""
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
    front_ends = sidecar.get("/v1/blasst/threshold").json()["front_ends"]
    assert [f["generation_read"] for f in front_ends] == [1, 1]
    assert max(f["generation_stamped"] for f in front_ends) == 1
    return visited


def test_one_life_of_a_deployment(blasst, connect, model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    process = blasst(
        *("serve", model, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port),
        *("--sidecar-port", 0, "--state-dir", tmp_path / "state", "--min-context", 1000),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", 2048, "--vllm-metrics"),
        # Whichever of the two answers: what it shows is of both.
        *("--api-server-count", 2),
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
    visited = check_dense_then_vote(sidecar, vllm, prompt)
    assert complete(vllm, prompt, blasst_mag="off").status_code == 200
    for bad in ({"blasst_mag": -1}, {"blasst_mag": "much"}, {"blasst_nothing": 1}):
        refused = complete(vllm, prompt, **bad)
        assert refused.status_code == 400, (bad, refused.text)
        assert "blasst" in refused.text
    until(lambda: total(sidecar, "blasst_requests_rejected_total") == 3)
    assert total(sidecar, "blasst_tiles_visited_total") == visited
    check_page_and_schedule(sidecar, vllm, prompt)
    check_canary(sidecar, f"http://127.0.0.1:{port}", prompt, tmp_path)

    began = time.monotonic()
    process.popen.send_signal(signal.SIGINT)
    code = process.wait(60)
    assert time.monotonic() - began < 45
    assert code == 0, process.err.read_text()[-4000:]
    assert group_members(pgid) == []
    assert not any(page.alive for page in iter_stats(tmp_path / "state" / "stats"))
    with socket.create_server(("127.0.0.1", port)):
        pass
