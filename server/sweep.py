"""Statistics pages that dead processes left are added up after a while, also while we run on."""

from __future__ import annotations

import logging
import threading

from blasst.kernels.exchange.layout import RETIRED
from blasst.kernels.exchange.pages import CachedPages
from blasst.kernels.exchange.retire import retire_dead
from blasst.kernels.exchange.stats import remove_dead

_DAY_S = 86_400.0
RETIRED_AFTER_S = 300.0
"""Until then the status shows who is gone."""

_EVERY_S = 60.0
log = logging.getLogger("blasst.server")


class Sweeper:
    """Of the folder of these pages; its owner holds the state folder's lock."""

    def __init__(
        self,
        cache: CachedPages,
        older_than_s: float = RETIRED_AFTER_S,
        every_s: float = _EVERY_S,
    ) -> None:
        self._cache = cache
        self._older_than_s = older_than_s
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Safe to call twice, and before start."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def sweep(self) -> int:
        """How many pages were added up, or were unreadable for a day and removed."""
        folder = self._cache.folder
        # Nobody here reads the sum and its parts together.
        with self._cache.lock:
            retired = retire_dead(folder, self._older_than_s)
            removed = remove_dead(folder, _DAY_S, keep=RETIRED)
        return retired + len(removed)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.sweep()
            except OSError as e:
                log.error("pages of dead processes stay for now: %s", e)
