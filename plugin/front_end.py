"""One vLLM front end: admits requests, and keeps its statistics page up to date.

A daemon thread reads the desired state and writes the page a few times a second, so that
convergence shows while no request comes, and admission never waits for a file.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from array import array
from typing import Any

from blasst.kernels.exchange.desired import DENSE, DesiredReader, DesiredState
from blasst.kernels.exchange.layout import (
    FRONT,
    LAMBDA_CLASSES,
    LENGTH_CLASSES,
    LENGTH_EDGES,
    RANK,
    REQUEST_REASONS,
    TTFT_BUCKETS_S,
    front_fields,
    lambda_class,
    length_class,
    ttft_bucket,
)
from blasst.kernels.exchange.stats import StatsWriter, free_name, iter_stats
from blasst.kernels.threshold import SkipThreshold, lambda_to_mag
from blasst.plugin.admission import AdmissionError, Deployment, Wish, decide, parse_wish
from blasst.plugin.log import logger
from blasst.plugin.settings import MIN_CONTEXT, Settings
from blasst.plugin.stamp import Stamp

_BUCKETS = len(TTFT_BUCKETS_S) + 1
_CELLS = len(LAMBDA_CLASSES) * len(LENGTH_CLASSES)
_LONGEST = (*LENGTH_EDGES, LENGTH_EDGES[-1] + 1)
"""Prompt tokens that stand for each length class where a lambda is shown for it."""


class _Times:
    """Seconds, counted into the flat tables of a front page."""

    def __init__(self) -> None:
        self.count = array("q", bytes(8 * _CELLS))
        self.sum = array("d", bytes(8 * _CELLS))
        self.bucket = array("q", bytes(8 * _CELLS * _BUCKETS))

    def add(self, at: int, seconds: float) -> None:
        self.count[at] += 1
        self.sum[at] += seconds
        self.bucket[at * _BUCKETS + ttft_bucket(seconds)] += 1

    def arrays(self, name: str) -> dict[str, bytes]:
        return {
            f"{name}_count": self.count.tobytes(),
            f"{name}_sum_seconds": self.sum.tobytes(),
            f"{name}_bucket": self.bucket.tobytes(),
        }


def cell(stamp: Stamp, prompt_tokens: int) -> int:
    """Index of a request's (lambda class, length class) in the flat tables of a front page."""
    row = LAMBDA_CLASSES.index(lambda_class(stamp.skip_lambda))
    return row * len(LENGTH_CLASSES) + LENGTH_CLASSES.index(length_class(prompt_tokens))


class FrontEnd:
    """Thread-safe. `refusal`: why no layer can skip, if the configuration alone says so.
    `max_prompt_tokens`: the longest prompt that the engine takes; 0 = unknown."""

    def __init__(
        self,
        settings: Settings,
        model_name: str,
        vllm_version: str,
        refusal: str | None,
        max_prompt_tokens: int = 0,
    ) -> None:
        self.settings = settings
        self.model_name = model_name
        self.refusal = refusal
        self._worker_refusal: str | None = None
        self._saw_ranks = False
        self._reader = DesiredReader(settings.state_dir) if settings.state_dir else None
        self._lock = threading.Lock()
        self._admitted = array("q", bytes(8 * _CELLS))
        self._ttft = _Times()
        self._prefill = _Times()
        self._dense = dict.fromkeys(REQUEST_REASONS, 0)
        self._rejected = 0
        self._generation_stamped = 0
        self._dirty = True
        self._logged_error = ""
        self._max_prompt_tokens = max_prompt_tokens
        self._logged_deployment: Deployment | None = None
        self._page = _open_page(settings, model_name, vllm_version)
        self._stop = threading.Event()
        self._tick()
        self._thread = threading.Thread(target=self._run, name="blasst-front", daemon=True)
        self._thread.start()

    def wish(self, extra_args: Any) -> Wish:
        """What the request asks for. Raises AdmissionError, counted."""
        try:
            return parse_wish(extra_args)
        except AdmissionError:
            self._reject()
            raise

    def wish_of_streamed(self, wish: Wish) -> Wish:
        """Dense, whatever the deployment wants: lambda is fixed for a whole prefill, and a prompt
        that is still coming has no final length. Raises AdmissionError for a threshold, counted."""
        if isinstance(wish, SkipThreshold):
            self._reject()
            raise AdmissionError(
                f"{wish} cannot hold for streamed input, whose prompt has no final length; send "
                "it without blasst_*, or the prompt as a whole"
            )
        if wish is None:
            self.count_dense("streamed_input")
        return "off"

    def count_dense(self, reason: str) -> None:
        """A request that runs dense, if a threshold is in force for the deployment; reason: of
        REQUEST_REASONS."""
        if Deployment.of(self._desired(), self.settings).skips:
            with self._lock:
                self._dense[reason] += 1
                self._dirty = True

    def admit(self, wish: Wish, prompt_tokens: int) -> Stamp:
        """The stamp of a request. Raises AdmissionError, counted."""
        deployment = Deployment.of(self._desired(), self.settings)
        try:
            stamp = decide(wish, deployment, prompt_tokens, self._why_not(wish, deployment))
        except AdmissionError:
            self._reject()
            raise
        asked = deployment.at(prompt_tokens) if wish is None else wish
        with self._lock:
            if stamp.skip_lambda is None and asked not in (None, "off"):
                self._dense["below_min_context"] += 1
            self._admitted[cell(stamp, prompt_tokens)] += 1
            self._generation_stamped = stamp.generation
            self._dirty = True
        return stamp

    def first_token(self, at: int, seconds: float) -> None:
        """Count one time to first token under the cell `at`."""
        with self._lock:
            self._ttft.add(at, seconds)
            self._dirty = True

    def prefill(self, at: int, seconds: float) -> None:
        """Count one time from first being scheduled to the first token."""
        with self._lock:
            self._prefill.add(at, seconds)
            self._dirty = True

    def close(self) -> None:
        """Write the last numbers and stop. The page stays: its counts still hold."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        page, self._page = self._page, None
        if page is not None:
            page.detach()

    def _desired(self) -> DesiredState:
        return self._reader.current() if self._reader is not None else DENSE

    def _why_not(self, wish: Wish, deployment: Deployment) -> str | None:
        if self.refusal is not None:
            return self.refusal
        if wish == "off" or (wish is None and not deployment.skips):
            return None
        if not self._saw_ranks:
            self._look_at_ranks()
        return self._worker_refusal

    def _look_at_ranks(self) -> None:
        # Ranks write their pages before the engine takes requests; on other hosts there are none.
        folder = self.settings.stats_dir
        if folder is None:
            return
        pages = [
            page
            for page in iter_stats(folder, RANK)
            if page.alive and page.labels.get("model_name") == self.model_name
        ]
        self._saw_ranks = bool(pages)
        refusals = [page.labels.get("refusal", "") for page in pages]
        if refusals and all(refusals):
            self._worker_refusal = refusals[0]

    def _reject(self) -> None:
        with self._lock:
            self._rejected += 1
            self._dirty = True

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self.settings.stats_interval_s)):
            self._tick()
        self._tick()

    def _tick(self) -> None:
        desired = self._desired()
        error = self._reader.last_error if self._reader is not None else ""
        if error != self._logged_error:
            self._logged_error = error
            if error:
                logger.error("blasst: %s; generation %d stays in force", error, desired.generation)
        self._log_deployment(Deployment.of(desired, self.settings))
        if self._page is not None:
            if self.settings.state_dir is not None:
                with contextlib.suppress(OSError):
                    self._page.keep()
            self._page.update(**self._arrays(desired))

    def _log_deployment(self, deployment: Deployment) -> None:
        if deployment == self._logged_deployment:
            return
        self._logged_deployment = deployment
        logger.info(
            "blasst: %s is the deployment's threshold (generation %d), for prompts from %d tokens",
            deployment.threshold or "none, dense,",
            deployment.generation,
            deployment.min_context,
        )
        if 0 < self._max_prompt_tokens < deployment.min_context:
            logger.warning(
                "blasst: nothing can skip: min_context is %d and this engine takes prompts of at "
                "most %d tokens; lower min_context (%s, or --min-context of blasst serve)",
                deployment.min_context,
                self._max_prompt_tokens,
                MIN_CONTEXT,
            )

    def _arrays(self, desired: DesiredState) -> dict[str, Any]:
        deployment = Deployment.of(desired, self.settings)
        threshold = deployment.threshold
        skip_lambda = math.nan
        if isinstance(threshold, SkipThreshold) and threshold.unit != "scale":
            skip_lambda = threshold.skip_lambda()
        arrays: dict[str, Any] = {
            "generation_read": desired.generation,
            "desired_read_errors": self._reader.errors if self._reader is not None else 0,
            "threshold_lambda": skip_lambda,
            "threshold_mag": lambda_to_mag(skip_lambda) if skip_lambda > 0 else math.nan,
            "threshold_classes": _class_lambdas(deployment),
        }
        with self._lock:
            arrays["generation_stamped"] = self._generation_stamped
            if self._dirty:
                self._dirty = False
                arrays["requests_rejected"] = self._rejected
                arrays["requests_admitted"] = self._admitted.tobytes()
                arrays["requests_dense"] = tuple(self._dense.values())
                arrays |= self._ttft.arrays("ttft") | self._prefill.arrays("prefill")
        return arrays


@functools.lru_cache(maxsize=8)
def _class_lambdas(deployment: Deployment) -> tuple[float, ...]:
    found = [deployment.class_lambda(tokens) for tokens in _LONGEST]
    return tuple(math.nan if skip_lambda is None else skip_lambda for skip_lambda in found)


def _open_page(settings: Settings, model_name: str, vllm_version: str) -> StatsWriter | None:
    folder = settings.stats_dir
    if folder is None:
        return None
    labels = {
        "pid": str(os.getpid()),
        "model_name": model_name,
        "vllm_version": vllm_version,
        "min_context": str(settings.min_context),
    }
    try:
        name = free_name(folder, f"front-{os.getpid()}")
        return StatsWriter(folder, name, kind=FRONT, labels=labels, fields=front_fields())
    except OSError as e:
        logger.error("blasst: no statistics page in %s (%s); serving goes on", folder, e.strerror)
        return None
