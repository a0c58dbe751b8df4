"""Client of the sidecar's threshold API for the command line; standard library only."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blasst.kernels.exchange.schedule import Schedule, Step, Threshold
from blasst.server.outbound import opener
from blasst.server.settings import SettingsError, check_url, read_token

PATH = "/v1/blasst/threshold"
_SHOWN = {"generation", "threshold", "lambda", "converged", "front_ends"}
_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 4 << 20


class ApiError(Exception):
    """The sidecar cannot be reached or refused; the message says which. status 0: no answer.

    kind: the last part of the problem's `type`; empty for what is no problem of a sidecar."""

    def __init__(self, status: int, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass(frozen=True)
class Target:
    """A skip rate that a preset of the sidecar turns into a threshold; preset "": the one that
    fits."""

    skip_rate: float
    preset: str = ""


@dataclass(frozen=True)
class ThresholdClient:
    """url: base address of the sidecar, http or https. token: empty for none."""

    url: str
    token: str = ""
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, url: str, token_file: Path | None, ca_file: Path | None = None) -> ThresholdClient:
        """ca_file: PEM certificates to trust instead of the system's. Raises SettingsError for a
        bad address or an unusable file."""
        base = check_url(url, "url")
        try:
            tls = ssl.create_default_context(cafile=ca_file) if ca_file else None
        except OSError as e:
            raise SettingsError(f"--ca-file {ca_file} cannot be used: {e.strerror or e}") from e
        return cls(base, read_token(token_file) if token_file else "", tls)

    def get(self) -> dict[str, Any]:
        return self._call("GET", {})

    def put(
        self,
        threshold: Threshold | Target | None,
        *,
        if_match: str,
        min_context: int | None = None,
        reason: str = "",
    ) -> dict[str, Any]:
        """threshold None = dense."""
        body: dict[str, Any]
        if isinstance(threshold, Target):
            body = {"target_skip_rate": threshold.skip_rate}
            if threshold.preset:
                body["preset"] = threshold.preset
        elif threshold is None:
            body = {"off": True}
        elif isinstance(threshold, Schedule):
            body = {"schedule": [_step(step) for step in threshold.steps]}
        else:
            body = {threshold.unit: threshold.value}
        if min_context is not None:
            body["min_context"] = min_context
        if reason:
            body["reason"] = reason
        headers = {"If-Match": if_match, "Content-Type": "application/json"}
        return self._call("PUT", headers, json.dumps(body).encode())

    def wait_converged(self, generation: int, timeout_s: float) -> dict[str, Any]:
        """The last answer seen: converged on this or a later generation, or the time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.get()
            if state["converged"] and state["generation"] >= generation:
                return state
            if time.monotonic() >= deadline:
                return state
            time.sleep(0.2)

    def _call(
        self, method: str, headers: dict[str, str], body: bytes | None = None
    ) -> dict[str, Any]:
        if self.token:
            headers = {**headers, "Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.url + PATH, body, headers, method=method)
        try:
            with opener(self.tls).open(request, timeout=_TIMEOUT_S) as answer:
                state = json.loads(answer.read(_MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as e:
            with e:
                raise _refused(e) from None
        except urllib.error.URLError as e:
            raise ApiError(
                0,
                f"no sidecar answers at {self.url}: {e.reason}; start `blasst serve` or "
                "`blasst sidecar`, or name its address with --url",
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise ApiError(0, f"no usable answer from {self.url}: {e}") from None
        if not isinstance(state, dict) or not state.keys() >= _SHOWN:
            raise ApiError(0, f"what answers at {self.url} is not a blasst sidecar")
        return state


def _step(step: Step) -> dict[str, Any]:
    length = {} if step.up_to is None else {"up_to": step.up_to}
    threshold = step.threshold
    return {**length, **({"off": True} if threshold is None else {threshold.unit: threshold.value})}


def _refused(error: urllib.error.HTTPError) -> ApiError:
    try:
        problem = json.loads(error.read(65_536))
        detail, kind = problem["detail"], str(problem["type"]).rpartition(":")[2]
    except (ValueError, KeyError, TypeError, OSError):
        detail, kind = error.reason, ""
    return ApiError(error.code, f"HTTP {error.code}: {detail}", kind)
