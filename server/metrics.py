"""The /metrics page: statistics pages plus the sidecar's own state, rendered once an interval."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blasst.kernels.exchange.prometheus import PagesCollector
from blasst.server.control import ControlService
from blasst.server.tokens import Tokens


class _ControlCollector(Collector):
    def __init__(self, control: ControlService, tokens: Tokens | None) -> None:
        self._control = control
        self._tokens = tokens

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "blasst_control_state_ok",
            "1: the desired-state file is readable. 0: corrupt or lost, the last good one rules.",
            value=0.0 if self._control.error() else 1.0,
        )
        if self._tokens is not None:
            yield GaugeMetricFamily(
                "blasst_token_files_ok",
                "1: all token files are good. 0: one turned bad, its old token stays in force.",
                value=0.0 if self._tokens.errors() else 1.0,
            )


class MetricsPage:
    """Thread-safe: however many scrapes, the page is made at most once in `max_age_s`."""

    def __init__(
        self,
        collector: PagesCollector,
        control: ControlService,
        tokens: Tokens | None = None,
        max_age_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = CollectorRegistry()
        collector.register(self._registry)
        self._registry.register(_ControlCollector(control, tokens))
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._made_at: float | None = None
        self._text = b""

    def text(self) -> bytes:
        with self._lock:
            now = self._clock()
            if self._made_at is None or now - self._made_at >= self._max_age_s:
                self._text = generate_latest(self._registry)
                self._made_at = now
            return self._text
