"""Shows the statistics pages on vLLM's own /metrics; lives in the API server, asks no engine."""

from __future__ import annotations

import os
import sys
from typing import Any

from vllm.v1.metrics import prometheus as vllm_prometheus
from vllm.v1.metrics.loggers import StatLoggerBase

from blasst.kernels.exchange.prometheus import PagesCollector
from blasst.plugin.registration import selected
from blasst.plugin.settings import Settings

_GETTER = "get_prometheus_registry"
_collectors: dict[str, PagesCollector] = {}


class BlasstStatLogger(StatLoggerBase):
    """vLLM makes one per engine; the pages of all engines of a server are in one folder."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        if selected(vllm_config):
            _register(Settings.from_env())

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the numbers come from the pages."""

    def log_engine_initialized(self) -> None:
        """Nothing to log."""


def _register(settings: Settings) -> None:
    folder = settings.stats_dir
    if folder is None or str(folder) in _collectors:
        return
    from prometheus_client import REGISTRY

    collector = _collectors[str(folder)] = PagesCollector(folder)
    collector.register(REGISTRY)
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        _join_multiprocess_registry()


def _join_multiprocess_registry() -> None:
    """With several API servers vLLM makes a fresh registry for /metrics: put ours in that one too.

    Whichever server answers, the pages hold the numbers of all of them.
    """
    stock = getattr(vllm_prometheus, _GETTER)
    if hasattr(stock, "_blasst"):
        return

    def get_prometheus_registry() -> Any:
        registry = stock()
        for collector in _collectors.values():
            collector.register(registry)
        return registry

    get_prometheus_registry._blasst = True  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_GETTER) is stock:
            setattr(module, _GETTER, get_prometheus_registry)
