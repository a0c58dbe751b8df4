"""A threshold that a file declares, such as a mounted ConfigMap: applied when it changes.

The file holds the body of a PUT. It rules at the start, whenever its content changes and over a
corrupt desired.json; a change through the API in between stays until then. It is read again and
again, not watched: mounts swap links beneath.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from pathlib import Path

from blasst.kernels.exchange.stats import open_now
from blasst.server.canary import raised_over
from blasst.server.change import parse_change
from blasst.server.control import ControlService, Wish
from blasst.server.problems import Problem

log = logging.getLogger("blasst.server")
_MAX_BYTES = 16 * 1024


class Follower:
    """Applies one file. error: why its last content is not in force; "" when it is."""

    def __init__(
        self,
        path: Path,
        control: ControlService,
        interval_s: float = 2.0,
        keep_raised: bool = False,
    ) -> None:
        """keep_raised: what the canary made of the file's threshold outlives a restart."""
        self.path = path
        self.error = ""
        self._control = control
        self._interval_s = interval_s
        self._keep_raised = keep_raised
        self._applied = b""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)

    def start(self) -> None:
        """The file's threshold is in force on return, if it is a good one."""
        self.step()
        self._thread.start()

    def stop(self) -> None:
        """Safe to call twice, and before start."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def step(self) -> None:
        """Look once. A failure is logged once and tried again at every look."""
        try:
            body = self._read()
            digest = hashlib.sha256(body).digest()
            # A corrupt or lost desired.json is repaired with what is declared here.
            if digest != self._applied or self._control.error():
                self._apply(body)
                self._applied = digest
        except OSError as e:
            self._fail(f"{self.path} cannot be read: {e.strerror}")
        except Problem as e:
            self._fail(f"{self.path}: {e.detail}")
        else:
            self.error = ""

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.step()

    def _read(self) -> bytes:
        with open(self.path, "rb", buffering=0, opener=open_now) as f:
            return f.read(_MAX_BYTES + 1) or b""

    def _apply(self, body: bytes) -> None:
        change, threshold = parse_change(body[: _MAX_BYTES + 1], "application/json")
        if "target_skip_rate" in change.model_fields_set:
            raise Problem(
                422, "bad-threshold", "a file cannot ask for a target_skip_rate; give mag or scale"
            )
        if self._keep_raised and not self._applied and not self._control.error():
            now = self._control.read()
            if raised_over(now, threshold, change.min_context):
                log.warning("%s: the canary raised it to %s, which stays", self.path, now.threshold)
                return
        by = f"file {self.path.name}"
        state = self._control.set(Wish(threshold, change.min_context, change.reason, by), "*")
        log.warning("%s is in force: generation %d", self.path, state.generation)

    def _fail(self, error: str) -> None:
        if error != self.error:
            log.error("the threshold stays as it is: %s", error)
            self._control.tally.error("followed-file", error)
        self.error = error
