"""What the canary does, read from the operator's TOML file; see docs/canary.md."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from blasst.kernels.threshold import MAG_MAX
from blasst.server.probe import Endpoint, Prompt
from blasst.server.settings import SettingsError, check_private, check_url

MOST_PROMPTS = 1000
_MAX_PROMPTS_BYTES = 64 << 20
_MAX_PLAN_BYTES = 64 << 10


@dataclass(frozen=True)
class Bounds:
    """min_agreement: 0..1. max_nll_increase: nats a token. margin: by which share of its distance
    from a perfect answer a bound must be met again before the breach is over."""

    min_agreement: float = 0.9
    max_nll_increase: float = 0.05
    margin: float = 0.25

    def crossed(self, agreement: float, nll_increase: float) -> str:
        """Which bound, in words; "" for none."""
        if agreement < self.min_agreement:
            return f"token agreement {agreement:.3f} is below {self.min_agreement:g}"
        if nll_increase > self.max_nll_increase:
            return f"NLL rose by {nll_increase:.4f} nats a token, over {self.max_nll_increase:g}"
        return ""

    def met(self, agreement: float, nll_increase: float) -> bool:
        """Both bounds, by their margin: what was breached is no longer."""
        lowest = self.min_agreement + self.margin * (1.0 - self.min_agreement)
        return agreement >= lowest and nll_increase <= (1.0 - self.margin) * self.max_nll_increase


@dataclass(frozen=True)
class CanaryPlan:
    """interval_s: between probes. window: newest probes that are judged, min_probes: the fewest.
    cooldown_s: between two steps. step_mag: of one step; ceiling_mag: the last MAG before
    at_ceiling, dense or hold. watch_only: never step."""

    prompts: tuple[Prompt, ...]
    endpoint: Endpoint
    bounds: Bounds
    interval_s: float = 60.0
    window: int = 20
    min_probes: int = 8
    max_tokens: int = 32
    cooldown_s: float = 600.0
    step_mag: float = 500.0
    ceiling_mag: float = 14000.0
    at_ceiling: Literal["dense", "hold"] = "dense"
    watch_only: bool = False


_NUMBERS: dict[str, tuple[float, float, str]] = {
    "interval_s": (1.0, 86_400.0, "seconds"),
    "window": (1, 1000, "probes"),
    "min_probes": (1, 1000, "probes"),
    "max_tokens": (1, 1024, "tokens"),
    "cooldown_s": (0.0, 604_800.0, "seconds"),
    "step_mag": (1.0, 10_000.0, "MAG"),
    "ceiling_mag": (1.0, MAG_MAX, "MAG"),
    "min_agreement": (0.0, 1.0, "share of tokens"),
    "max_nll_increase": (0.0, 100.0, "nats a token"),
    "margin": (0.0, 1.0, "share"),
    "timeout_s": (1.0, 3600.0, "seconds"),
}
_WHOLE = ("window", "min_probes", "max_tokens")
_TEXTS = ("prompts", "url", "model", "api_key_file", "at_ceiling")
_FLAGS = ("watch_only",)


def load_plan(path: Path, default_url: str) -> CanaryPlan:
    """default_url: of the engine that this sidecar belongs to. Raises SettingsError."""
    try:
        with open(path, "rb") as f:
            text = f.read(_MAX_PLAN_BYTES + 1)
        if len(text) > _MAX_PLAN_BYTES:
            raise SettingsError(f"--canary {path} is larger than {_MAX_PLAN_BYTES} bytes: no plan")
        raw = tomllib.loads(text.decode())
    except OSError as e:
        raise SettingsError(f"--canary {path} cannot be read: {e.strerror}") from e
    except SettingsError:
        raise
    except (ValueError, RecursionError) as e:
        raise SettingsError(f"--canary {path} is not TOML: {e}") from e
    values = {name: _value(path, name, value) for name, value in raw.items()}
    if "prompts" not in values:
        raise SettingsError(f"--canary {path} needs prompts = FILE, one JSON object a line")
    if values.get("at_ceiling", "dense") not in ("dense", "hold"):
        raise SettingsError(f"--canary {path}: at_ceiling must be dense or hold")
    if values.get("min_probes", CanaryPlan.min_probes) > values.get("window", CanaryPlan.window):
        raise SettingsError(f"--canary {path}: min_probes is above window, so nothing is judged")
    url = check_url(values.get("url", default_url), f"--canary {path}: url")
    # Relative names are of the plan's own folder, as a mounted ConfigMap has them.
    key_file = values.get("api_key_file", "")
    timing = {"timeout_s": values["timeout_s"]} if "timeout_s" in values else {}
    endpoint = Endpoint(
        url, values.get("model", ""), _api_key(path.parent / key_file) if key_file else "", **timing
    )
    own = {f.name for f in fields(CanaryPlan)} - {"prompts", "endpoint", "bounds"}
    bounds = {f.name for f in fields(Bounds)}
    return CanaryPlan(
        load_prompts(path.parent / values["prompts"]),
        endpoint,
        Bounds(**{name: value for name, value in values.items() if name in bounds}),
        **{name: value for name, value in values.items() if name in own},
    )


def load_prompts(path: Path) -> tuple[Prompt, ...]:
    """JSON lines with `prompt` (text or token ids) or `messages`. Raises SettingsError."""
    try:
        if path.stat().st_size > _MAX_PROMPTS_BYTES:
            raise SettingsError(f"prompts {path} is larger than {_MAX_PROMPTS_BYTES} bytes")
        # Not splitlines: text in JSON may hold what Unicode calls the end of a line.
        lines = path.read_text("utf-8").split("\n")
    except OSError as e:
        raise SettingsError(f"prompts {path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise SettingsError(f"prompts {path} is not UTF-8: {e.reason}") from None
    found = [_prompt(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not 1 <= len(found) <= MOST_PROMPTS:
        raise SettingsError(f"prompts {path} has {len(found)} prompts, not 1 to {MOST_PROMPTS}")
    return tuple(found)


def _prompt(path: Path, number: int, line: str) -> Prompt:
    refused = SettingsError(
        f"line {number} of {path} must be a JSON object with `prompt` (text or token ids) or "
        '`messages` (a list), such as {"prompt": "..."}'
    )
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        raise refused from None
    if not isinstance(raw, dict) or ("prompt" in raw) == ("messages" in raw):
        raise refused
    if "messages" in raw:
        messages = raw["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise refused
        return Prompt(messages=messages)
    prompt = raw["prompt"]
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or ids):
        raise refused
    return Prompt(prompt=prompt)


def _value(path: Path, name: str, value: Any) -> Any:
    if name in _NUMBERS:
        low, high, unit = _NUMBERS[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # In this order: an integer of TOML may be too large for a float.
        if not number or not low <= value <= high:
            raise SettingsError(
                f"--canary {path}: {name} must be {low:g} to {high:g} {unit}, not {_shown(value)}"
            )
        if name in _WHOLE and not isinstance(value, int):
            raise SettingsError(
                f"--canary {path}: {name} must be a whole number of {unit}, not {_shown(value)}"
            )
        return value
    kind: type = {**dict.fromkeys(_TEXTS, str), **dict.fromkeys(_FLAGS, bool)}.get(name, object)
    if kind is object:
        names = sorted((*_NUMBERS, *_TEXTS, *_FLAGS))
        raise SettingsError(f"--canary {path}: {name!r} is unknown; it takes {', '.join(names)}")
    if not isinstance(value, kind) or "\0" in str(value):
        raise SettingsError(f"--canary {path}: {name} must be {kind.__name__}, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """A value of the plan as an error names it."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _api_key(path: Path) -> str:
    check_private(path, "API key file")
    try:
        key = path.read_text("ascii").strip()
    except (OSError, ValueError) as e:
        raise SettingsError(f"API key file {path} cannot be read: {e}") from None
    if not key or not key.isprintable() or " " in key:
        raise SettingsError(f"API key file {path} must hold one key on one line")
    return key
