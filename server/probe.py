"""One probe: a prompt answered dense and as deployed, both greedy, and how far the two agree.

No reference answer is needed: what dense attention says is the measure. The address is fixed in a
file of the operator; nothing that a caller sends leads here.
"""

from __future__ import annotations

import http.client
import json
import math
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blasst.server.outbound import opener, read_bounded

_MAX_ANSWER_BYTES = 8 << 20
_TOP = 5
_DENSE = {"vllm_xargs": {"blasst_mag": "off"}}


class ProbeError(Exception):
    """The endpoint did not answer, or not as vLLM does; the message says which."""


@dataclass(frozen=True)
class Prompt:
    """Exactly one of text (or token ids) and chat messages, as of the completion APIs."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Position:
    """One generated token: its own ln p, and those of the likeliest tokens there."""

    token: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """What vLLM generated, and the length of the prompt in its tokens."""

    positions: tuple[Position, ...]
    prompt_tokens: int


@dataclass(frozen=True)
class Result:
    """agreement: share of the dense answer's tokens before the first difference, 0..1. control: the
    same of a second dense answer, which is what the endpoint itself varies by. nll_increase: mean
    rise of -ln p of the dense answer's tokens up to the first difference, nats a token."""

    agreement: float
    control: float
    nll_increase: float
    prompt_tokens: int


@dataclass(frozen=True)
class Endpoint:
    """vLLM's OpenAI-compatible server. url: base address. model "": the first that it names."""

    url: str
    model: str = ""
    api_key: str = field(default="", repr=False)
    timeout_s: float = 120.0

    def probe(self, prompt: Prompt, max_tokens: int) -> Result:
        """Three requests. Raises ProbeError."""
        # A salt of its own keeps cached prefixes of other requests out of what is measured.
        body = {
            "model": self.model or self._first_model(),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_tokens_as_token_ids": True,
            "cache_salt": secrets.token_hex(16),
        }
        dense = self._ask(prompt, {**body, **_DENSE})
        return compare(
            dense, self._ask(prompt, body), self._ask(prompt, {**body, **_DENSE}).positions
        )

    def _ask(self, prompt: Prompt, body: dict[str, Any]) -> Answer:
        if prompt.messages is None:
            sent = {**body, "prompt": prompt.prompt, "logprobs": _TOP}
            answer = self._call("/v1/completions", sent)
        else:
            sent = {**body, "messages": prompt.messages, "logprobs": True, "top_logprobs": _TOP}
            answer = self._call("/v1/chat/completions", sent)
        try:
            return _read_answer(answer)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as e:
            raise ProbeError(
                f"the answer of {self.url} lacks what vLLM answers with logprobs: {e!r}"
            ) from e

    def _first_model(self) -> str:
        try:
            return str(self._call("/v1/models", None)["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as e:
            raise ProbeError(f"{self.url} names no model; give `model`") from e

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with opener().open(request, timeout=self.timeout_s) as answer:
                found = json.loads(read_bounded(answer, _MAX_ANSWER_BYTES, self.timeout_s))
        except urllib.error.HTTPError as e:
            with e:
                told = e.read(300).decode(errors="replace")
            raise ProbeError(f"{self.url}{path} answers HTTP {e.code}: {told}") from None
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as e:
            raise ProbeError(f"no usable answer from {self.url}{path}: {e}") from e
        if not isinstance(found, dict):
            raise ProbeError(f"{self.url}{path} answers no JSON object")
        return found


def compare(dense: Answer, deployed: Answer, again: Sequence[Position]) -> Result:
    """again: of a second dense request. Raises ProbeError for an empty dense answer."""
    tokens = [p.token for p in dense.positions]
    if not tokens:
        raise ProbeError("the dense answer is empty; probe with prompts that are answered")
    same = _same(tokens, deployed.positions)
    rises = [
        was.logprob - _logprob(now, was.token)
        for was, now in zip(dense.positions[: same + 1], deployed.positions, strict=False)
    ]
    return Result(
        agreement=same / len(tokens),
        control=_same(tokens, again) / len(tokens),
        nll_increase=sum(rises) / len(rises) if rises else 0.0,
        prompt_tokens=dense.prompt_tokens,
    )


def _same(tokens: Sequence[str], positions: Sequence[Position]) -> int:
    """How many tokens come before the first difference."""
    for number, (token, position) in enumerate(zip(tokens, positions, strict=False)):
        if token != position.token:
            return number
    return min(len(tokens), len(positions))


def _logprob(position: Position, token: str) -> float:
    """ln p of a token there; of one that is not among the likeliest, the bound that they are."""
    if token == position.token:
        return position.logprob
    return position.top.get(token, min(position.top.values(), default=position.logprob))


def _read_answer(answer: Mapping[str, Any]) -> Answer:
    found = answer["choices"][0]["logprobs"]
    if "content" in found:
        rows = [
            (row["token"], row["logprob"], {t["token"]: t["logprob"] for t in row["top_logprobs"]})
            for row in found["content"]
        ]
    else:
        rows = list(
            zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        )
    positions = []
    for token, logprob, top in rows:
        values = {str(key): float(value) for key, value in (top or {}).items()}
        for name, value in ((token, float(logprob)), *values.items()):
            if not math.isfinite(value):
                raise ValueError(f"ln p of {name} is {value}")
        positions.append(Position(str(token), float(logprob), values))
    return Answer(tuple(positions), whole_tokens(answer["usage"]["prompt_tokens"]))


def whole_tokens(value: object) -> int:
    """A prompt's length. Raises ValueError for what is none: a scale is divided by it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no number of prompt tokens")
    return value
