"""The /metrics page: statistics pages plus the sidecar's own state, rendered once an interval."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blasst.kernels.exchange.prometheus import PagesCollector
from blasst.server.canary import Canary, CanaryState
from blasst.server.tally import Tally

CHECKS = {
    "blasst_control_state_ok": "1: the desired-state file is readable. 0: corrupt or lost, the "
    "last good one rules.",
    "blasst_token_files_ok": "1: all token files are good. 0: one turned bad, its old token stays "
    "in force.",
    "blasst_followed_file_ok": "1: the followed file's threshold was set. 0: it is unreadable or "
    "refused, the old threshold stays in force.",
    "blasst_upstream_up": "1: vLLM's own metrics are on this page. 0: vLLM did not answer.",
}
_IDLE = 20.0
"""Times as long as it took to make, a page is kept."""
_OLDEST_S = 2.0
"""Seconds after it was made: a host that stood still for one must not hide counters for twenty."""
Checks = Mapping[str, Callable[[], bool]]


class _Own(Collector):
    """The sidecar's own state and counters."""

    def __init__(self, checks: Checks, tally: Tally, canary: Canary | None) -> None:
        self._checks = checks
        self._tally = tally
        self._canary = canary

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        for name, is_ok in self._checks.items():
            yield GaugeMetricFamily(name, CHECKS[name], value=float(is_ok()))
        for name, text, label, counts in (
            (
                "blasst_threshold_changes",
                "Changes of the threshold that were asked for, by what became of them.",
                "result",
                self._tally.changes(),
            ),
            (
                "blasst_control_errors",
                "Errors of the sidecar and refused calls, by kind (as in the API's problem type).",
                "kind",
                self._tally.errors(),
            ),
        ):
            family = CounterMetricFamily(name, text, labels=[label])
            for value, number in counts.items():
                family.add_metric([value], number)
            yield family
        if self._canary is not None:
            yield from _canary_metrics(self._canary.state())


def _canary_metrics(state: CanaryState) -> Iterator[Metric]:
    probes = CounterMetricFamily(
        "blasst_canary_probes", "Probes of the canary, by result.", labels=["result"]
    )
    for result, number in state.counts.items():
        probes.add_metric([result], number)
    yield probes
    yield CounterMetricFamily(
        "blasst_canary_steps", "Steps by which the canary raised the threshold.", value=state.steps
    )
    yield GaugeMetricFamily(
        "blasst_canary_breached",
        "1: answers differ from dense ones by more than the bound, and are not yet back within it.",
        value=float(state.breached),
    )
    yield GaugeMetricFamily(
        "blasst_canary_noisy",
        "1: dense answers differ among themselves by more than the bound: nothing can be judged.",
        value=float(state.noisy),
    )
    for name, text, value in (
        ("agreement", "Mean share of a dense answer's tokens that come out.", state.agreement),
        ("control_agreement", "The same of a second dense answer.", state.control),
        (
            "nll_increase_nats",
            "Mean rise of -ln p of a dense answer's tokens, nats a token.",
            state.nll_increase,
        ),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"blasst_canary_{name}", text, value=value)


class MetricsPage:
    """Thread-safe: however many scrapes, the page is made at most once in `max_age_s`, and no more
    often than keeps one core busy for a twentieth of the time, but for pages that take more than
    0.1 s: a sweep waits for what it shows.

    checks: gauge of CHECKS -> whether all is well.
    """

    def __init__(
        self,
        collector: PagesCollector,
        checks: Checks,
        max_age_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        tally: Tally | None = None,
        canary: Canary | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        collector.register(self._registry)
        self._registry.register(_Own(checks, tally or Tally(), canary))
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._made_at: float | None = None
        self._keep_s = max_age_s
        self._text = b""

    def text(self) -> bytes:
        with self._lock:
            now = self._clock()
            if self._made_at is None or now - self._made_at >= self._keep_s:
                self._text = generate_latest(self._registry)
                self._made_at = now
                took = self._clock() - now
                self._keep_s = max(self._max_age_s, min(took + _OLDEST_S, _IDLE * took))
            return self._text
