"""A sidecar and a vLLM as an orchestrator runs them: found, killed, and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROLES = ("api server", "engine core", "worker")
_TITLES = {"engine core": "VLLM::EngineCore", "worker": "VLLM::Worker"}
_POLL_S = 0.05
_HEALTH_EVERY_S = 1.0
_FAILURES = 3
"""So many health checks in a row fail before the orchestrator kills a process that still runs."""
_GIVE_UP_AFTER = 2
"""Ends that nobody asked for."""


@dataclass
class Outage:
    """One kill and what came of it; times of the monotonic clock, 0.0 = not yet."""

    role: str
    killed_at: float
    ended_at: float = 0.0
    ready_at: float = 0.0
    left_over: int = 0

    @property
    def recovery_s(self) -> float:
        """Seconds from the kill until it served again."""
        return self.ready_at - self.killed_at


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


def answers(url: str, timeout_s: float = 5.0) -> bool:
    """Whether a GET is answered with 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def memory_and_files(pid: int) -> tuple[float, int]:
    """Resident memory in MiB and open file descriptors."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))


class Service:
    """One command that is started again whenever it ends, until `stop`. Thread-safe.

    probe: address that answers 200 when the command is ready; its health while it runs.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], probe: str, log: Path
    ) -> None:
        self.name = name
        self._command, self._env, self._probe, self._log = command, env, probe, log
        self._stop = threading.Event()
        self._ready = threading.Event()
        self.outages: list[Outage] = []
        self.ended_unasked = 0
        self._popen = self._start()
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Raises TimeoutError with the end of the log; soon, if it only ever ends."""
        deadline = time.monotonic() + timeout_s
        while not self._ready.wait(0.5):
            if time.monotonic() > deadline or self.ended_unasked > _GIVE_UP_AFTER:
                end = self._log.read_text(errors="replace")[-2000:]
                raise TimeoutError(f"{self.name} does not come up: {end}")

    @property
    def ready(self) -> bool:
        """It answered its health check since it was started last."""
        return self._ready.is_set()

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._popen.pid

    def kill(self, role: str = "") -> bool:
        """SIGKILL one process; False: there is none of that role now."""
        pid = self.find(role) if role in _TITLES else self._popen.pid
        if pid is None or self._popen.poll() is not None:
            return False
        self.outages.append(Outage(role or self.name, time.monotonic()))
        self._ready.clear()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    def find(self, role: str) -> int | None:
        """The process of this role among the descendants; "api server" is the command itself."""
        if role not in _TITLES:
            return self._popen.pid
        for pid in _group(self._popen.pid):
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if title.startswith(_TITLES[role]):
                    return pid
        return None

    def stop(self) -> None:
        """End it and its children for good."""
        self._stop.set()
        self._thread.join(30)
        _end_group(self._popen, signal.SIGTERM)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                env={**os.environ, **self._env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _watch(self) -> None:
        """Restart at the end; kill what runs and does not answer; say when it is ready."""
        failures, next_check = 0, 0.0
        while not self._stop.wait(_POLL_S):
            outage = self.outages[-1] if self.outages else None
            if self._popen.poll() is not None:
                if outage is not None and not outage.ended_at:
                    outage.ended_at = time.monotonic()
                    outage.left_over = len(_group(self._popen.pid))
                else:
                    self.ended_unasked += 1
                self._ready.clear()
                _end_group(self._popen, signal.SIGKILL)
                failures, self._popen = 0, self._start()
            elif self._ready.is_set() or (outage is not None and not outage.ended_at):
                if time.monotonic() >= next_check:
                    failures = 0 if answers(self._probe) else failures + 1
                    next_check = time.monotonic() + _HEALTH_EVERY_S
                    if failures >= _FAILURES:
                        self._popen.kill()
            elif answers(self._probe):
                if outage is not None and not outage.ready_at:
                    outage.ready_at = time.monotonic()
                failures = 0
                self._ready.set()


def _group(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


def _end_group(popen: subprocess.Popen[bytes], number: int) -> None:
    """As a container ends: all of it is gone when this returns."""
    deadline = time.monotonic() + (20.0 if number == signal.SIGTERM else 0.0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(popen.pid, number)
    while left := _group(popen.pid):
        if time.monotonic() >= deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        popen.poll()
        time.sleep(_POLL_S)
    popen.wait()


def sidecar(state: Path, port: int, log: Path, env: Mapping[str, str] | None = None) -> Service:
    """`blasst sidecar` on this state folder."""
    command = [str(Path(sys.executable).with_name("blasst")), "sidecar"]
    command += ["--state-dir", str(state), "--port", str(port)]
    return Service("sidecar", command, env or {}, f"http://127.0.0.1:{port}/readyz", log)


def engine(
    model: Path, port: int, env: Mapping[str, str], log: Path, options: Sequence[str]
) -> Service:
    """`vllm serve` with the blasst backend, served as "drill"."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
    command += ["--attention-backend", "blasst", "--served-model-name", "drill"]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    return Service("api server", command, env, f"http://127.0.0.1:{port}/health", log)
