"""The canary: probes the deployment now and then, and raises its MAG when answers change too much.

It never lowers a MAG: people do. A step is a change like any other: audited, with If-Match.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from blasst.kernels.exchange.desired import DesiredState, DesiredStateError
from blasst.kernels.exchange.presets import finite_number
from blasst.kernels.exchange.schedule import Schedule, Threshold, threshold_at
from blasst.kernels.threshold import (
    LAMBDA_MAX,
    SkipThreshold,
    lambda_to_mag,
)
from blasst.server.canary_plan import Bounds, CanaryPlan
from blasst.server.control import ControlService, Wish, etag
from blasst.server.probe import ProbeError, Result, whole_tokens
from blasst.server.problems import Problem
from blasst.server.traces import Traces

log = logging.getLogger("blasst.server")
NAME = "canary"
STATE_NAME = "canary.json"
RESULTS = ("ok", "failed", "dense", "not_followed", "changed_meanwhile")
"""What becomes of a probe. dense: no threshold holds for this prompt; not_followed: a front end has
yet to read the threshold; changed_meanwhile: it changed during the probe."""

_RAISED = "canary: raised from "
_NEVER_SET = (
    "no threshold was set through the sidecar; one of the engine's own environment is not watched, "
    "set it with `blasst threshold set`"
)
_MAX_BYTES = 1 << 20
_DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
Follows = Callable[[int], bool]


def base_of(state: DesiredState) -> str:
    """The threshold, in words, that the canary's first step began at; "" if it made none."""
    return state.origin.removeprefix(_RAISED) if state.origin.startswith(_RAISED) else ""


def raised_over(state: DesiredState, threshold: Threshold | None, min_context: int | None) -> bool:
    """What is in force is what the canary made of this threshold; setting it would undo that."""
    return base_of(state) == str(threshold) and state.min_context == min_context


def raised(
    threshold: Threshold, step_mag: float, ceiling_mag: float, tokens: int, hold: bool = False
) -> Threshold | None:
    """One step more conservative. What is at the ceiling becomes None, dense, or with `hold` stays.
    tokens: prompt length at which a scale is compared with the ceiling."""

    def one(threshold: SkipThreshold | None) -> SkipThreshold | None:
        new = _raised(threshold, step_mag, ceiling_mag, tokens)
        return threshold if hold and new is None else new

    if isinstance(threshold, Schedule):
        steps = tuple(
            dataclasses.replace(step, threshold=one(step.threshold)) for step in threshold.steps
        )
        schedule = Schedule(steps)
        return None if schedule.all_dense else schedule
    return one(threshold)


def _raised(
    threshold: SkipThreshold | None, step_mag: float, ceiling_mag: float, tokens: int
) -> SkipThreshold | None:
    if threshold is None or threshold.value == 0.0:
        return threshold
    at = threshold.skip_lambda(tokens) if threshold.unit != "scale" else threshold.value / tokens
    # A scale so small that its lambda underflows is above every ceiling.
    mag = lambda_to_mag(min(at, LAMBDA_MAX)) if at > 0.0 else math.inf
    if mag >= ceiling_mag:
        return None
    if threshold.unit == "scale":
        return SkipThreshold("scale", threshold.value * 2.0 ** (-step_mag / 1000.0))
    return SkipThreshold("mag", round(min(mag + step_mag, ceiling_mag), 6))


@dataclass
class Window:
    """The newest results under one generation."""

    generation: int = 0
    results: list[Result] = field(default_factory=list)

    def mean(self, name: str) -> float | None:
        """Of one field of Result; None without results."""
        values = [getattr(result, name) for result in self.results]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class CanaryState:
    """What status and metrics show. Means over the window; None: no probe yet. breached: the bound
    was crossed and is not yet met again by its margin."""

    probes: int
    agreement: float | None
    control: float | None
    nll_increase: float | None
    breached: bool
    noisy: bool
    steps: int
    error: str
    bounds: Bounds
    counts: dict[str, int]


class Canary:
    """Of one sidecar. follows(generation): every live front end has read it. min_context(): prompt
    tokens below which the engine runs dense where the state does not say."""

    def __init__(
        self,
        plan: CanaryPlan,
        control: ControlService,
        follows: Follows,
        min_context: Callable[[], int],
        traces: Traces | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self._control = control
        self._follows = follows
        self._min_context = min_context
        self._traces = traces
        self._clock = clock
        self._path = control.folder / STATE_NAME
        self._window = Window()
        self._counts = Counter(dict.fromkeys(RESULTS, 0))
        self._next = 0
        self._steps = 0
        self._stepped_at: float | None = None
        self._breached = False
        self._error = self._logged = ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)

    def start(self) -> None:
        """Take up the window of an earlier run, and probe from now on."""
        self._load()
        self._thread.start()

    def stop(self) -> None:
        """Safe to call twice, and before start; a probe under way is not waited for."""
        self._stop.set()

    def state(self) -> CanaryState:
        """As it is now; safe to call from any thread."""
        with self._lock:
            window = self._window
            return CanaryState(
                probes=len(window.results),
                agreement=window.mean("agreement"),
                control=window.mean("control"),
                nll_increase=window.mean("nll_increase"),
                breached=self._breached,
                noisy=self._noisy(),
                steps=self._steps,
                error=self._error,
                bounds=self.plan.bounds,
                counts=dict(self._counts),
            )

    def probe(self) -> str:
        """One probe and what follows from it; what became of it, one of RESULTS."""
        if self._traces is None:
            return self._count()
        with self._traces.span("canary probe") as attributes:
            attributes["blasst.canary.result"] = outcome = self._count()
            return outcome

    def _count(self) -> str:
        try:
            outcome = self._probe()
        except (ProbeError, DesiredStateError, OSError) as e:
            self._fail(str(e))
            outcome = "failed"
        except Problem as e:
            # Somebody else was quicker, or the disk is full: the next probe judges anew.
            self._fail(e.detail)
            outcome = "changed_meanwhile" if e.status == 412 else "failed"
        if not self._error:
            self._logged = ""
        with self._lock:
            self._counts[outcome] += 1
        return outcome

    def _probe(self) -> str:
        state = self._control.read()
        threshold = state.threshold
        if threshold is None or (isinstance(threshold, Schedule) and threshold.all_dense):
            # Nothing is probed any more that could show that the breach is over.
            self._breached = False
            self._error = "" if state.generation else _NEVER_SET
            return "dense"
        if not self._follows(state.generation):
            return "not_followed"
        prompt = self.plan.prompts[self._next % len(self.plan.prompts)]
        self._next += 1
        result = self.plan.endpoint.probe(prompt, self.plan.max_tokens)
        tokens = result.prompt_tokens
        short = self._min_context() if state.min_context is None else state.min_context
        self._error = ""
        if tokens < short or threshold_at(threshold, tokens) is None:
            return "dense"
        if self._control.read().generation != state.generation:
            return "changed_meanwhile"
        self._take(state.generation, result)
        self._judge(state)
        self._save()
        return "ok"

    def _take(self, generation: int, result: Result) -> None:
        with self._lock:
            if generation != self._window.generation:
                self._window = Window(generation)
            self._window.results = [*self._window.results, result][-self.plan.window :]

    def _noisy(self) -> bool:
        """The endpoint's dense answers differ among themselves by more than the bound allows."""
        control = self._window.mean("control")
        return control is not None and control < self.plan.bounds.min_agreement

    def _judge(self, state: DesiredState) -> None:
        bounds, window = self.plan.bounds, self._window
        agreement, rise = window.mean("agreement"), window.mean("nll_increase")
        if len(window.results) < self.plan.min_probes or agreement is None or rise is None:
            return
        if bounds.met(agreement, rise):
            self._breached = False
        crossed = bounds.crossed(agreement, rise)
        if not crossed:
            return
        if not self._breached:
            log.error("canary: %s at generation %d", crossed, state.generation)
        self._breached = True
        if self._noisy():
            self._fail(
                f"{crossed}, but dense answers differ as much among themselves: no step; serve "
                "with deterministic sampling, or lower min_agreement"
            )
            return
        waited = None if self._stepped_at is None else self._clock() - self._stepped_at
        if self.plan.watch_only or (waited is not None and waited < self.plan.cooldown_s):
            return
        self._step(state, crossed)

    def _step(self, state: DesiredState, why: str) -> None:
        plan = self.plan
        assert state.threshold is not None
        if self._stop.is_set():
            # The folder may be another sidecar's by now.
            return
        tokens = max(result.prompt_tokens for result in self._window.results)
        hold = plan.at_ceiling == "hold"
        new = raised(state.threshold, plan.step_mag, plan.ceiling_mag, tokens, hold)
        if new == state.threshold:
            self._fail(
                f"{why} at the ceiling, MAG {plan.ceiling_mag:g}: it holds there"
                if hold
                else f"{why}, and {new} has no step above it; see the engine's log"
            )
            return
        base = base_of(state) or str(state.threshold)
        reason = f"{why} over {len(self._window.results)} probes"
        wish = Wish(new, state.min_context, reason[:500], NAME, _RAISED + base)
        after = self._control.set(wish, etag(state))
        self._stepped_at = self._clock()
        with self._lock:
            self._steps += 1
            self._window = Window(after.generation)
        log.error("canary: %s: %s is in force now", reason, new or "dense")

    def _fail(self, error: str) -> None:
        if error != self._logged:
            log.error("canary: %s", error)
        self._control.tally.error(NAME, error)
        self._error = self._logged = error

    def _run(self) -> None:
        while not self._stop.wait(self.plan.interval_s):
            self.probe()

    def _save(self) -> None:
        """Replaced as a whole; what is lost with it is a window of probes, no threshold."""
        body = {"schema_version": 1, "breached": self._breached, **asdict(self._window)}
        fd, temp = tempfile.mkstemp(prefix=".canary-", dir=self._path.parent)
        try:
            with os.fdopen(fd, "w") as f:
                json.dump(body, f)
            os.replace(temp, self._path)
        except BaseException:
            Path(temp).unlink(missing_ok=True)
            raise

    def _load(self) -> None:
        try:
            with open(self._path, "rb") as f:
                body = json.loads(f.read(_MAX_BYTES))
            if body["schema_version"] != 1:
                raise ValueError(f"schema_version {body['schema_version']!r} is of another release")
            results = [_result(entry) for entry in body["results"]]
            window = Window(int(body["generation"]), results[-self.plan.window :])
            breached = bool(body["breached"])
        except FileNotFoundError:
            return
        except _DAMAGED as e:
            self._fail(f"{STATE_NAME} cannot be read and is begun anew: {e!r}")
            return
        with self._lock:
            self._window, self._breached = window, breached


def _result(entry: Mapping[str, object]) -> Result:
    return Result(
        finite_number(entry["agreement"]),
        finite_number(entry["control"]),
        finite_number(entry["nll_increase"]),
        whole_tokens(entry["prompt_tokens"]),
    )
