"""The sidecar as a client sees it: set the threshold, wait until it is in force, read counters."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blasst.evals.connection import base_url, bearer, connect
from blasst.evals.errors import MALFORMED, ServerError
from blasst.evals.identity import Engine
from blasst.kernels.threshold import SkipThreshold

if TYPE_CHECKING:
    import httpx

_PATH = "/v1/blasst/threshold"
_SAMPLE = re.compile(r"^(\w+)\{(.*)\} ([^ ]+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_POLL_S = 0.1

Layers = dict[int, tuple[int, int]]


@dataclass(frozen=True)
class Setting:
    """The threshold that the deployment wants (None = dense), and whether it is in force.
    schedule: its steps as a PUT takes them, if it has a threshold for each prompt length. reason:
    of whoever set it. own_min_context: of the engine, in force where min_context is None; None:
    it does not say."""

    generation: int
    threshold: SkipThreshold | None
    min_context: int | None
    converged: bool
    schedule: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""
    own_min_context: int | None = None


@dataclass(frozen=True)
class Counters:
    """Totals since the server started. *_tokens: prefilled tokens as each rank counts them, once.
    layers: layer -> (visited, skipped) P.V tiles over all kv heads and ranks."""

    vote_tokens: int
    dense_tokens: int
    layers: Layers

    @property
    def visited(self) -> int:
        return sum(visited for visited, _ in self.layers.values())

    @property
    def skipped(self) -> int:
        return sum(skipped for _, skipped in self.layers.values())

    def since(self, before: Counters) -> Counters:
        """What was added after `before`."""
        zero = (0, 0)
        layers = {
            layer: (v - before.layers.get(layer, zero)[0], s - before.layers.get(layer, zero)[1])
            for layer, (v, s) in self.layers.items()
        }
        return Counters(
            self.vote_tokens - before.vote_tokens, self.dense_tokens - before.dense_tokens, layers
        )


class Sidecar:
    """One `blasst serve` deployment's control endpoint."""

    def __init__(self, url: str, *, token: str = "", timeout_s: float = 30.0) -> None:
        self.url = base_url(url, "--sidecar", "http://127.0.0.1:8300")
        self._http = connect(self.url, bearer(token), timeout_s)

    def close(self) -> None:
        self._http.close()

    def get(self) -> Setting:
        with self._errors():
            return _setting(self._ok(self._http.get(_PATH)).json())

    def put(
        self,
        threshold: SkipThreshold | None,
        *,
        min_context: int | None = None,
        reason: str = "",
        schedule: tuple[Mapping[str, Any], ...] = (),
    ) -> Setting:
        """Ask for a threshold, or a schedule (then threshold is None), on top of the generation
        read just before (If-Match)."""
        body: dict[str, Any] = {"off": True}
        if schedule:
            body = {"schedule": list(schedule)}
        elif threshold is not None:
            body = {threshold.unit: threshold.value}
        if min_context is not None:
            body["min_context"] = min_context
        if reason:
            body["reason"] = reason
        with self._errors():
            current = self._ok(self._http.get(_PATH))
            etag = current.headers.get("etag") or f'"{current.json()["generation"]}"'
            response = self._http.put(_PATH, json=body, headers={"If-Match": etag})
            if response.status_code == 412:
                raise ServerError(
                    f"{self.url}: another client changed the threshold at the same moment; run "
                    "one sweep at a time against a server"
                )
            setting = _setting(self._ok(response).json())
        if (setting.threshold, setting.schedule) != (threshold, schedule):
            raise ServerError(
                f"{self.url} accepted {threshold or 'dense'} but now wants "
                f"{setting.threshold or 'dense'}: it ignores what it is told"
            )
        if setting.min_context != min_context:
            raise ServerError(
                f"{self.url} accepted min_context {min_context} but now has "
                f"{setting.min_context}: it ignores what it is told"
            )
        return setting

    def wait_converged(self, generation: int, timeout_s: float) -> Setting:
        """Until every front end has this generation in force. Raises ServerError if one has not."""
        deadline = time.monotonic() + timeout_s
        while True:
            setting = self.get()
            if setting.generation != generation:
                raise ServerError(
                    f"the threshold changed under the sweep: generation {setting.generation} "
                    f"instead of {generation}; run one sweep at a time against a server"
                )
            if setting.converged:
                return setting
            if time.monotonic() >= deadline:
                raise ServerError(
                    f"generation {generation} of the threshold is not in force after "
                    f"{timeout_s:g} s: a front end still gives requests an older one; is "
                    f"{self.url} the sidecar of this server?"
                )
            time.sleep(_POLL_S)

    def counters(self) -> Counters:
        with self._errors():
            return parse_counters(self._ok(self._http.get("/metrics")).text)

    def version(self) -> str:
        """The server's blasst, as its metrics say; empty when they do not."""
        with self._errors():
            text = self._ok(self._http.get("/metrics")).text
        found = re.search(r'^blasst_build_info\{(?:.*,)?version="([^"]*)"', text, re.MULTILINE)
        return found[1] if found else ""

    def engine(self) -> Engine:
        """What its ranks say of themselves."""
        with self._errors():
            return Engine.of(self._ok(self._http.get("/v1/blasst/status")).json()["ranks"])

    def impl(self) -> str:
        """What computes attention on every rank. Raises ServerError when ranks differ."""
        with self._errors():
            ranks = self._ok(self._http.get("/v1/blasst/status")).json()["ranks"]
            found = {str(rank["impl"]) for rank in ranks if rank.get("alive", True)}
        if len(found) != 1:
            names = ", ".join(sorted(found)) or "none"
            raise ServerError(f"the ranks of {self.url} run {names}; one impl is needed")
        return found.pop()

    def settled(self, before: Counters, prompt_tokens: int, timeout_s: float) -> Counters:
        """The counters once they show that `prompt_tokens` were prefilled after `before`.

        Counters are published every half second or so, never on demand, tokens not before their
        tiles. Returns what there is when the time is up; the caller judges it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            now = self.counters()
            done = now.since(before)
            if done.vote_tokens + done.dense_tokens >= prompt_tokens:
                return now
            if time.monotonic() >= deadline:
                return now
            time.sleep(_POLL_S)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.ConnectError as e:
            raise ServerError(
                f"no sidecar at {self.url} ({e}); `blasst serve` starts one, correct --sidecar"
            ) from e
        except httpx.HTTPError as e:
            raise ServerError(f"the sidecar at {self.url} broke off: {e!r}") from e
        except MALFORMED as e:
            raise ServerError(f"{self.url} does not answer as a blasst sidecar: {e!r}") from e

    def _ok(self, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            return response
        try:
            problem = response.json()
            text = problem.get("detail") or problem.get("title") or str(problem)
        except MALFORMED:
            text = response.text
        hint = "; give --token-file" if response.status_code in (401, 403) else ""
        text = " ".join(str(text).split())[:400]
        raise ServerError(f"{self.url} refused: HTTP {response.status_code}: {text}{hint}")


def _setting(body: Mapping[str, Any]) -> Setting:
    raw = body["threshold"]
    live = [front for front in body.get("front_ends") or () if front.get("alive")]
    own = [int(front["min_context"]) for front in live if front.get("min_context") is not None]
    return Setting(
        generation=int(body["generation"]),
        threshold=None if raw is None else SkipThreshold.parse(raw["unit"], raw["value"]),
        min_context=body.get("min_context"),
        converged=bool(body["converged"]),
        schedule=tuple(_step(step) for step in body.get("schedule") or ()),
        reason=str(body.get("reason") or ""),
        own_min_context=max(own, default=None),
    )


def _step(shown: Mapping[str, Any]) -> dict[str, Any]:
    raw = shown["threshold"]
    length = {} if shown["up_to"] is None else {"up_to": shown["up_to"]}
    return {**length, **({"off": True} if raw is None else {raw["unit"]: raw["value"]})}


def parse_counters(text: str) -> Counters:
    """Out of a Prometheus text page. Raises ServerError when it holds no blasst counters at all."""
    layers: dict[int, list[int]] = {}
    tokens: dict[str, dict[str, dict[str, int]]] = {"vote": {}, "dense": {}}
    found = False
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or not match[1].startswith("blasst_"):
            continue
        name, labels = match[1], dict(_LABEL.findall(match[2]))
        if name in ("blasst_tiles_visited_total", "blasst_tiles_skipped_total"):
            pair = layers.setdefault(int(labels["layer"]), [0, 0])
            pair[name == "blasst_tiles_skipped_total"] += int(float(match[3]))
        elif name == "blasst_prefill_tokens_total":
            found = True
            ranks = tokens[labels["path"]].setdefault(labels["engine"], {})
            ranks[labels["rank"]] = int(float(match[3]))
    if not found:
        raise ServerError(
            "the metrics page holds no blasst_prefill_tokens_total: the server does not run the "
            "blasst backend, or no worker has started yet"
        )
    # Every rank of an engine prefills every token: the slowest to report is the one to believe.
    vote, dense = (
        sum(min(ranks.values()) for ranks in tokens[path].values()) for path in ("vote", "dense")
    )
    return Counters(vote, dense, {layer: (v, s) for layer, (v, s) in sorted(layers.items())})
