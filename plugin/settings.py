"""The one door through which configuration enters the plugin: `VLLM_BLASST_*` (docs/settings.md).

The names begin with VLLM_ because Ray copies only such variables to its workers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blasst.kernels.exchange.desired import MIN_CONTEXT_MAX
from blasst.kernels.threshold import UNITS, SkipThreshold, ThresholdError, Unit
from blasst.kernels.types import Impl

PREFIX = "VLLM_BLASST_"
STATE_DIR = "VLLM_BLASST_STATE_DIR"
MAG = "VLLM_BLASST_MAG"
LAMBDA = "VLLM_BLASST_LAMBDA"
SCALE = "VLLM_BLASST_SCALE"
MIN_CONTEXT = "VLLM_BLASST_MIN_CONTEXT"
STRICT = "VLLM_BLASST_STRICT"
SHARE_PREFIX_CACHE = "VLLM_BLASST_SHARE_PREFIX_CACHE"
IMPL = "VLLM_BLASST_IMPL"
STATS_INTERVAL_S = "VLLM_BLASST_STATS_INTERVAL_S"
PRIVATE_STATS_DIR = "VLLM_BLASST_PRIVATE_STATS_DIR"
"""Set by the first vLLM process for its children while STATE_DIR is unset; not for users."""

NAMES = (
    STATE_DIR,
    MAG,
    LAMBDA,
    SCALE,
    MIN_CONTEXT,
    STRICT,
    SHARE_PREFIX_CACHE,
    IMPL,
    STATS_INTERVAL_S,
    PRIVATE_STATS_DIR,
)
STATS_FOLDER = "stats"
AUTO = "auto"
_THRESHOLDS: Mapping[str, Unit] = {MAG: "mag", LAMBDA: "lambda", SCALE: "scale"}
_IMPLS = (AUTO, *(str(i) for i in Impl))


class SettingsError(ValueError):
    """A variable outside its range; the message names it, its value, the rule and the remedy."""


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. `threshold` is the deployment default while the state folder
    holds no desired-state file; None = dense. `min_context`: prompt tokens."""

    state_dir: Path | None = None
    private_stats_dir: Path | None = None
    threshold: SkipThreshold | None = None
    min_context: int = 8192
    strict: bool = False
    share_prefix_cache: bool = False
    impl: str = AUTO
    stats_interval_s: float = 0.5

    @property
    def stats_dir(self) -> Path | None:
        """Where the statistics pages are; None: nowhere (this process was not told)."""
        return self.state_dir / STATS_FOLDER if self.state_dir else self.private_stats_dir

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Raises SettingsError. An empty variable counts as unset."""
        env = os.environ if env is None else env
        given = {k: v.strip() for k, v in env.items() if k.startswith(PREFIX) and v.strip()}
        unknown = sorted(given.keys() - set(NAMES))
        if unknown:
            raise SettingsError(
                f"{unknown[0]} is not a setting of blasst; the settings are {', '.join(NAMES[:-1])}"
            )
        impl = given.get(IMPL, cls.impl)
        if impl not in _IMPLS:
            raise SettingsError(f"{IMPL}={impl} is unknown; choose one of {', '.join(_IMPLS)}")
        return cls(
            state_dir=_folder(given, STATE_DIR),
            private_stats_dir=_folder(given, PRIVATE_STATS_DIR),
            threshold=_threshold(given),
            min_context=_min_context(given),
            strict=_flag(given, STRICT),
            share_prefix_cache=_flag(given, SHARE_PREFIX_CACHE),
            impl=impl,
            stats_interval_s=_interval(given),
        )

    def check_folders(self) -> None:
        """Make the statistics folder. Raises SettingsError when files cannot be put there."""
        if self.state_dir is not None:
            check_state_dir(self.state_dir)


def check_state_dir(folder: Path) -> None:
    """Raises SettingsError unless the folder exists and this user can make files in it."""
    remedy = f"create it for this user, or set {STATE_DIR} to another folder"
    if not folder.is_dir():
        raise SettingsError(f"{STATE_DIR}={folder} is not a folder; {remedy}")
    stats = folder / STATS_FOLDER
    try:
        stats.mkdir(exist_ok=True)
        probe = stats / f".probe-{os.getpid()}"
        probe.write_bytes(b"blasst")
        probe.unlink()
    except OSError as e:
        raise SettingsError(
            f"{STATE_DIR}={folder} cannot take statistics pages ({e.strerror}); {remedy}"
        ) from e


def _folder(given: Mapping[str, str], name: str) -> Path | None:
    if name not in given:
        return None
    path = Path(given[name])
    if not path.is_absolute():
        raise SettingsError(f"{name}={path} is relative; give an absolute path")
    return path


def _threshold(given: Mapping[str, str]) -> SkipThreshold | None:
    names = [name for name in _THRESHOLDS if name in given]
    if not names:
        return None
    if len(names) > 1:
        raise SettingsError(
            f"{' and '.join(f'{n}={given[n]}' for n in names)} are both set, but a deployment has "
            f"one threshold; keep one of the units {', '.join(UNITS)}"
        )
    try:
        return SkipThreshold.parse(_THRESHOLDS[names[0]], given[names[0]])
    except ThresholdError as e:
        raise SettingsError(f"{names[0]}: {e}") from e


def _min_context(given: Mapping[str, str]) -> int:
    if MIN_CONTEXT not in given:
        return Settings.min_context
    try:
        value = int(given[MIN_CONTEXT])
    except ValueError:
        value = -1
    if not 0 <= value <= MIN_CONTEXT_MAX:
        raise SettingsError(
            f"{MIN_CONTEXT}={given[MIN_CONTEXT]} must be a whole number of prompt tokens in "
            f"0..{MIN_CONTEXT_MAX}, such as {Settings.min_context}"
        )
    return value


def _flag(given: Mapping[str, str], name: str) -> bool:
    value = given.get(name, "0")
    if value not in ("0", "1"):
        raise SettingsError(f"{name}={value} must be 0 or 1")
    return value == "1"


def _interval(given: Mapping[str, str]) -> float:
    if STATS_INTERVAL_S not in given:
        return Settings.stats_interval_s
    try:
        value = float(given[STATS_INTERVAL_S])
    except ValueError:
        value = math.nan
    if not 0.05 <= value <= 60.0:
        raise SettingsError(
            f"{STATS_INTERVAL_S}={given[STATS_INTERVAL_S]} must be seconds in 0.05..60, such as "
            f"{Settings.stats_interval_s}"
        )
    return value
