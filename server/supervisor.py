"""One child command in a process group of its own: started, signalled, and surely ended.

The group outlives no one: it is killed when the command ends and when time to stop is up, and the
kernel sends the command SIGTERM if this process dies without a chance to. Orphans of the command
come to us, not to a PID 1 that may never reap them: zombies would keep the group alive for good.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_STRAGGLERS_S = 2.0
_GIVE_UP_S = 30.0
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
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # Nothing of Python may run between fork and exec when threads exist: start the command
        # before any of them.
        self._child = subprocess.Popen(
            command,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )

    def wait(self, needed: Callable[[], bool] = lambda: True) -> int:
        """The command's exit code (128 + number, if a signal ended it), its group being gone.

        needed: asked all the time; at the first False the command is stopped as by SIGTERM.
        """
        while self._child.poll() is None:
            if not self._signals and not self.stopping and not needed():
                self._signals.append(signal.SIGTERM)
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
        # The command's own children get a moment to end in order.
        began = time.monotonic()
        number: int = signal.SIGTERM
        while self._signal_group(number):
            time.sleep(_POLL_S)
            self._reap_orphans()
            waited = time.monotonic() - began
            if waited > _GIVE_UP_S:
                # Not even SIGKILL ends a process that hangs in a driver.
                return
            number = 0 if waited < _STRAGGLERS_S else signal.SIGKILL

    def _reap_orphans(self) -> None:
        """Only once the command itself is waited for: its exit code must not be taken here."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self._child.pid, os.WNOHANG)[0]:
                pass

    def _signal_group(self, number: int) -> bool:
        """Whether there was anybody left to signal."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)
            return True
        return False
