"""What is checked and prepared before any worker starts: one clear error, or none."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from blasst.kernels.exchange.desired import DesiredReader
from blasst.kernels.exchange.schedule import Threshold
from blasst.plugin.capability import model_reasons
from blasst.plugin.log import logger
from blasst.plugin.registration import NAME, PATH
from blasst.plugin.settings import (
    AUTO,
    IMPL,
    NAMES,
    PRIVATE_STATS_DIR,
    STRICT,
    Settings,
    SettingsError,
)
from blasst.plugin.versions import unsupported_reason


class StartupError(ValueError):
    """The engine cannot start with this backend; the message says why and what to change."""


@contextmanager
def one_line() -> Iterator[None]:
    """Should nobody catch a refusal that is raised here, the process ends with its message alone:
    vLLM's frames say nothing about a bad setting."""
    try:
        yield
    except (StartupError, SettingsError):
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if isinstance(error, StartupError | SettingsError):
                print(f"blasst: error: {error}", file=sys.stderr)
            else:
                before(kind, error, trace)

        sys.excepthook = hook
        raise


@contextmanager
def known_to_vllm() -> Iterator[None]:
    """vLLM warns of, or with --fail-on-environ-validation refuses, VLLM_* names it does not know.

    Only for the time of its check: known names become part of torch.compile's cache key.
    """
    from vllm import envs

    table = envs.environment_variables
    added = [name for name in NAMES if name not in table]
    table.update({name: None for name in added})
    try:
        yield
    finally:
        for name in added:
            table.pop(name, None)


def prepare(vllm_config: Any) -> None:
    """For an engine that uses our backend. Raises StartupError or SettingsError."""
    from vllm import __version__
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    reason = unsupported_reason(__version__)
    if reason is not None:
        raise StartupError(reason)
    path = AttentionBackendEnum[NAME].get_path()
    if path != PATH:
        raise StartupError(
            f"another plugin took over the CUSTOM attention backend ({path}), of which {NAME} is "
            "an alias; leave one of the two out of VLLM_PLUGINS"
        )
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise StartupError(
            "VLLM_USE_RUST_FRONTEND=1 admits requests outside Python, where no plugin can give "
            "them a threshold; unset it, or choose another --attention-backend"
        )
    settings = Settings.from_env()
    settings.check_folders()
    _check_capability(vllm_config, settings)
    if settings.stats_dir is None:
        _make_private_stats_dir()
    _install_front_hooks()


def prepare_other(vllm_config: Any) -> None:
    """For an engine with another backend: its requests must not carry our arguments unnoticed."""
    del vllm_config
    from vllm import __version__

    if unsupported_reason(__version__) is None:
        _install_front_hooks()


def _install_front_hooks() -> None:
    from blasst.plugin import front_hooks

    front_hooks.install()


def _check_capability(vllm_config: Any, settings: Settings) -> None:
    reasons = model_reasons(vllm_config, settings.impl)
    if not reasons:
        return
    why = "; ".join(reasons)
    if settings.strict:
        raise StartupError(f"{STRICT}=1 and no layer of this model can skip: {why}")
    if settings.impl != AUTO:
        raise StartupError(
            f"{IMPL}={settings.impl} was asked for and cannot run here: {why}; set it to {AUTO}"
        )
    threshold: Threshold | None = settings.threshold
    remedy = "unset it to serve dense"
    if settings.state_dir is not None:
        desired = DesiredReader(settings.state_dir).current()
        if desired.generation:
            threshold, remedy = desired.threshold, "set the deployment's threshold to off first"
    if threshold is not None:
        raise StartupError(
            f"{threshold} is this deployment's threshold, but no layer of this model can skip: "
            f"{why}; {remedy}"
        )
    logger.warning("blasst: no layer of this model can skip, all attention is dense: %s", why)


def _make_private_stats_dir() -> None:
    folder = tempfile.mkdtemp(prefix="blasst-stats-")
    os.environ[PRIVATE_STATS_DIR] = folder
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
