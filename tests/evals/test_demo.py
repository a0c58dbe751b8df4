"""The demo against a fake `blasst serve`: it finishes, and leaves no process in any case."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from blasst.evals.deployment import Deployment, descendants, free_ports
from blasst.evals.errors import ServerError

FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def pid_file(tmp_path: Path) -> Path:
    return tmp_path / "pids"


def fake_command(pid_file: Path, *faults: str) -> str:
    words = [sys.executable, str(FAKE), "--pid-file", str(pid_file)]
    return shlex.join([*words, *(x for fault in faults for x in ("--fault", fault))])


def start(tmp_path: Path, command: str, *options: str) -> subprocess.Popen[str]:
    blasst = str(Path(sys.executable).with_name("blasst"))
    words = [blasst, "demo", "--serve-command", command, "--out", str(tmp_path / "out")]
    words += ["--lengths", "1024", *options]
    env = dict(os.environ) | {"TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=env)


def check_all_gone(pid_file: Path, tmp_path: Path) -> None:
    pids = [int(word) for word in pid_file.read_text().split()]
    assert len(pids) == 2
    alive = [pid for pid in pids if runs(pid)]
    assert not alive
    assert not list(tmp_path.glob("blasst-demo-*"))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_demo_shows_everything_and_writes_the_report(tmp_path: Path, pid_file: Path) -> None:
    process = start(tmp_path, fake_command(pid_file), "--minutes", "2", "--json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    cells = json.loads(out)["cells"]
    assert len(cells) == 9
    assert all(cell["samples"] == 2 for cell in cells)
    assert {cell["mag"] for cell in cells} == {None, 4500, 1500}
    for words in (
        "starting the server",
        "load average",
        "dense      time to first token",
        "dense -> MAG 1500: in force for every new request after",
        "vllm_xargs {'blasst_mag': 1500.0}",
        "up to 2 samples each",
        "18/18",
    ):
        assert words in err
    assert "left out" not in err
    assert "blasst: what" not in err
    names = {"index.html", "report.md", "results.jsonl", "serve.log"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names
    check_all_gone(pid_file, tmp_path)


def test_what_does_not_fit_the_time_is_left_out_whole(tmp_path: Path, pid_file: Path) -> None:
    process = start(tmp_path, fake_command(pid_file), "--minutes", "0.01")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert (
        "the time is up; left out: niah_multivalue at 1024, vt at 1024; 1 sample instead of 2: "
        "niah_single_2 at 1024" in err
    )
    rows = [line.split() for line in out.splitlines() if "niah" in line or " vt " in line]
    assert [row[4] for row in rows[:9]] == ["1"] * 3 + ["0"] * 6
    for text in (out, (tmp_path / "out" / "report.md").read_text()):
        assert "niah_single_2 scores 0 without a threshold too: read its gold NLL." in text
        assert "1 sample a cell: this shows that it works, not how accurate it is." in text
        assert "docs/measurements/cpu-attention.md" in text
    check_all_gone(pid_file, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(number: signal.Signals, tmp_path: Path, pid_file: Path) -> None:
    (tmp_path / "out").mkdir()
    earlier = {tmp_path / "out" / n: n for n in ("index.html", "report.md", "results.jsonl")}
    for path, text in earlier.items():
        path.write_text(text)
    process = start(tmp_path, fake_command(pid_file))
    results = tmp_path / "out" / "unfinished" / "results.jsonl"
    wait_for(lambda: results.exists() and results.read_bytes().count(b"\n") > 2, process)
    process.send_signal(number)
    time.sleep(0.05)
    process.send_signal(number)  # an impatient second one
    _, err = process.communicate(timeout=40)
    assert process.returncode == 130
    assert "everything that was started is stopped" in err
    assert f"what this run wrote is in {results.parent}; an earlier report" in err
    assert {path: path.read_text() for path in earlier} == earlier
    check_all_gone(pid_file, tmp_path)


def test_a_failing_check_stops_everything(tmp_path: Path, pid_file: Path) -> None:
    process = start(tmp_path, fake_command(pid_file, "ignores-threshold", "leaves-orphans"))
    _, err = process.communicate(timeout=40)
    assert process.returncode == 1
    assert "blasst: error:" in err
    assert "ignores the threshold" in err
    check_all_gone(pid_file, tmp_path)


def test_a_server_that_dies_is_one_line_with_its_last_words(tmp_path: Path, pid_file: Path) -> None:
    process = start(tmp_path, fake_command(pid_file, "dies"))
    _, err = process.communicate(timeout=40)
    assert process.returncode == 1
    last = err.splitlines()[-1]
    assert last.startswith(
        "blasst: error: the server ended with code 1: fake: Error: no such model (see "
    )
    assert "no such model" in (tmp_path / "out" / "unfinished" / "serve.log").read_text()


def test_a_command_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    process = start(tmp_path, "/nowhere/blasst serve")
    _, err = process.communicate(timeout=40)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("blasst: error: /nowhere/blasst cannot be started")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "99"], "length 99 is outside"),
        (["--mag", "-1"], "MAG -1"),
        (["--minutes", "nan"], "minutes"),
    ],
)
def test_bad_options_start_nothing(options: list[str], message: str, tmp_path: Path) -> None:
    process = start(tmp_path, "/nowhere", *options)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 2
    assert message in err
    assert "starting" not in err


def test_stubborn_processes_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blasst.evals.deployment._STOP_S", 0.5)
    program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if len(sys.argv) < 3: subprocess.Popen([sys.executable, __file__, 'x', 'y', 'z'])\n"
        "time.sleep(600)\n"
    )
    file = tmp_path / "stubborn.py"
    file.write_text(program.replace("len(sys.argv) < 3", "'--port' in sys.argv"))
    said: list[str] = []
    command = [sys.executable, str(file)]
    deployment = Deployment(command, tmp_path / "log", said.append, ready_s=1.0)
    with pytest.raises(ServerError, match="not ready after 1 s"), deployment:
        pass
    assert not descendants(os.getpid())
    assert not deployment.folder.exists()


def test_free_ports_differ() -> None:
    assert len(set(free_ports(5))) == 5
