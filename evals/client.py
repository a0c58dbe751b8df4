"""The OpenAI-compatible completions endpoint, with token ids in and a measured first token out.

Every request carries its own cache_salt, so that no prefix cache shortens a prefill.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blasst.evals.connection import base_url, bearer, connect
from blasst.evals.errors import MALFORMED, InputError, ServerError
from blasst.evals.metrics import gold_nll

if TYPE_CHECKING:
    import httpx

XArgs = Mapping[str, float | str]


@dataclass(frozen=True)
class ServedModel:
    """What the server says of itself: all of it goes into the fingerprint of a result."""

    name: str
    root: str
    max_model_len: int | None
    version: str


@dataclass(frozen=True)
class Generation:
    """ttft_s: from sending the request to the first chunk with text (or, for an answer of no
    text, the one that ends it); seconds on this side of the connection."""

    text: str
    ttft_s: float
    total_s: float
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    tokens: tuple[str, ...] = ()
    """Of the answer, where they were asked for and the server gives them: `token_id:N`."""


class AnswerStream:
    """Puts one streamed answer together; `take` each line with the clock of its arrival.
    max_tokens: of the answer. timeout_s: for all of it, however many events come."""

    def __init__(
        self, url: str, sent_tokens: int, max_tokens: int, start: float, timeout_s: float
    ) -> None:
        self._url, self._sent, self._start = url, sent_tokens, start
        self._max_tokens, self._timeout_s = max_tokens, timeout_s
        self._parts: list[str] = []
        self._tokens: list[str] = []
        self._ttft: float | None = None
        self._finish = ""
        self._usage: Mapping[str, Any] = {}

    def take(self, line: str, now: float) -> None:
        """A line of server-sent events. Raises ServerError when the time is up, whatever comes:
        gateways send comments to keep a connection alive."""
        if now - self._start > self._timeout_s:
            raise ServerError(
                f"{self._url} had not ended its answer after {self._timeout_s:g} s; raise --timeout"
            )
        event = event_of(line)
        if event is None:
            return
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            text, ended = choice.get("text") or "", choice.get("finish_reason") or ""
            if self._ttft is None and (text or ended):
                self._ttft = now - self._start
            self._parts.append(text)
            self._tokens += (choice.get("logprobs") or {}).get("tokens") or ()
            self._finish = ended or self._finish

    def answer(self, now: float) -> Generation:
        """Raises ServerError when the stream ended early or the prompt was not read as sent."""
        if self._ttft is None or not self._finish:
            raise ServerError(f"the stream from {self._url} ended before the answer did")
        prompt_tokens = int(self._usage.get("prompt_tokens", self._sent))
        if prompt_tokens != self._sent:
            raise ServerError(
                f"the server counted {prompt_tokens} prompt tokens of {self._sent} sent: it adds "
                "or cuts tokens"
            )
        completion_tokens = int(self._usage.get("completion_tokens", 0))
        if not 0 <= max(completion_tokens, len(self._tokens)) <= self._max_tokens:
            raise ServerError(
                f"the server answered {max(completion_tokens, len(self._tokens))} tokens of "
                f"{self._max_tokens} asked for: it ignores max_tokens"
            )
        return Generation(
            text="".join(self._parts),
            ttft_s=self._ttft,
            total_s=now - self._start,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            finish_reason=self._finish,
            tokens=tuple(self._tokens),
        )


class Completions:
    """One server, one model, one request at a time."""

    def __init__(self, url: str, *, timeout_s: float = 600.0, api_key: str = "") -> None:
        if not 0 < timeout_s < float("inf"):
            raise InputError(f"--timeout {timeout_s:g}: give seconds above 0")
        self.url = base_url(url, "--url", "http://127.0.0.1:8000")
        self.timeout_s, self.headers = timeout_s, bearer(api_key)
        self._http = connect(self.url, self.headers, timeout_s)

    def close(self) -> None:
        self._http.close()

    def model(self, name: str | None = None) -> ServedModel:
        """The served model; `name` must be among those served. Raises InputError if it is not."""
        with self.errors():
            response = self._http.get("/v1/models")
            served = self._json(response)["data"]
            found = next((m for m in served if name in (None, m["id"])), None)
            if found is None:
                names = ", ".join(str(m["id"]) for m in served) or "none"
                raise InputError(f"{self.url} serves {names}, not {name!r}; correct --served-model")
            limit = found.get("max_model_len")
            return ServedModel(
                name=str(found["id"]),
                root=str(found.get("root") or found["id"]),
                max_model_len=int(limit) if limit else None,
                version=self._version(),
            )

    def _version(self) -> str:
        with self.errors():
            response = self._http.get("/version")
        try:
            return str(response.json()["version"]) if response.status_code == 200 else ""
        except MALFORMED:
            return ""

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Any JSON endpoint. Raises ServerError unless it answers 200."""
        with self.errors():
            answer: dict[str, Any] = self._json(self._http.post(path, json=dict(body)))
            return answer

    def metrics(self) -> str:
        """vLLM's Prometheus page; empty where there is none."""
        with self.errors():
            response = self._http.get("/metrics")
            return response.text if response.status_code == 200 else ""

    def detokenize(self, model: str, ids: Sequence[int]) -> str | None:
        """What the server's own tokenizer makes of ids; None where it has no such endpoint."""
        with self.errors():
            response = self._http.post("/detokenize", json={"model": model, "tokens": list(ids)})
            if response.status_code in (404, 405):
                return None
            return str(self._json(response)["prompt"])

    def generate(
        self, model: str, prompt: Sequence[int], max_tokens: int, xargs: XArgs | None = None
    ) -> Generation:
        """Greedy text that continues the prompt; TTFT is taken from the stream."""
        return self._stream(streamed(request_body(model, prompt, max_tokens, xargs)), len(prompt))

    def generate_from_text(self, model: str, text: str, tokens: int, max_tokens: int) -> Generation:
        """As generate(), of a text that the server's tokenizer turns into so many tokens."""
        body = streamed(request_body(model, (), max_tokens))
        return self._stream(body | {"prompt": text, "add_special_tokens": False}, tokens)

    def _stream(self, body: Mapping[str, Any], sent: int) -> Generation:
        with self.errors():
            most, start = int(body["max_tokens"]), time.perf_counter()
            stream = AnswerStream(self.url, sent, most, start, self.timeout_s)
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                self.check(response)
                for line in response.iter_lines():
                    stream.take(line, time.perf_counter())
            return stream.answer(time.perf_counter())

    def gold_nll(
        self, model: str, prompt: Sequence[int], gold: Sequence[int], xargs: XArgs | None = None
    ) -> float:
        """Mean -ln p of the gold tokens (nats a token), as the end of the prompt.

        The gold tokens are then part of the prefill, so they run under the threshold as well.
        """
        body = scored(request_body(model, [*prompt, *gold], 1, xargs))
        with self.errors():
            response = self._http.post("/v1/completions", json=body)
            choice = self._json(response)["choices"][0]
            return gold_nll(choice.get("prompt_logprobs"), len(prompt), gold)

    @contextmanager
    def errors(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.ConnectError as e:
            raise ServerError(
                f"no server at {self.url} ({e}); start `blasst serve MODEL` or correct --url"
            ) from e
        except httpx.TimeoutException as e:
            raise ServerError(
                f"{self.url} gave no answer within {self._http.timeout.read:g} s; raise --timeout"
            ) from e
        except httpx.HTTPError as e:
            raise ServerError(f"{self.url} broke off ({e!r}); see the server's log") from e
        except MALFORMED as e:
            raise ServerError(
                f"{self.url} does not answer as an OpenAI-compatible server: {e!r}"
            ) from e

    def _json(self, response: httpx.Response) -> Any:
        self.check(response)
        return response.json()

    def check(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        raise ServerError(f"{self.url} refused: HTTP {response.status_code}: {_reason(response)}")


def _reason(response: httpx.Response) -> str:
    """The server's own words, on one line."""
    try:
        body = response.json()
        found = body.get("error", body)
        text = found.get("message") or found.get("detail") or found.get("title") or str(found)
    except MALFORMED:
        text = response.text
    return " ".join(str(text).split())[:400]


def request_body(
    model: str, prompt: Sequence[int], max_tokens: int, xargs: XArgs | None = None
) -> dict[str, Any]:
    """Greedy, with a cache salt of its own."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "cache_salt": uuid.uuid4().hex,
    }
    return body | {"vllm_xargs": dict(xargs)} if xargs else body


def streamed(body: Mapping[str, Any], *, tokens: bool = False) -> dict[str, Any]:
    """tokens: ask for the answer's token ids too (vLLM computes their logprobs for it)."""
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if tokens:
        more |= {"logprobs": 0, "return_tokens_as_token_ids": True}
    return {**body, **more}


def scored(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "prompt_logprobs": 0}


def event_of(line: str) -> dict[str, Any] | None:
    """The JSON of a line of server-sent events; None for what is no event, or the last one."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return None
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise ServerError(f"the server failed in the middle of an answer: {event['error']}")
    return event
