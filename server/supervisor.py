"""One child command in a process group of its own: started, signalled, and surely ended.

The group outlives no one: it is killed when the command ends and when time to stop is up, and the
kernel sends the command SIGTERM if this process dies without a chance to.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import FrameType

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_STRAGGLERS_S = 2.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Runs one command to its end. stop_timeout_s: from the first stop signal until SIGKILL."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], stop_timeout_s: float
    ) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._signals: list[int] = []
        self._stop_at: float | None = None
        for number in _STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        libc = ctypes.CDLL(None, use_errno=True)
        # Nothing of Python may run between fork and exec when threads exist: start the command
        # before any of them.
        self._child = subprocess.Popen(
            command,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )

    def wait(self) -> int:
        """The command's exit code (128 + number, if a signal ended it), its group being gone."""
        while self._child.poll() is None:
            self._pass_on()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_POLL_S)
        self.end()
        code: int = self._child.returncode
        return 128 - code if code < 0 else code

    @property
    def stopping(self) -> bool:
        return self._stop_at is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _pass_on(self) -> None:
        """The first signal goes on as it is; a second one, or the end of patience, kills."""
        now = time.monotonic()
        while self._signals:
            number = self._signals.pop(0)
            if self._stop_at is None:
                self._stop_at = now + self._stop_timeout_s
                self._child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
            else:
                self._stop_at = now
        if self._stop_at is not None and now >= self._stop_at:
            self._signal_group(signal.SIGKILL)

    def end(self) -> None:
        """End whatever of the group is left. Safe to call twice."""
        if self._child.poll() is None:
            self._signal_group(signal.SIGKILL)
            self._child.wait()
        # The command's own children get a moment to end by themselves.
        deadline = time.monotonic() + _STRAGGLERS_S
        while self._signal_group(0):
            if time.monotonic() >= deadline:
                self._signal_group(signal.SIGKILL)
                break
            time.sleep(_POLL_S)

    def _signal_group(self, number: int) -> bool:
        """Whether there was anybody left to signal."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)
            return True
        return False
