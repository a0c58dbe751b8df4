"""How often callers may write, read and be refused: token buckets on the monotonic clock."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

Clock = Callable[[], float]


@dataclass
class Bucket:
    """`burst` calls at once, then `rate` calls a second. Thread-safe."""

    rate: float
    burst: float
    clock: Clock = time.monotonic
    _left: float = field(init=False)
    _seen: float = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._left, self._seen = self.burst, self.clock()

    def take(self) -> float:
        """0 and one call is used up; else the seconds after which one is there."""
        with self._lock:
            now = self.clock()
            self._left = min(self.burst, self._left + self.rate * (now - self._seen))
            self._seen = now
            if self._left >= 1.0:
                self._left -= 1.0
                return 0.0
            return (1.0 - self._left) / self.rate


class Buckets:
    """One bucket a key, of the `most` keys seen last: a scan of many keys costs no memory."""

    def __init__(
        self, rate: float, burst: float, most: int = 1024, clock: Clock = time.monotonic
    ) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._most = most
        self._of: OrderedDict[Hashable, Bucket] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, key: Hashable) -> float:
        with self._lock:
            bucket = self._of.pop(key, None) or Bucket(self._rate, self._burst, self._clock)
            self._of[key] = bucket
            if len(self._of) > self._most:
                self._of.popitem(last=False)
        return bucket.take()

    def __len__(self) -> int:
        return len(self._of)


@dataclass(frozen=True)
class Limits:
    """Of one sidecar. refused: answers 401 and 403 to one address, counted apart from the rest, so
    that somebody who guesses tokens keeps nobody else from reading or writing."""

    writes: Bucket = field(default_factory=lambda: Bucket(50.0, 500.0))
    reads: Bucket = field(default_factory=lambda: Bucket(200.0, 2000.0))
    refused: Buckets = field(default_factory=lambda: Buckets(1.0, 50.0))


def retry_after(wait_s: float) -> dict[str, str]:
    """The header of a 429: whole seconds, at least 1."""
    return {"Retry-After": str(max(1, math.ceil(wait_s)))}
