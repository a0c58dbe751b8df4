"""The sidecar's side of a drill: changes that may meet a dead sidecar, and everybody who looks."""

from __future__ import annotations

import http.client
import json
import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blasst.deploy.drills.history import Lambda, Seen, Write
from blasst.kernels.exchange.desired import DesiredReader, DesiredState
from blasst.kernels.exchange.layout import FRONT
from blasst.kernels.exchange.stats import iter_stats
from blasst.kernels.threshold import SkipThreshold

PATH = "/v1/blasst/threshold"
_TIMEOUT_S = 10.0
_FILE_EVERY_S = 0.005
_API_EVERY_S = 0.25
_PAGES_EVERY_S = 0.5
_COUNTERS_EVERY_S = 1.5


def call(port: int, method: str, path: str = PATH, body: Any = None) -> tuple[int, Any]:
    """(status, JSON). Raises OSError or HTTPException when nobody answers."""
    data = json.dumps(body).encode() if body is not None else None
    status, content = _exchange(port, method, path, data)
    return status, json.loads(content)


def metric(port: int, name: str) -> float:
    """The sum of all series of this name. Raises OSError or HTTPException when nobody answers."""
    text = _exchange(port, "GET", "/metrics", None)[1].decode()
    return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M)))


def _exchange(port: int, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json", "If-Match": "*"}
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def lambda_of(mag: float | None) -> Lambda:
    """None: dense."""
    return None if mag is None else SkipThreshold("mag", mag).skip_lambda()


def plain_lambda(state: DesiredState) -> Lambda:
    """Of a state whose threshold is dense or a MAG, as all of a drill are; RuntimeError if not."""
    if state.threshold is None:
        return None
    if not isinstance(state.threshold, SkipThreshold):
        raise RuntimeError(f"{state} is not of this drill")
    return state.threshold.skip_lambda()


def change(port: int, mag: float | None) -> Write:
    """Ask once; an answer that does not come leaves open whether it happened.

    Raises RuntimeError for an answer that is neither done nor accepted."""
    body = {"off": True} if mag is None else {"mag": mag}
    began = time.monotonic()
    try:
        status, state = call(port, "PUT", body=body)
    except (OSError, http.client.HTTPException, ValueError):
        return Write(lambda_of(mag), began, time.monotonic(), None)
    ended = time.monotonic()
    if status not in (200, 202):
        raise RuntimeError(f"the sidecar refused {body}: {status} {state}")
    return Write(lambda_of(mag), began, ended, int(state["generation"]))


def converged(port: int, timeout_s: float) -> float:
    """Seconds until every live front end follows, at least one being there.

    Raises TimeoutError."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        try:
            state = call(port, "GET")[1]
            if state["converged"] and state["front_ends"]:
                return time.monotonic() - began
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            pass  # it is being restarted; the deadline counts
        time.sleep(0.02)
    raise TimeoutError(f"no front end follows after {timeout_s:.0f} s")


class Watchers:
    """Threads that look at the file, the API and the pages until `stop`.

    seen: what they saw. shrunk: counters that fell although their sum may only rise.
    """

    def __init__(self, state: Path, port: int) -> None:
        self.seen: list[Seen] = []
        self.shrunk: list[str] = []
        self.file_errors = 0
        self._state, self._port = state, port
        self._last: dict[str, list[Seen]] = {}
        self._reader = DesiredReader(state)
        self._tiles = (0, 0)
        self._stop = threading.Event()
        looks: tuple[tuple[Callable[[], None], float], ...] = (
            (self._look_at_file, _FILE_EVERY_S),
            (self._look_at_api, _API_EVERY_S),
            (self._look_at_pages, _PAGES_EVERY_S),
            (self._look_at_counters, _COUNTERS_EVERY_S),
        )
        self._threads = [
            threading.Thread(target=self._repeat, args=look, daemon=True) for look in looks
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the threads; `seen` is whole then."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        for pairs in self._last.values():
            self.seen += pairs
        self.file_errors = self._reader.errors

    def _repeat(self, look: Callable[[], None], every_s: float) -> None:
        while not self._stop.wait(every_s):
            look()

    def _note(self, pair: Seen) -> None:
        """Of looks that saw the same the first and the last are kept: they say it all."""
        pairs = self._last.setdefault(pair.observer, [])
        if len(pairs) == 2 and pairs[0].generation == pair.generation == pairs[1].generation:
            if (pairs[0].skip_lambda, pairs[1].skip_lambda) == (pair.skip_lambda,) * 2:
                pairs.pop()
        elif len(pairs) == 2:
            self.seen.append(pairs.pop(0))
        pairs.append(pair)

    def _look_at_file(self) -> None:
        began = time.monotonic()
        state = self._reader.current()
        pair = state.generation, plain_lambda(state)
        self._note(Seen("file", began, time.monotonic(), *pair))

    def _look_at_api(self) -> None:
        began = time.monotonic()
        try:
            status, state = call(self._port, "GET")
        except (OSError, http.client.HTTPException, ValueError):
            return  # being restarted
        if status == 200:
            pair = int(state["generation"]), state["lambda"]
            self._note(Seen("api", began, time.monotonic(), *pair))

    def _look_at_pages(self) -> None:
        began = time.monotonic()
        for page in iter_stats(self._state / "stats", FRONT):
            if page.alive:
                value = page.scalar("threshold_lambda")
                pair = int(page.scalar("generation_read")), None if math.isnan(value) else value
                # A page is written twice a second by a thread of a busy process.
                self._note(Seen(page.name, began, time.monotonic(), *pair, math.inf))

    def _look_at_counters(self) -> None:
        try:
            visited, skipped = (
                int(metric(self._port, f"blasst_tiles_{kind}_total"))
                for kind in ("visited", "skipped")
            )
        except (OSError, http.client.HTTPException):
            return  # being restarted
        if visited < self._tiles[0] or skipped < self._tiles[1]:
            self.shrunk.append(f"tiles fell from {self._tiles} to {visited}, {skipped}")
        self._tiles = visited, skipped

    @property
    def tiles(self) -> tuple[int, int]:
        """(visited, skipped) of all ranks that ever were."""
        return self._tiles
