"""A stand-in for vLLM with its sidecar on one port: answers, counts as the real pair does, and has
faults on request. As a program it takes the options of `blasst serve` that the demo gives."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

LAYERS = 2
FIRST_TEXT_AFTER_S = 0.03


@dataclass
class Fake:
    """State and faults; `answers` maps a prompt (ids) to what the model says, `texts` to its text
    (None: no such endpoint)."""

    name: str = "fake-model"
    root: str = ""
    version: str = "0.0-fake"
    max_model_len: int = 4096
    min_context: int | None = 512
    own_min_context: int | None = None
    """What its front end was started with, in force where min_context is None."""
    generation: int = 0
    threshold: dict[str, Any] | None = None
    faults: set[str] = field(default_factory=set)
    answers: dict[tuple[int, ...], str] = field(default_factory=dict)
    texts: dict[tuple[int, ...], str] | None = None
    encode: Callable[[str], list[int]] | None = None
    """Reads prompts that come as text (None: refuses them)."""
    vote: int = 0
    dense: int = 0
    visited: list[int] = field(default_factory=lambda: [0] * LAYERS)
    skipped: list[int] = field(default_factory=lambda: [0] * LAYERS)
    prompts: list[dict[str, Any]] = field(default_factory=list)
    puts: list[dict[str, Any]] = field(default_factory=list)
    delay_s: float = 0.0
    curve: tuple[int, int, float, float] | None = None
    """Tiles as a kernel makes them: query heads, tile_m, and a, b of lambda L = a exp(b s)."""
    impl: str = "cpu"
    geometry: str = ""
    served: dict[str, str] = field(default_factory=dict)
    """What its rank says that it computes with."""
    start_id: int = 1
    prefix_tokens: int = 0
    prefix_hits: int = 0
    known: set[tuple[int, ...]] = field(default_factory=set)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lambda_of(self, xargs: dict[str, Any], tokens: int) -> float | None:
        chosen = self.threshold
        for unit in ("mag", "lambda", "scale"):
            if f"blasst_{unit}" in xargs:
                chosen = {"unit": unit, "value": float(xargs[f"blasst_{unit}"])}
        if chosen is None or tokens < self.floor():
            return None
        if chosen["unit"] == "mag":
            return float(2 ** (-chosen["value"] / 1000))
        return float(chosen["value"]) / (tokens if chosen["unit"] == "scale" else 1)

    def floor(self) -> int:
        return self.min_context if self.min_context is not None else self.own_min_context or 0

    def admit(self, body: dict[str, Any]) -> float | None:
        """Count one request; its lambda."""
        with self.lock:
            self.prompts.append(body)
            tokens = len(body["prompt"])
            skip_lambda = self.lambda_of(body.get("vllm_xargs", {}), tokens)
            if "ignores-threshold" in self.faults:
                skip_lambda = None
            if skip_lambda is None:
                self.dense += tokens
            else:
                self.vote += tokens
            if "foreign-traffic" in self.faults:
                self.dense += 100
            if "changes-threshold" in self.faults:
                self.generation += 1
            votes = skip_lambda is not None and "no-tiles" not in self.faults
            if self.curve is not None and votes:
                self.count_tiles(tokens, skip_lambda or 0.0)
                return skip_lambda
            if votes or "dense-tiles" in self.faults:
                for layer in range(LAYERS):
                    self.visited[layer] += tokens
                    self.skipped[layer] += int(tokens * (skip_lambda or 0) * (layer + 1) / LAYERS)
            if "over-skips" in self.faults:
                self.skipped[0] += 10 * tokens
            return skip_lambda

    def count_tiles(self, tokens: int, skip_lambda: float) -> None:
        assert self.curve is not None
        heads, rows, a, b = self.curve
        tiles = sum(-(-min((m + 1) * rows, tokens) // 128) for m in range(-(-tokens // rows)))
        rate = math.log(max(skip_lambda * tokens / a, 1e-9)) / b
        for layer in range(LAYERS):
            self.visited[layer] += heads * tiles
            self.skipped[layer] += int(heads * tiles * min(0.99, max(0.0, rate)))

    def reads(self, prompt: list[int]) -> list[int]:
        """The tokens that the model is given, under a fault other ones than were sent."""
        if "drops-prefix" in self.faults:
            return prompt[: -self.prefix_tokens]
        if "two-starts" in self.faults:
            return [self.start_id, *prompt]
        if "no-start" in self.faults:
            return prompt[1:]
        if "cuts-the-front" in self.faults:
            return [prompt[0], *prompt[200:]]
        if "system-header" in self.faults:
            return [prompt[0], *[90, 91, 92], *prompt[1:]]
        return prompt

    def state(self) -> dict[str, Any]:
        unit = (self.threshold or {}).get("unit")
        value = (self.threshold or {}).get("value")
        return {
            "generation": self.generation,
            "threshold": self.threshold,
            "mag": value if unit == "mag" else None,
            "lambda": None,
            "min_context": self.min_context,
            "converged": "never-converges" not in self.faults,
            "front_ends": [
                {"alive": True, "min_context": self.own_min_context},
                {"alive": False, "min_context": 7},
            ],
            "reason": self.puts[-1].get("reason", "") if self.puts else "",
        }

    def metrics(self) -> str:
        labels = 'engine="0",rank="0",model_name="m"'
        vote = 0 if "frozen-counters" in self.faults else self.vote
        dense = 0 if "frozen-counters" in self.faults else self.dense
        lines = [
            "# TYPE blasst_prefill_tokens_total counter",
            f'blasst_prefill_tokens_total{{path="vote",{labels}}} {float(vote)}',
            f'blasst_prefill_tokens_total{{path="dense",{labels}}} {float(dense)}',
            "process_cpu_seconds_total 1.5",
            'blasst_build_info{version="1.2",vllm_version="0"} 1.0',
        ]
        for kind, values in (("visited", self.visited), ("skipped", self.skipped)):
            for layer, number in enumerate(values):
                tile = f'engine="0",rank="0",layer="{layer}",kv_head="0",model_name="m"'
                lines.append(f"blasst_tiles_{kind}_total{{{tile}}} {float(number)}")
        if "no-cache-metrics" not in self.faults:
            lines.append(f'vllm:prefix_cache_hits_total{{engine="0"}} {float(self.prefix_hits)}')
        return "\n".join(lines) + "\n"


def create_app(fake: Fake) -> FastAPI:
    app = FastAPI()
    _add_vllm(app, fake)
    _add_sidecar(app, fake)
    return app


def _add_vllm(app: FastAPI, fake: Fake) -> None:
    @app.get("/health")
    @app.get("/readyz")
    def health() -> dict[str, str]:
        return {}

    @app.get("/version")
    def version() -> dict[str, str]:
        return {"version": fake.version}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        root = fake.root or "/m/" + fake.name
        card = {"id": fake.name, "root": root, "max_model_len": fake.max_model_len}
        return {"data": [card]}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        if fake.texts is None:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        ids = tuple((await request.json())["tokens"])
        return JSONResponse({"prompt": fake.texts.get(ids, "something else")})

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        if "refuses" in fake.faults:
            error = {"error": {"message": "no room", "code": 400}}
            return JSONResponse(error, status_code=400)
        if isinstance(body["prompt"], str):
            if fake.encode is None:
                error = {"error": {"message": "text is not read here"}}
                return JSONResponse(error, status_code=400)
            body["prompt"] = fake.encode(body["prompt"])
        if len(body["prompt"]) > fake.max_model_len:
            error = {"error": {"message": "This model's maximum context length is exceeded"}}
            return JSONResponse(error, status_code=400)
        skip_lambda = fake.admit(body)
        if "ignores-salts" in fake.faults and tuple(body["prompt"]) in fake.known:
            fake.prefix_hits += len(body["prompt"]) // 16 * 16
        fake.known.add(tuple(body["prompt"]))
        fake.at_once += 1
        fake.most_at_once = max(fake.most_at_once, fake.at_once)
        await asyncio.sleep(fake.delay_s)
        fake.at_once -= 1
        if body.get("stream"):
            return StreamingResponse(_stream(fake, body), media_type="text/event-stream")
        entry = [
            {str(t): {"logprob": -(0.1 + (skip_lambda or 0.0)), "rank": 1, "decoded_token": ""}}
            for t in fake.reads(body["prompt"])
        ]
        scores: list[Any] = [None, *entry[1:]]
        if "cuts-prompts" in fake.faults:
            scores = scores[10:]
        text = fake.answers.get(tuple(body["prompt"]), " nothing")
        return JSONResponse({"choices": [{"text": text, "prompt_logprobs": scores}]})


async def _stream(fake: Fake, body: dict[str, Any]) -> AsyncIterator[str]:
    def event(text: str, finish: str | None = None) -> str:
        choice: dict[str, Any] = {"text": text, "finish_reason": finish}
        if text and body.get("logprobs") == 0:
            choice["logprobs"] = {"tokens": [f"token_id:{zlib.crc32(text.encode())}"]}
        return f"data: {json.dumps({'choices': [choice]})}\n\n"

    yield event("")
    await asyncio.sleep(FIRST_TEXT_AFTER_S)
    if "breaks-off" in fake.faults:
        return
    answer = fake.answers.get(tuple(body["prompt"]), " nothing")
    for start in range(0, len(answer), 16):
        yield event(answer[start : start + 16])
    while "never-ends" in fake.faults:
        await asyncio.sleep(0.05)
        yield event("x")
    while "only-pings" in fake.faults:
        await asyncio.sleep(0.05)
        yield ": ping\n\n"
    if "breaks-off-late" in fake.faults:
        return
    yield event("", "length")
    tokens = len(body["prompt"]) + ("adds-a-token" in fake.faults)
    said = 5 if "ignores-max-tokens" in fake.faults else 0
    usage = {"prompt_tokens": tokens, "completion_tokens": min(5, body["max_tokens"]) + said * 20}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


def _add_sidecar(app: FastAPI, fake: Fake) -> None:
    path = "/v1/blasst/threshold"

    def answer() -> JSONResponse:
        return JSONResponse(fake.state(), headers={"ETag": f'"{fake.generation}"'})

    @app.get(path)
    def get_threshold() -> Response:
        return answer()

    @app.put(path)
    async def put_threshold(request: Request) -> Response:
        body = await request.json()
        if_match = request.headers.get("if-match")
        if if_match is None:
            return JSONResponse({"detail": "Send If-Match."}, status_code=428)
        if if_match != f'"{fake.generation}"' or "loses-races" in fake.faults:
            return JSONResponse({"detail": "stale"}, status_code=412)
        wanted = {u: body[u] for u in ("mag", "lambda", "scale") if u in body}
        same = [{"unit": u, "value": v} for u, v in wanted.items()] == [fake.threshold][
            : bool(fake.threshold)
        ]
        if fake.puts and same and body.get("min_context") == fake.min_context and not fake.faults:
            return answer()  # as the sidecar: no new generation, and the reason of the first
        fake.puts.append(body)
        fake.threshold = None
        for unit, value in wanted.items():
            fake.threshold = {"unit": unit, "value": value}
        if "keeps-its-own" in fake.faults:
            fake.threshold = {"unit": "mag", "value": 9999.0}
        fake.min_context = 7 if "other-context" in fake.faults else body.get("min_context")
        fake.generation += 1
        return answer()

    @app.get("/v1/blasst/status")
    def status() -> dict[str, Any]:
        rank = {"impl": fake.impl, "geometry": fake.geometry, "alive": True}
        return {"ranks": [rank | {"served": fake.served} if fake.served else rank]}

    @app.get("/metrics")
    def metrics() -> Response:
        text = "process_cpu_seconds_total 1.5\n" if "no-blasst" in fake.faults else fake.metrics()
        return PlainTextResponse(text)


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    """The URL while it serves in a thread of this process."""
    config = uvicorn.Config(
        create_app(fake), port=0, log_level="error", lifespan="off", ws="none", access_log=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the fake server did not start")
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def main() -> None:
    """Serve on --port and --sidecar-port, with a child process as vLLM has them."""
    parser = argparse.ArgumentParser()
    for name in ("--port", "--sidecar-port", "--min-context", "--max-model-len"):
        parser.add_argument(name, type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--pid-file")
    args, _ = parser.parse_known_args()
    if "dies" in args.fault:
        sys.exit("fake: Error: no such model")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def end(number: int, frame: object) -> None:
        child.kill()
        os._exit(0)

    if "leaves-orphans" not in args.fault:
        signal.signal(signal.SIGTERM, end)
    if args.pid_file:
        with open(args.pid_file, "a") as f:
            f.write(f"{os.getpid()} {child.pid} ")
    fake = Fake(
        name=args.served_model_name,
        max_model_len=args.max_model_len,
        min_context=args.min_context,
        faults=set(args.fault),
        delay_s=0.02,
    )
    app = create_app(fake)
    configs = [
        uvicorn.Config(app, port=port, log_level="error", lifespan="off", ws="none")
        for port in (args.port, args.sidecar_port)
    ]
    servers = [uvicorn.Server(c) for c in configs]
    threads = [threading.Thread(target=s.run, daemon=True) for s in servers]
    for thread in threads:
        thread.start()
    threads[0].join()


if __name__ == "__main__":
    main()
