"""A server that answers anything: one line that says so, no traceback, nothing false is kept."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blasst.evals.samples import Sample, write_samples
from blasst.evals.store import read_results
from blasst.server.cli import main

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1e308, 1e999, float("nan"), 10**400),
    *("", "x", "\ud800", [], [1], [[]], [None], {}, {"a": 1}, "token_id:1"),
)
PLACES = (
    ("GET", "/v1/models"),
    ("GET", "/version"),
    ("POST", "/detokenize"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/blasst/threshold"),
    ("PUT", "/v1/blasst/threshold"),
    ("GET", "/v1/blasst/status"),
    ("GET", "/metrics"),
)
Message = MutableMapping[str, Any]


def changed(value: Any, rng: random.Random) -> Any:
    """With junk in one place of it, or without that place."""
    if isinstance(value, dict | list) and value and rng.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        copy: Any = value.copy()
        key = rng.choice(keys)
        if rng.random() < 0.15:
            del copy[key]
        else:
            copy[key] = changed(value[key], rng)
        return copy
    return rng.choice(JUNK)


def spoiled(path: str, body: bytes, rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.1:
        return body[: rng.randrange(len(body) + 1)]
    if kind < 0.2:
        return rng.choice([b"[" * 5000, rng.randbytes(50), b""])
    if path == "/metrics":
        lines = body.decode().splitlines()
        i = rng.randrange(len(lines))
        number = rng.choice(["NaN", "+Inf", "-5", "x", "1e999", "9" * 30, ""])
        lines[i] = rng.choice([re.sub(r" \S+$", f" {number}", lines[i]), "", lines[i][:20]])
        return "\n".join(lines).encode()
    if body.startswith(b"data:"):
        events = body.split(b"\n\n")
        i = rng.randrange(len(events) - 2)
        events[i] = b"data: " + json.dumps(changed(json.loads(events[i][5:]), rng)).encode()
        return b"\n\n".join(events)
    return json.dumps(changed(json.loads(body), rng)).encode()


class Liar:
    """Between a server and the network: spoils the answers of one place from the at-th on."""

    def __init__(self, app: Any, seed: int) -> None:
        self.app, self.rng = app, random.Random(seed)
        self.place = PLACES[seed % len(PLACES)]
        self.at = self.rng.choice((1, 1, 2, 3, 5, 8))

    async def __call__(
        self, scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]
    ) -> None:
        start: Message = {}
        body = b""

        async def spoil(message: Message) -> None:
            nonlocal body, start
            if message["type"] == "http.response.start":
                start = message
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            if (scope["method"], scope["path"]) == self.place:
                self.at -= 1
                if self.at <= 0:
                    body = spoiled(scope["path"], body, self.rng)
            headers = [h for h in start["headers"] if h[0] != b"content-length"]
            headers.append((b"content-length", str(len(body)).encode()))
            await send({**start, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        await self.app(scope, receive, spoil)


@pytest.fixture
def lying(
    fake_module: ModuleType, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], Any]:
    honest = fake_module.create_app

    @contextmanager
    def serve(seed: int) -> Iterator[str]:
        monkeypatch.setattr(fake_module, "create_app", lambda f: Liar(honest(f), seed))
        with fake_module.serving(fake) as url:
            yield url

    return serve


@pytest.mark.parametrize("seed", range(24))
def test_whatever_a_server_answers_is_one_line(
    seed: int,
    lying: Any,
    tmp_path: Path,
    samples: list[Sample],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, out = tmp_path / "s", tmp_path / "r"
    write_samples(file, iter(samples[:2]))
    with lying(seed) as url:
        argv = ["ruler", "run", "--samples", str(file), "--out", str(out), "--url", url]
        argv += ["--sidecar", url, "--mag", "dense", "1000", "--settle", "0.2", "--timed", "1"]
        code = main(
            [*argv, "--concurrency", "2", "--timeout", "5", "--report", str(tmp_path / "p")]
        )
    said = capsys.readouterr()
    assert code in (0, 1, 2)
    if code:
        line = said.err.splitlines()[-1]
        assert line.startswith("blasst: error: ")
        assert len(line) < 1500
    for record in read_results(out) if out.exists() else ():
        if record["kind"] == "sample":
            assert 0 <= record["skipped"] <= record["visited"]
            assert (record.get("gold_nll") or 0) >= 0
