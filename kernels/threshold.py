"""The skip threshold in its four units, and the exact way from one to another. Pure math, no torch.

lambda (`skip_lambda`): natural base, 0 <= lambda < 1; a block is skipped when, in every valid row,
block_max - running_max < ln(lambda).   MAG m: lambda = 2 ** (-m / 1000).
scale s: lambda = min(s / L, LAMBDA_MAX), L = final prompt length in tokens (TensorRT-LLM's unit).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal

LAMBDA_MAX = 0.999
"""The clamp for scale / L: at 1 and above, rows could lose the block that holds their maximum."""

MAG_MAX = 126_000.0
"""lambda = 2 ** -126, the smallest normal float32: a larger MAG could not reach a device."""

Unit = Literal["lambda", "mag", "scale"]
UNITS: tuple[Unit, ...] = ("lambda", "mag", "scale")
_EXAMPLES = {"lambda": "0.05", "mag": "2500", "scale": "1000"}


class ThresholdError(ValueError):
    """A threshold outside its range; the message names the value, the rule and the remedy."""


def mag_to_lambda(mag: float) -> float:
    """lambda of a MAG. Raises ThresholdError unless 0 < mag <= MAG_MAX."""
    mag = _finite("MAG", mag)
    if mag <= 0 or mag > MAG_MAX:
        raise ThresholdError(
            f"MAG {mag:g} is outside 0 < MAG <= {MAG_MAX:g} (lambda = 2 ** (-MAG / 1000) must stay "
            "in (0, 1)); usual values are 1000 to 14000, a higher MAG skips less"
        )
    skip_lambda = math.exp2(-mag / 1000.0)
    if skip_lambda >= 1.0:
        raise ThresholdError(f"MAG {mag!r} rounds to lambda 1; give at least 1e-12")
    return skip_lambda


def lambda_to_mag(skip_lambda: float) -> float:
    """MAG of a lambda > 0: the shortest decimal that gives this very lambda, if one does."""
    skip_lambda = check_lambda(skip_lambda)
    if skip_lambda == 0.0:
        raise ThresholdError("lambda 0 skips nothing and has no MAG; give it as lambda")
    mag = -1000.0 * math.log2(skip_lambda)
    for digits in range(13):
        short = round(mag, digits)
        if short > 0 and math.exp2(-short / 1000.0) == skip_lambda:
            return short
    return mag


def check_lambda(skip_lambda: float) -> float:
    """The value itself, as a float. Raises ThresholdError unless 0 <= lambda < 1."""
    skip_lambda = _finite("lambda", skip_lambda)
    if not 0.0 <= skip_lambda < 1.0:
        raise ThresholdError(
            f"lambda {skip_lambda:g} is outside 0 <= lambda < 1 (natural base; at 1 a row may lose "
            "the block with its maximum); usual values are 1e-5 to 0.5"
        )
    return skip_lambda


def lambda_to_log2(skip_lambda: float) -> float:
    """log2(lambda), the form that kernels compare with; -inf (never skips) for lambda 0."""
    skip_lambda = check_lambda(skip_lambda)
    return math.log2(skip_lambda) if skip_lambda > 0.0 else -math.inf


def log2_to_lambda(log2_lambda: float) -> float:
    """lambda of its log2 (-inf gives 0). Raises ThresholdError unless log2_lambda < 0."""
    if isinstance(log2_lambda, bool) or math.isnan(log2_lambda) or log2_lambda >= 0.0:
        raise ThresholdError(f"log2(lambda) {log2_lambda!r} must be below 0, so that lambda < 1")
    return check_lambda(math.exp2(log2_lambda))


def scale_to_lambda(scale: float, length: int) -> float:
    """lambda = scale / length, clamped to LAMBDA_MAX with a warning; length: prompt tokens."""
    scale = _finite("scale", scale)
    if scale < 0:
        raise ThresholdError(f"scale {scale:g} is negative; scale = lambda * L is at least 0")
    _check_length(length)
    skip_lambda = scale / length
    if skip_lambda > LAMBDA_MAX:
        warnings.warn(
            f"scale {scale:g} / {length} tokens = {skip_lambda:.3g} is clamped to {LAMBDA_MAX}: "
            "the scale was chosen for longer prompts; raise min_context or lower the scale",
            RuntimeWarning,
            stacklevel=2,
        )
        return LAMBDA_MAX
    return skip_lambda


def lambda_to_scale(skip_lambda: float, length: int) -> float:
    """scale = lambda * length (TensorRT-LLM `threshold_scale_factor`)."""
    _check_length(length)
    return check_lambda(skip_lambda) * length


@dataclass(frozen=True)
class SparsityCurve:
    """Calibrated lambda * L = a * exp(b * target), target = skip rate in 0..1 (BLASST, Alg. 2)."""

    a: float
    b: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.a) and math.isfinite(self.b) and self.a > 0 and self.b > 0):
            raise ThresholdError(f"curve a={self.a!r}, b={self.b!r}: both must be finite and > 0")

    def scale(self, target_skip_rate: float) -> float:
        """The scale that is expected to reach this skip rate."""
        target = _finite("target skip rate", target_skip_rate)
        if not 0.0 <= target < 1.0:
            raise ThresholdError(f"target skip rate {target:g} is outside 0 <= rate < 1")
        try:
            return self.a * math.exp(self.b * target)
        except OverflowError:
            raise ThresholdError(
                f"curve a={self.a:g}, b={self.b:g} gives no finite scale for target {target:g}"
            ) from None

    def target(self, scale: float) -> float:
        """The skip rate expected at a scale; the inverse of `scale`, not clamped to [0, 1)."""
        scale = _finite("scale", scale)
        if scale <= 0:
            raise ThresholdError(f"scale {scale:g} must be > 0 to have a target skip rate")
        return math.log(scale / self.a) / self.b


@dataclass(frozen=True)
class SkipThreshold:
    """A threshold as the user gave it: unit and value are kept, so nothing is lost by rounding.

    Raises ThresholdError at construction for NaN, infinite, negative or too large values.
    """

    unit: Unit
    value: float

    def __post_init__(self) -> None:
        if self.unit == "mag":
            mag_to_lambda(self.value)
        elif self.unit == "lambda":
            check_lambda(self.value)
        elif self.unit == "scale":
            if _finite("scale", self.value) < 0:
                raise ThresholdError(f"scale {self.value:g} is negative; give at least 0")
        else:
            raise ThresholdError(f"unit {self.unit!r} is unknown; choose one of {', '.join(UNITS)}")
        # + 0.0 makes -0.0 an ordinary zero.
        object.__setattr__(self, "value", float(self.value) + 0.0)

    @classmethod
    def parse(cls, unit: str, value: object) -> SkipThreshold:
        """From outside input: a number, or a string that is one. Raises ThresholdError."""
        known = next((u for u in UNITS if u == unit), None)
        if known is None:
            raise ThresholdError(f"unit {unit!r} is unknown; choose one of {', '.join(UNITS)}")
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                raise ThresholdError(
                    f"{unit} {value[:40]!r} is not a number; give one such as {_EXAMPLES[known]}"
                ) from None
            return cls(known, number)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ThresholdError(f"{unit} must be a number, not {type(value).__name__}")
        return cls(known, _finite(unit, value))

    def skip_lambda(self, length: int | None = None) -> float:
        """lambda for a prompt of `length` tokens (its final length; only `scale` needs it)."""
        if self.unit == "mag":
            return mag_to_lambda(self.value)
        if self.unit == "lambda":
            return self.value
        if length is None:
            raise ThresholdError("a scale gives a lambda only together with the prompt's length")
        return scale_to_lambda(self.value, length)

    def __str__(self) -> str:
        return f"{self.unit} {self.value:g}"


def _finite(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ThresholdError(f"{name} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        raise ThresholdError(f"{name} is too large to be a number") from None
    if not math.isfinite(number):
        raise ThresholdError(f"{name} {number} is not finite; give an ordinary number")
    return number


def _check_length(length: int) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ThresholdError(f"length {length!r} must be a whole number of tokens, at least 1")
