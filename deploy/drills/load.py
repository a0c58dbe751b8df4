"""A steady load of completions, and what each answer says about the threshold it was made under."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Fingerprint = Mapping[str, float]
"""Log-probabilities of the likeliest first tokens."""

_TOP = 5
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Ask:
    """One request. wish: value of `blasst_mag` that it brings itself ("off" = dense); None: none.
    salt: keeps its prompt out of the prefix cache."""

    number: int
    prompt: int
    wish: float | str | None = None
    salt: bool = True


@dataclass(frozen=True)
class Answer:
    """status 0: the connection broke. Times of the monotonic clock."""

    ask: Ask
    began: float
    ended: float
    status: int
    fingerprint: Fingerprint
    error: str = ""


def prompts(count: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random token ids, all prompts different from their first token on."""
    rng = random.Random(seed)
    return [[rng.randrange(10, vocabulary) for _ in range(tokens)] for _ in range(count)]


def distance(a: Fingerprint, b: Fingerprint) -> float:
    """The largest difference over tokens that both have; infinite without a common token."""
    common = a.keys() & b.keys()
    return max((abs(a[t] - b[t]) for t in common), default=float("inf"))


class Client:
    """One connection to the engine, made again after an error."""

    def __init__(self, port: int, texts: Sequence[Sequence[int]]) -> None:
        self._port, self._texts = port, texts
        self._connection: http.client.HTTPConnection | None = None

    def send(self, ask: Ask) -> Answer:
        """A connection that breaks is an answer too, of status 0."""
        body: dict[str, Any] = {
            "model": "drill",
            "prompt": self._texts[ask.prompt],
            "max_tokens": 2,
            "temperature": 0,
            "logprobs": _TOP,
            "return_tokens_as_token_ids": True,
        }
        if ask.salt:
            body["cache_salt"] = f"drill-{ask.number}"
        if ask.wish is not None:
            body["vllm_xargs"] = {"blasst_mag": ask.wish}
        began = time.monotonic()
        try:
            status, content = self._post(body, ask.number)
            error = content[:300].decode(errors="replace") if status != 200 else ""
            found = _fingerprint(json.loads(content)) if status == 200 else {}
        except (OSError, http.client.HTTPException, ValueError) as e:
            self.close()
            status, error, found = 0, repr(e), {}
        return Answer(ask, began, time.monotonic(), status, found, error)

    def close(self) -> None:
        """Of the connection; the next `send` makes another."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _post(self, body: Mapping[str, Any], number: int) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, _TIMEOUT_S)
        headers = {"Content-Type": "application/json", "X-Request-Id": f"drill-{number}"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()


def _fingerprint(answer: Mapping[str, Any]) -> Fingerprint:
    (choice,) = answer["choices"]
    return {str(k): float(v) for k, v in choice["logprobs"]["top_logprobs"][0].items()}


class Load:
    """So many clients, each sending one request after the other; a pause after each, in seconds.

    A quarter of the requests brings its own MAG, one of `own`, and a quarter may use the cache.
    """

    def __init__(
        self,
        port: int,
        texts: Sequence[Sequence[int]],
        own: Sequence[float | str],
        clients: int,
        pause_s: float,
        seed: int,
    ) -> None:
        self.answers: list[Answer] = []
        self._port, self._texts, self._own, self._pause_s = port, texts, own, pause_s
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._number = 1_000_000
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the requests under way; `answers` is whole then."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S + 10)

    def _next(self) -> Ask:
        with self._lock:
            self._number += 1
            rng = self._rng
            wish = rng.choice(self._own) if rng.random() < 0.25 else None
            prompt = rng.randrange(len(self._texts))
            return Ask(self._number, prompt, wish, salt=rng.random() < 0.75)

    def _run(self) -> None:
        client = Client(self._port, self._texts)
        while not self._stop.is_set():
            answer = client.send(self._next())
            with self._lock:
                self.answers.append(answer)
            # A dead engine is asked again soon, not in a busy loop.
            self._stop.wait(self._pause_s if answer.status else 0.25)
        client.close()
