"""Which lambda a request runs under. Decided once, when vLLM admits it; pure, no vLLM here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from blasst.kernels.exchange.desired import DesiredState
from blasst.kernels.exchange.schedule import Schedule, Threshold, threshold_at
from blasst.kernels.threshold import (
    LAMBDA_MAX,
    SkipThreshold,
    ThresholdError,
    Unit,
    scale_to_lambda,
)
from blasst.plugin.log import logger
from blasst.plugin.settings import Settings
from blasst.plugin.stamp import Stamp

PREFIX = "blasst_"
ARGUMENTS: Mapping[str, Unit] = {
    "blasst_mag": "mag",
    "blasst_lambda": "lambda",
    "blasst_scale": "scale",
}
OFF = "off"

Wish = SkipThreshold | Literal["off"] | None
"""What a request asks for: a threshold, dense, or nothing (the deployment's)."""


class AdmissionError(ValueError):
    """A request's blasst_* arguments are refused; vLLM's server answers HTTP 400."""


def parse_wish(extra_args: Mapping[str, Any] | None) -> Wish:
    """Raises AdmissionError."""
    given = {k: v for k, v in (extra_args or {}).items() if str(k).startswith(PREFIX)}
    allowed = f"give one of {', '.join(ARGUMENTS)}, as a number or 'off'"
    unknown = sorted(given.keys() - ARGUMENTS.keys())
    if unknown:
        raise AdmissionError(f"{unknown[0]} is not an argument of blasst; {allowed}")
    if not given:
        return None
    if len(given) > 1:
        raise AdmissionError(f"{' and '.join(sorted(given))} exclude each other; {allowed}")
    ((name, value),) = given.items()
    if isinstance(value, str) and value.strip().lower() == OFF:
        return "off"
    try:
        return SkipThreshold.parse(ARGUMENTS[name], value)
    except ThresholdError as e:
        raise AdmissionError(f"{name}: {e}; {allowed}") from e


@dataclass(frozen=True)
class Deployment:
    """What holds for requests that ask for nothing. Precedence: desired file > environment."""

    threshold: Threshold | None
    min_context: int
    generation: int

    @property
    def skips(self) -> bool:
        """A threshold is in force for prompts of some length."""
        if isinstance(self.threshold, Schedule):
            return not self.threshold.all_dense
        return self.threshold is not None

    def at(self, prompt_tokens: int) -> SkipThreshold | None:
        """What holds for a prompt of this length, min_context left aside."""
        return threshold_at(self.threshold, prompt_tokens)

    def class_lambda(self, prompt_tokens: int) -> float | None:
        """lambda in force for a prompt of this length; None = dense."""
        threshold = self.at(prompt_tokens) if prompt_tokens >= self.min_context else None
        return None if threshold is None else _lambda(threshold, prompt_tokens)

    @classmethod
    def of(cls, desired: DesiredState, settings: Settings) -> Deployment:
        written = desired.generation > 0
        return cls(
            threshold=desired.threshold if written else settings.threshold,
            min_context=(
                settings.min_context if desired.min_context is None else desired.min_context
            ),
            generation=desired.generation,
        )


def decide(
    wish: Wish, deployment: Deployment, prompt_tokens: int, refusal: str | None = None
) -> Stamp:
    """The stamp of a request with this prompt. `refusal`: why no layer of the engine can skip.

    Raises AdmissionError when a threshold is in force that the engine cannot honour: running
    dense instead would be silent.
    """
    threshold = deployment.at(prompt_tokens) if wish is None else None if wish == "off" else wish
    if threshold is None:
        return Stamp(None, deployment.generation)
    if refusal is not None:
        remedy = (
            "set the deployment's threshold to off" if wish is None else "send it without blasst_*"
        )
        raise AdmissionError(f"{threshold} cannot take effect here: {refusal}; {remedy}")
    if prompt_tokens < deployment.min_context:
        return Stamp(None, deployment.generation)
    return Stamp(_lambda(threshold, prompt_tokens), deployment.generation)


def salted(cache_salt: str | None, stamp: Stamp, share_prefix_cache: bool) -> str | None:
    """The prefix-cache salt: keys and values made under a threshold are approximations, which no
    request may inherit that asked for another. Dense requests keep the caller's salt."""
    if stamp.skip_lambda is None or share_prefix_cache:
        return cache_salt
    return f"{cache_salt or ''}|blasst_lambda={stamp.skip_lambda!r}"


def _lambda(threshold: SkipThreshold, prompt_tokens: int) -> float:
    if threshold.unit == "scale" and threshold.value > LAMBDA_MAX * prompt_tokens:
        # scale_to_lambda would warn at every such request.
        logger.warning(
            "blasst: %s / %d tokens is clamped to lambda %s; raise min_context",
            threshold,
            prompt_tokens,
            LAMBDA_MAX,
        )
        return LAMBDA_MAX
    if threshold.unit == "scale":
        return scale_to_lambda(threshold.value, prompt_tokens)
    return threshold.skip_lambda()
