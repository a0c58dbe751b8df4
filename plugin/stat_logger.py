"""Shows the statistics pages on vLLM's own /metrics; lives in the API server, asks no engine."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from blasst.kernels.exchange.prometheus import PagesCollector
from blasst.plugin.patching import Method, wrap_method
from blasst.plugin.registration import selected
from blasst.plugin.settings import Settings

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
        _join_multiprocess_registries()


def _join_multiprocess_registries() -> None:
    """With several API servers /metrics is made from a fresh registry at each scrape, joined by a
    MultiProcessCollector: join it too. Whichever server answers, the pages tell of all of them."""
    from prometheus_client.multiprocess import MultiProcessCollector

    def make(stock: Method) -> Method:
        def __init__(self: Any, registry: Any, *args: Any, **kwargs: Any) -> None:
            stock(self, registry, *args, **kwargs)
            if registry is not None:
                for collector in _collectors.values():
                    collector.register(registry)

        return __init__

    wrap_method(MultiProcessCollector, "__init__", make)
