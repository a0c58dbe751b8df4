"""vLLM's own /metrics on the sidecar's page, where the operator asked for it.

One address, fixed at the start; one request at a time, at most one a second, whatever is scraped.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable

from blasst.server.outbound import opener, read_bounded
from blasst.server.tally import Tally

TIMEOUT_S = 2.0
MAX_BYTES = 16 << 20
_OWN = "blasst_"
_NAME = r"([a-zA-Z_:][a-zA-Z0-9_:]*)"
_KIND = r"TYPE(?= \S+ (?:counter|gauge|histogram|summary|untyped)$)"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\.)*"'
_EXPONENT = r"[eE](?:-[0-9]{1,3}|\+?(?:[0-2]?[0-9]{1,2}|30[0-8]))"
_VALUE = rf"(?:[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:{_EXPONENT})?|[+-]?Inf|NaN)"
_COMMENT = re.compile(rf"# (?:HELP|{_KIND}) {_NAME}(?: .*)?")
_SAMPLE = re.compile(
    rf"{_NAME}(?:\{{(?:{_LABEL}(?:,{_LABEL})*,?)?\}})? {_VALUE}(?: -?[0-9]{{1,18}})?"
)
_STUCK = 3
"""Times TIMEOUT_S: a slow name server, or headers byte by byte, outlast a socket's time-out."""


class Upstream:
    """Thread-safe. url: base address of vLLM. up: whether the last request was answered."""

    def __init__(
        self,
        url: str,
        tally: Tally,
        max_age_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url + "/metrics"
        self.up = False
        self._tally = tally
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._asking = False
        self._asked_at: float | None = None
        self._began = 0.0
        self._text = b""

    def text(self) -> bytes:
        """vLLM's series without ours, which the page has already; nothing while it does not answer.
        While one scrape asks, others get the text before."""
        with self._lock:
            now = self._clock()
            fresh = self._asked_at is not None and now - self._asked_at < self._max_age_s
            if self._asking and now - self._began > _STUCK * TIMEOUT_S:
                self._text, self.up = b"", False
            if fresh or self._asking:
                return self._text
            self._asking, self._began = True, now
        text, error = b"", ""
        try:
            text = self._ask()
        except (OSError, http.client.HTTPException, ValueError) as e:
            error = f"{self.url}: {e}"
        with self._lock:
            if (error and self.up) or (error and self._asked_at is None):
                self._tally.error("upstream-metrics", error)
            self._text, self.up = text, not error
            self._asked_at = self._clock()
            self._asking = False
        return text

    def _ask(self) -> bytes:
        with opener().open(self.url, timeout=TIMEOUT_S) as answer:
            if answer.headers.get_content_type() != "text/plain":
                raise ValueError(f"answers {answer.headers.get_content_type()}, not text/plain")
            text = read_bounded(answer, MAX_BYTES, TIMEOUT_S).decode()
        return foreign(text).encode()


def foreign(text: str) -> str:
    """The lines whose metric is not ours. Raises ValueError for what is no Prometheus text, which
    would take the whole page with it."""
    kept = []
    # Not splitlines: a label may hold what Unicode calls the end of a line.
    for line in text.split("\n"):
        if not line or (line.startswith("#") and not _COMMENT.fullmatch(line)):
            continue
        match = _COMMENT.fullmatch(line) or _SAMPLE.fullmatch(line)
        if match is None:
            raise ValueError(f"no Prometheus text: {line[:80]!r}")
        if not match[1].startswith(_OWN):
            kept.append(line)
    return "\n".join(kept) + "\n" if kept else ""
