"""`blasst serve` around a fake vLLM: what it starts, refuses, forwards, and leaves behind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from blasst.kernels.exchange.desired import (
    FILE_NAME,
    DesiredState,
    read_desired,
    write_desired,
)
from blasst.kernels.threshold import SkipThreshold

FAKE_VLLM = """
    import json, os, signal, subprocess, sys, time
    mode = os.environ["FAKE_MODE"]
    if mode == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    def leave(number, frame):
        if mode == "clean":
            worker.kill()
        print("got", signal.Signals(number).name, flush=True)
        sys.exit(0)
    if mode != "stubborn":
        signal.signal(signal.SIGINT, leave)
        signal.signal(signal.SIGTERM, leave)
    ignore = mode in ("stubborn", "stubborn_worker")
    code = f"import signal as s, time; {ignore} and s.signal(s.SIGTERM, s.SIG_IGN)"
    code += "; print(flush=True); time.sleep(600)"
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    worker.stdout.readline()
    record = {"argv": sys.argv[1:], "pid": os.getpid(), "worker": worker.pid}
    record["env"] = dict(os.environ)
    path = os.environ["FAKE_RECORD"]
    with open(path + ".part", "w") as f:
        json.dump(record, f)
    os.replace(path + ".part", path)
    if mode in ("dies", "ends"):
        sys.exit(7 if mode == "dies" else 0)
    if mode == "segfaults":
        os.kill(os.getpid(), signal.SIGSEGV)
    while True:
        time.sleep(0.05)
"""


class Served:
    def __init__(self, process, record):
        self.process = process
        self._record = record

    @property
    def popen(self):
        return self.process.popen

    def record(self):
        deadline = time.monotonic() + 20
        while not self._record.exists():
            assert self.popen.poll() is None, self.process.err.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return json.loads(self._record.read_text())

    def ready(self):
        """Both run, and the fake vLLM has its signal handlers."""
        self.record()
        self.process.url()

    def assert_nothing_left(self):
        record = json.loads(self._record.read_text())
        for pid in (record["pid"], record["worker"]):
            assert not alive(pid), pid


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def serve(blasst, tmp_path, model, port):
    script = tmp_path / "fake_vllm.py"
    script.write_text(textwrap.dedent(FAKE_VLLM))
    record = tmp_path / "record.json"

    def start(*arguments, mode="clean", model=model, state=tmp_path / "state", **how):
        record.unlink(missing_ok=True)
        process = blasst(
            *("serve", model, "--port", port, "--sidecar-port", 0, "--state-dir", state),
            *("--vllm-command", f"{sys.executable} {script}", *arguments),
            env={"FAKE_MODE": mode, "FAKE_RECORD": str(record), **how.pop("env", {})},
            **how,
        )
        return Served(process, record)

    yield start
    if record.exists():
        left = json.loads(record.read_text())
        for pid in (left["pid"], left["worker"]):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_arguments_environment_and_initial_threshold(serve, connect, tmp_path, model, port):
    served = serve(
        *("--mag", 2500, "--min-context", 1024, "--strict", "--share-prefix-cache"),
        *("--impl", "reference", "--dtype", "float32", "-tp", "2", "--max-model-len=2048"),
    )
    record = served.record()
    assert record["argv"] == [
        *("serve", str(model), "--attention-backend", "blasst", "--port", str(port)),
        *("--dtype", "float32", "-tp", "2", "--max-model-len=2048"),
    ]
    env = record["env"]
    assert env["VLLM_BLASST_STATE_DIR"] == str(tmp_path / "state")
    assert env["VLLM_BLASST_MIN_CONTEXT"] == "1024"
    assert env["VLLM_BLASST_STRICT"] == env["VLLM_BLASST_SHARE_PREFIX_CACHE"] == "1"
    assert env["VLLM_BLASST_IMPL"] == "reference"
    assert env["PYTHONSAFEPATH"] == "1"
    client = connect(served.process.url())
    assert client.get("/v1/blasst/threshold").json()["mag"] == 2500
    assert read_desired(tmp_path / "state" / FILE_NAME).updated_by == "blasst serve"
    served.popen.send_signal(signal.SIGINT)
    assert served.process.wait() == 0
    assert "got SIGINT" in served.process.out.read_text()
    served.assert_nothing_left()


def test_settings_that_were_not_given_are_not_set(serve, tmp_path):
    state = os.path.relpath(tmp_path / "state")
    served = serve(state=state, env={"VLLM_BLASST_MIN_CONTEXT": "77"})
    env = served.record()["env"]
    assert env["VLLM_BLASST_STATE_DIR"] == str(tmp_path / "state")
    assert env["VLLM_BLASST_MIN_CONTEXT"] == "77"
    given = {name for name in env if name.startswith("VLLM_BLASST_")}
    assert given == {"VLLM_BLASST_STATE_DIR", "VLLM_BLASST_MIN_CONTEXT"}


def test_a_restart_with_the_same_threshold_is_no_new_generation(serve, tmp_path):
    for _ in range(2):
        served = serve("--skip-lambda", 0.1)
        served.ready()
        served.popen.terminate()
        assert served.process.wait() == 0
        assert read_desired(tmp_path / "state" / FILE_NAME).generation == 1


def run_once(serve, *arguments):
    served = serve(*arguments)
    served.ready()
    served.popen.terminate()
    assert served.process.wait() == 0
    return served.process.out.read_text()


def test_what_is_in_force_is_said_at_the_start(serve, tmp_path):
    assert "threshold" not in run_once(serve)
    out = run_once(serve, "--mag", 2500)
    assert "threshold mag 2500, generation 1\n" in out
    out = run_once(serve)
    assert "threshold mag 2500, generation 1, as an earlier run left it\n" in out
    (tmp_path / "state" / FILE_NAME).write_text("{")
    out = run_once(serve)
    assert f"threshold unknown: {FILE_NAME} is not JSON" in out
    assert "blasst threshold set --mag N --force" in out
    for _ in range(2):
        assert "threshold scale 500, generation 2\n" in run_once(serve, "--scale", 500)
    out = run_once(serve, "--schedule", "16k=off,rest=mag:4500")
    assert "threshold dense to 16384 tokens, mag 4500 above, generation 3\n" in out


def test_what_the_canary_made_of_the_given_threshold_outlives_a_restart(serve, tmp_path):
    (tmp_path / "prompts").write_text('{"prompt": "x"}\n')
    plan = tmp_path / "plan.toml"
    plan.write_text('prompts = "prompts"\ninterval_s = 3600\n')
    (tmp_path / "state").mkdir()
    raised = DesiredState(5, SkipThreshold("mag", 3000), origin="canary: raised from mag 2500")
    write_desired(tmp_path / "state", raised)
    out = run_once(serve, "--mag", 2500, "--canary", plan)
    assert "threshold mag 3000, generation 5: the canary raised it\n" in out
    assert read_desired(tmp_path / "state" / FILE_NAME) == raised
    assert "threshold mag 4500, generation 6\n" in run_once(serve, "--mag", 4500, "--canary", plan)
    write_desired(tmp_path / "state", dataclasses.replace(raised, generation=7))
    # Without a canary the command line rules as ever.
    assert "threshold mag 2500, generation 8\n" in run_once(serve, "--mag", 2500)


def test_a_given_min_context_rules_over_an_earlier_one(serve, tmp_path):
    kept = DesiredState(5, SkipThreshold("mag", 2500), min_context=16384)
    (tmp_path / "state").mkdir()
    write_desired(tmp_path / "state", kept)
    run_once(serve)
    assert read_desired(tmp_path / "state" / FILE_NAME) == kept
    run_once(serve, "--min-context", 1024)
    now = read_desired(tmp_path / "state" / FILE_NAME)
    assert (now.generation, now.threshold, now.min_context) == (6, kept.threshold, None)


@pytest.mark.parametrize(
    ("number", "mode"),
    [
        (signal.SIGINT, "stubborn_worker"),
        (signal.SIGTERM, "leaves_a_worker"),
        (signal.SIGHUP, "leaves_a_worker"),
    ],
)
def test_stop_signals_reach_vllm_and_its_leftovers_are_killed(serve, number, mode):
    served = serve(mode=mode)
    served.ready()
    began = time.monotonic()
    served.popen.send_signal(number)
    assert served.process.wait() == 0
    assert time.monotonic() - began < 20
    expected = "SIGTERM" if number == signal.SIGHUP else signal.Signals(number).name
    assert f"got {expected}" in served.process.out.read_text()
    served.assert_nothing_left()


def test_a_vllm_that_ignores_signals_is_killed_in_time(serve):
    served = serve("--stop-timeout", 1, mode="stubborn")
    served.ready()
    began = time.monotonic()
    served.popen.send_signal(signal.SIGINT)
    assert served.process.wait() == 128 + signal.SIGKILL
    assert 1 <= time.monotonic() - began < 20
    served.assert_nothing_left()


def test_a_second_signal_does_not_wait(serve):
    served = serve("--stop-timeout", 600, mode="stubborn")
    served.ready()
    served.popen.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert served.popen.poll() is None
    served.popen.send_signal(signal.SIGINT)
    assert served.process.wait(20) == 128 + signal.SIGKILL
    served.assert_nothing_left()


@pytest.mark.parametrize(
    ("mode", "code", "ours"),
    [("dies", 7, 7), ("segfaults", 128 + signal.SIGSEGV, 128 + signal.SIGSEGV), ("ends", 0, 1)],
)
def test_the_death_of_vllm_stops_all_and_is_a_failure(serve, mode, code, ours):
    served = serve(mode=mode)
    assert served.process.wait() == ours
    assert f"ended by itself with exit code {code}" in served.process.error()
    served.assert_nothing_left()


def test_vllm_does_not_outlive_a_killed_supervisor(serve):
    served = serve()
    record = served.record()
    served.ready()
    served.popen.kill()
    deadline = time.monotonic() + 10
    while alive(record["pid"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


NEVER_REAPS = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)
child = subprocess.Popen(sys.argv[1:])
print("supervisor", child.pid, flush=True)
sys.exit(child.wait())
"""


@pytest.mark.parametrize("ends", [True, False])
def test_a_pid_1_that_reaps_nobody_does_not_hold_the_end_up(serve, blasst, ends):
    """As below `docker exec` in a container of `sleep infinity`: its zombies stay for good."""
    served = serve(mode="dies" if ends else "leaves_a_worker", below=NEVER_REAPS)
    served.ready()
    if not ends:
        os.kill(int(served.process.output(r"supervisor (\d+)")[1]), signal.SIGTERM)
    assert served.process.wait(20) == (7 if ends else 0)
    served.assert_nothing_left()


def test_a_process_that_nothing_ends_does_not_hold_the_end_up():
    code = (
        "from blasst.server import supervisor\n"
        "supervisor._GIVE_UP_S = 0.3\n"
        "supervisor.os.killpg = lambda *_: None\n"
        "raise SystemExit(supervisor.Supervisor(['sh', '-c', 'exit 3'], {}, 1).wait())"
    )
    assert (
        subprocess.run([sys.executable, "-P", "-c", code], timeout=30, check=False).returncode == 3
    )


def test_the_death_of_the_sidecar_stops_vllm_and_is_a_failure(serve, tmp_path):
    folder = tmp_path / "patched"
    folder.mkdir()
    code = """
        import threading, uvicorn
        serve = uvicorn.Server.run
        def run(self, sockets):
            threading.Timer(2, setattr, (self, "should_exit", True)).start()
            serve(self, sockets)
        uvicorn.Server.run = run
    """
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
    served = serve(mode="leaves_a_worker", env={"PYTHONPATH": str(folder)})
    assert served.process.wait() == 1
    assert "the sidecar stopped by itself, so vLLM was stopped too" in served.process.error()
    assert "got SIGTERM" in served.process.out.read_text()
    served.assert_nothing_left()


def test_a_vllm_that_cannot_be_started_is_one_line(serve):
    served = serve("--vllm-command", "/nonexistent/vllm")
    assert served.process.wait() == 2
    assert "/nonexistent/vllm cannot be started: No such file" in served.process.error()
