"""Statistics pages that dead processes left are removed after a day, also while we run on.

Until then they count, so that no counter falls when a worker is restarted.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from blasst.kernels.exchange.stats import remove_dead

DAY_S = 86_400.0
_EVERY_S = 600.0
log = logging.getLogger("blasst.server")


class Sweeper:
    """Of one folder of pages."""

    def __init__(
        self, folder: Path, older_than_s: float = DAY_S, every_s: float = _EVERY_S
    ) -> None:
        self._folder = folder
        self._older_than_s = older_than_s
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Safe to call twice, and before start."""
        self._stop.set()

    def sweep(self) -> list[str]:
        """The pages removed now."""
        removed = remove_dead(self._folder, self._older_than_s)
        if removed:
            log.warning("removed %d statistics pages of dead processes", len(removed))
        return removed

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.sweep()
