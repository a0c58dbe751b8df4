"""The commands of Compose, executed: engine and sidecar as written, paths and port aside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from blasst.deploy.drills.processes import Service, free_port

MAKE_MODEL = Path(__file__).parents[1] / "plugin" / "scripts" / "make_model.py"
KEY = "k" * 32
READY_S = 400
ONLY_HERE = {
    # A small cache, and no other host than this one: the container has its own network.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE_ONLY_HERE = ("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager")


@pytest.fixture
def variables(tmp_path):
    """What docs/operate.md exports."""
    folders = {"BLASST_STATE_DIR": tmp_path / "state", "BLASST_MODEL_DIR": tmp_path / "tiny"}
    folders["BLASST_STATE_DIR"].mkdir(mode=0o700)
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, MAKE_MODEL, folders["BLASST_MODEL_DIR"]]
    subprocess.run(command, check=True, env=env, timeout=120)
    for number, name in enumerate(("write", "read")):
        (tmp_path / f"{name}.token").write_text(f"{number}" * 64)
        (tmp_path / f"{name}.token").chmod(0o600)
    return {**folders, "VLLM_API_KEY": KEY, "VLLM_BLASST_MIN_CONTEXT": "64"}


def service(name, compose, entry, places, variables, probe, log, more=()):
    """One service of Compose as a process; `places`: what stands for another path or port here."""

    def here(word):
        word = re.sub(
            r"\$\{(\w+)(?::?[-?]([^}]*))?\}", lambda m: str(variables.get(m[1], m[2])), word
        )
        for old, new in places.items():
            word = re.sub(rf"(^|:){re.escape(old)}(?=$|/)", lambda m, n=new: m[1] + str(n), word)
        return word

    given = compose["services"][name]
    words = [here(w) for w in (*entry, *given["command"])]
    words[0] = str(Path(sys.executable).with_name(words[0]))
    env = {k: here(v) for k, v in given["environment"].items()}
    return Service(name, [*words, *more], {**env, **ONLY_HERE}, probe, log)


def ask(url, body=None, key=None):
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()


@pytest.mark.vllm
@pytest.mark.slow
def test_engine_and_sidecar_of_compose_serve(entry, load, variables, tmp_path):
    (compose,) = load("compose/compose.yaml")
    port, control = free_port(), free_port()
    state = variables["BLASST_STATE_DIR"]
    tokens = {f"/run/secrets/{n}_token": tmp_path / f"{n}.token" for n in ("write", "read")}
    sidecar = service(
        *("sidecar", compose, entry("sidecar")),
        {"/state": state, **tokens},
        variables,
        f"http://127.0.0.1:{control}/readyz",
        tmp_path / "sidecar.log",
        ("--port", str(control)),
    )
    engine = service(
        *("engine", compose, entry("engine-cpu")),
        {
            "/tmp": tmp_path / "tmp",
            "/state": state,
            "/model": variables["BLASST_MODEL_DIR"],
            "8000": port,
        },
        variables,
        f"http://127.0.0.1:{port}/health",
        tmp_path / "engine.log",
        ENGINE_ONLY_HERE,
    )
    try:
        sidecar.wait_ready(READY_S)
        engine.wait_ready(READY_S)
        url, prompt = f"http://127.0.0.1:{port}/v1/completions", "abcdefgh" * 100
        body = {"model": "model", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        assert ask(url, body)[0] == 401
        assert ask(url, body, KEY)[0] == 200
        change = ["threshold", "set", "--mag", "2000", "--wait", "20", "--reason", "try"]
        change += ["--token-file", str(tmp_path / "write.token")]
        change += ["--url", f"http://127.0.0.1:{control}"]
        blasst = Path(sys.executable).with_name("blasst")
        done = subprocess.run([blasst, *change], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert ask(url, body, KEY)[0] == 200
        deadline = time.monotonic() + 20
        pattern = re.compile(rb'^blasst_prefill_tokens_total\{.*path="vote".*\} (\S+)$', re.M)
        while True:
            found = pattern.search(ask(f"http://127.0.0.1:{control}/metrics")[1])
            if found and float(found[1]) >= len(prompt):
                break
            assert time.monotonic() < deadline
            time.sleep(0.2)
        healthy = compose["services"]["engine"]["healthcheck"]["test"]
        code = healthy[-1].replace(":8000/", f":{port}/")
        assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
        broken = code.replace("/health", "/nothing")
        command = [sys.executable, "-c", broken]
        assert subprocess.run(command, timeout=30, capture_output=True).returncode != 0
        assert engine.ended_unasked == sidecar.ended_unasked == 0
    finally:
        engine.stop()
        sidecar.stop()
