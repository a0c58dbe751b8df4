"""A `blasst serve` of our own for a while: started, waited for, and surely stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from blasst.evals.errors import ServerError
from blasst.evals.packages import Say

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",
    "VLLM_BLASST_STATS_INTERVAL_S": "0.2",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # vLLM keeps one core free by default: half of a small machine.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Defaults of the server's environment; the caller's own settings go first."""
_SERVE_STOP_S = 8
"""What `blasst serve` gives vLLM: there is nothing to save."""
_STOP_S = _SERVE_STOP_S + 12.0
_ORPHANS_S = 3.0
"""For what is left when the command itself has ended."""
_POLL_S = 0.1
_SAY_EVERY_S = 5.0


class Deployment:
    """A context manager. `command` is `blasst serve` with its options; ports and the state folder
    are added here. `log`: file for what it says. Afterwards no process that it started is left,
    whatever happened inside."""

    def __init__(self, command: Sequence[str], log: Path, say: Say, ready_s: float = 300.0) -> None:
        self._command, self._say, self._ready_s = list(command), say, ready_s
        self.folder = Path(tempfile.mkdtemp(prefix="blasst-demo-"))
        self.log = log
        self.url, self.sidecar_url = "", ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Deployment:
        try:
            self._start()
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _start(self) -> None:
        port, sidecar_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self.sidecar_url = f"http://127.0.0.1:{sidecar_port}"
        state = self.folder / "state"
        state.mkdir(mode=0o700)
        where = ["--host", "127.0.0.1", "--port", str(port), "--sidecar-port", str(sidecar_port)]
        where += ["--state-dir", str(state), "--stop-timeout", str(_SERVE_STOP_S)]
        with open(self.log, "wb") as log:
            try:
                # A session of its own: Ctrl-C reaches only us, and we stop it in order.
                self._process = subprocess.Popen(
                    [*self._command, *where],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_ENVIRONMENT | os.environ,
                    start_new_session=True,
                )
            except OSError as e:
                raise ServerError(f"{self._command[0]} cannot be started: {e.strerror}") from e

    def _wait_ready(self) -> None:
        import httpx

        process = self._process
        assert process is not None
        start = last = time.monotonic()
        with httpx.Client(timeout=5.0, trust_env=False) as http:
            waiting = [self.url + "/health", self.sidecar_url + "/readyz"]
            while waiting:
                if (code := process.poll()) is not None:
                    raise ServerError(f"the server ended with code {code}: {self._last_words()}")
                with contextlib.suppress(httpx.HTTPError):
                    if http.get(waiting[0]).status_code == 200:
                        waiting.pop(0)
                        continue
                now = time.monotonic()
                if now - start > self._ready_s:
                    raise ServerError(
                        f"the server is not ready after {self._ready_s:g} s: {self._last_words()}"
                    )
                if now - last >= _SAY_EVERY_S:
                    last = now
                    self._say(f"starting the server: {now - start:.0f} s")
                time.sleep(_POLL_S)
        self._say(f"server ready after {time.monotonic() - start:.0f} s: {self.url}")
        self._say(f"status page: {self.sidecar_url}/")

    def _last_words(self) -> str:
        """The last error line of the log, or its last line; and where the log is."""
        lines = [x.strip() for x in self.log.read_text("utf-8", "replace").splitlines()]
        lines = [x for x in lines if x] or ["(no output)"]
        errors = [x for x in lines if "rror" in x]
        return f"{(errors or lines)[-1][-300:]} (see {self.log})"

    def _stop(self) -> None:
        # A second Ctrl-C must not leave half of it running.
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [(number, signal.signal(number, signal.SIG_IGN)) for number in signals]
        try:
            if self._process is not None:
                stop_tree(self._process, _STOP_S)
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            for number, handler in before:
                signal.signal(number, handler)


def stop_tree(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """SIGTERM to the process; SIGKILL to it and all it started when that is not enough."""
    family = descendants(process.pid)
    if process.poll() is None:
        process.terminate()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        # Looked at again and again: an orphan is found only while its parent still runs.
        family |= descendants(process.pid)
        if process.poll() is not None:
            if not any(map(_same_process_runs, family)):
                return
            deadline = min(deadline, time.monotonic() + _ORPHANS_S)
        time.sleep(_POLL_S)
    for member in (*family, (process.pid, _started(process.pid))):
        if _same_process_runs(member):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member[0], signal.SIGKILL)
    process.wait()


Member = tuple[int, str]
"""A process id and when it started (clock ticks): ids are used again, pairs are not."""


def descendants(pid: int) -> set[Member]:
    """All processes below `pid` now, from /proc; empty where there is none."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[Member] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            found.add((child, _started(child)))
            todo.append(child)
    return found


def _same_process_runs(member: Member) -> bool:
    fields = _stat(member[0])
    return bool(fields) and fields[0] != "Z" and _started(member[0]) == member[1]


def _started(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now, all different."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            s = stack.enter_context(socket.socket())
            s.bind(("127.0.0.1", 0))
            ports.append(int(s.getsockname()[1]))
        return ports
