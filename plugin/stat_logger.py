"""Shows the statistics pages on vLLM's own /metrics; lives in the API server, asks no engine."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from blasst.kernels.exchange.prometheus import PagesCollector
from blasst.plugin.registration import selected
from blasst.plugin.settings import Settings

_registered: set[str] = set()


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
    if folder is None or str(folder) in _registered:
        return
    from prometheus_client import REGISTRY

    PagesCollector(folder).register(REGISTRY)
    _registered.add(str(folder))
