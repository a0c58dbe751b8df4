"""Schemathesis against a real sidecar over its socket: what OpenAPI promises is what it answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blasst.server import app
from blasst.server.limits import Bucket, Buckets, Limits
from blasst.server.settings import Settings
from blasst.server.sidecar import Sidecar

CONFIG = Path(__file__).with_name("schemathesis.toml")
HOOKS = str(Path(__file__).with_name("schemathesis_hooks.py"))
TOKEN = "0123456789abcdef" * 2
EXAMPLES = int(os.environ.get("BLASST_SCHEMATHESIS_EXAMPLES", "40"))
"""Per operation; the table in docs/measurements/drills.md says with how many it was made."""


@pytest.fixture(scope="module")
def schemathesis():
    found = Path(sys.executable).with_name("schemathesis")
    for path in (Path(sys.prefix) / "schemathesis" / "bin" / "schemathesis", found):
        if path.exists():
            return path
    pytest.skip("no schemathesis here (make test installs it: .ci/schemathesis)")


@pytest.fixture
def sidecar(tmp_path, monkeypatch):
    """With a token, and without rate limits, which would answer most of a fuzzer."""
    endless = Limits(Bucket(1e9, 1e9), Bucket(1e9, 1e9), Buckets(1e9, 1e9))
    monkeypatch.setattr(app, "Limits", lambda: endless)
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    sidecar = Sidecar(Settings(tmp_path / "state", port=0, token_file=secret))
    sidecar.prepare(dead_pages_older_than_s=0)
    sidecar.start()
    yield sidecar
    sidecar.stop()


def fuzz(program, url, folder, *more, config=CONFIG):
    command = [
        *(program, "--config-file", config, "run", f"{url}/openapi.json", "--checks", "all"),
        *("--max-examples", str(EXAMPLES), "--seed", "1", "--continue-on-failure", *more),
    ]
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60 + EXAMPLES,
        env={**os.environ, "SCHEMATHESIS_HOOKS": HOOKS, "NO_PROXY": "127.0.0.1", "COLUMNS": "100"},
    )


def test_every_answer_is_what_the_document_promises(schemathesis, sidecar, tmp_path):
    began = time.monotonic()
    done = fuzz(schemathesis, sidecar.url, tmp_path, "-H", f"Authorization: Bearer {TOKEN}")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    calls = int(re.findall(r"(\d+) generated", done.stdout)[0])
    print(f"schemathesis: {calls} calls in {time.monotonic() - began:.0f} s")
    assert calls > 5 * EXAMPLES


def test_the_check_can_fail(schemathesis, sidecar, tmp_path):
    """Without our word on 412 it is called a fault."""
    (tmp_path / "empty.toml").write_text("")
    more = ("-H", f"Authorization: Bearer {TOKEN}", "--phases", "examples")
    done = fuzz(schemathesis, sidecar.url, tmp_path, *more, config=tmp_path / "empty.toml")
    assert done.returncode == 1, done.stdout[-3000:]
    assert "[412] Precondition Failed" in done.stdout
