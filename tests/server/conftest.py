"""Statistics pages as two ranks and one or more front ends of vLLM would write them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from blasst.kernels.exchange.layout import (
    FRONT,
    LAMBDA_CLASSES,
    LENGTH_CLASSES,
    RANK,
    TTFT_BUCKETS_S,
    front_fields,
    lambda_class,
    length_class,
    rank_fields,
    ttft_bucket,
)
from blasst.kernels.exchange.stats import StatsWriter
from blasst.kernels.threshold import lambda_to_mag
from blasst.server import cli

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

LAYERS, HEADS = 3, 2


class FakeEngine:
    """One engine of LAYERS layers whose two ranks hold HEADS kv heads each, and its front ends."""

    def __init__(self, stats: Path, model: str = "tiny") -> None:
        stats.mkdir(parents=True, exist_ok=True)
        self.stats = stats
        self.model = model
        self.writers: list[StatsWriter] = []
        self.tables: dict[str, list[list[float]]] = {}

    def rank(
        self,
        rank: int = 0,
        *,
        visited: int = 100,
        engine: int = 0,
        refusal: str = "",
        tiles: str = "128x128",
    ) -> StatsWriter:
        """Layer l skips 10 * (l + 1) % of `visited`, so each row of the heat map differs."""
        writer = StatsWriter(
            self.stats,
            f"rank-{engine}-{rank}-{1000 + rank}",
            kind=RANK,
            labels={
                "engine": str(engine),
                "rank": str(rank),
                "pid": str(1000 + rank),
                "model_name": self.model,
                "impl": "cpu",
                "first_layer": "0",
                "first_kv_head": str(rank * HEADS),
                "refusal": refusal,
                **dict(zip(("tile_m", "tile_n"), tiles.split("x"), strict=False)),
            },
            fields=rank_fields(LAYERS, HEADS),
        )
        counts = [
            n
            for layer in range(LAYERS)
            for _ in range(HEADS)
            for n in (visited, visited * (layer + 1) // 10)
        ]
        writer.update(tiles=counts, prefill_tokens_vote=4096, decode_tokens=7)
        self.writers.append(writer)
        return writer

    def front(self, pid: int = 42, *, generation: int = 0, stamped: int | None = None) -> str:
        writer = StatsWriter(
            self.stats,
            f"front-{pid}",
            kind=FRONT,
            labels={"pid": str(pid), "model_name": self.model, "vllm_version": "0.32.0"},
            fields=front_fields(),
        )
        self.writers.append(writer)
        self.acknowledge(generation, stamped, writer)
        return writer.path.name

    def acknowledge(
        self, generation: int, stamped: int | None = None, writer: StatsWriter | None = None
    ) -> None:
        (writer or self.writers[-1]).update(
            generation_read=generation,
            generation_stamped=generation if stamped is None else stamped,
            threshold_lambda=math.nan,
            threshold_mag=math.nan,
        )

    def requests(self, skip_lambda: float | None, tokens: int, ttfts: list[float]) -> None:
        """Record requests of one class on the front end made last."""
        writer = self.writers[-1]
        row = LAMBDA_CLASSES.index(lambda_class(skip_lambda))
        cell = row * len(LENGTH_CLASSES) + LENGTH_CLASSES.index(length_class(tokens))
        cells, width = len(LAMBDA_CLASSES) * len(LENGTH_CLASSES), len(TTFT_BUCKETS_S) + 1
        admitted, count, total, buckets = self.tables.setdefault(
            writer.path.name,
            [[0] * cells, [0] * cells, [0.0] * cells, [0] * (cells * width)],
        )
        for seconds in ttfts:
            admitted[cell] += 1
            count[cell] += 1
            total[cell] += seconds
            buckets[cell * width + ttft_bucket(seconds)] += 1
        writer.update(
            requests_admitted=admitted,
            ttft_count=count,
            ttft_sum_seconds=total,
            ttft_bucket=buckets,
            threshold_lambda=math.nan if skip_lambda is None else skip_lambda,
            threshold_mag=lambda_to_mag(skip_lambda) if skip_lambda else math.nan,
        )

    def kill(self, name: str) -> Path:
        """Leave the page as a killed writer leaves it: still there, and no longer locked."""
        writer = next(w for w in self.writers if w.path.name == name)
        copy = shutil.copyfile(writer.path, writer.path.with_suffix(".copy"))
        writer.close()
        self.writers.remove(writer)
        return copy.rename(writer.path)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


@pytest.fixture
def fake_engine(tmp_path: Path) -> Iterator[Callable[..., FakeEngine]]:
    """Make engines whose pages lie in `<state folder>/stats`, the state folder being tmp_path."""
    engines: list[FakeEngine] = []

    def make(stats: Path | None = None, model: str = "tiny") -> FakeEngine:
        engines.append(FakeEngine(stats or tmp_path / "stats", model))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


class Process:
    """A `blasst` verb as a real process; its output goes to files, so nothing ever blocks."""

    def __init__(
        self, folder: Path, *arguments: str, env: dict[str, str] | None = None, below: str = ""
    ) -> None:
        """below: Python code of a process to start the verb from; it gets the command."""
        self.out, self.err = folder / "stdout", folder / "stderr"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.popen = subprocess.Popen(
                [
                    *([sys.executable, "-c", below] if below else []),
                    Path(sys.executable).with_name("blasst"),
                    *arguments,
                ],
                stdout=out,
                stderr=err,
                env={**os.environ, **(env or {})},
            )

    def url(self) -> str:
        """The sidecar's address, once it is printed."""
        match = self.output(r"sidecar:? (http://\S+) ")
        return match[1]

    def output(self, pattern: str, timeout_s: float = 30.0) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            match = re.search(pattern, self.out.read_text())
            if match:
                return match
            ended = self.popen.poll() is not None
            assert not ended, f"ended with {self.popen.returncode}: {self.err.read_text()}"
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.out.read_text()!r}"
            time.sleep(0.02)

    def wait(self, timeout_s: float = 30.0) -> int:
        return self.popen.wait(timeout_s)

    def error(self) -> str:
        """The one line that a refused start prints."""
        text = self.err.read_text()
        assert text.startswith("blasst: error: "), text
        assert text.count("\n") == 1, text
        return text


@pytest.fixture
def blasst(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start verbs; whatever still runs at the end is killed."""
    processes: list[Process] = []

    def start(*arguments: object, env: dict[str, str] | None = None, below: str = "") -> Process:
        folder = tmp_path / f"process-{len(processes)}"
        folder.mkdir()
        processes.append(Process(folder, *map(str, arguments), env=env, below=below))
        return processes[-1]

    yield start
    for process in processes:
        process.popen.kill()
        process.popen.wait()


@pytest.fixture
def connect() -> Iterator[Callable[[str], httpx.Client]]:
    """HTTP clients of an address; closed at the end."""
    clients: list[httpx.Client] = []

    def client(url: str) -> httpx.Client:
        clients.append(httpx.Client(base_url=url, trust_env=False, timeout=30.0))
        return clients[-1]

    yield client
    for one in clients:
        one.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model, as far as `blasst serve` looks."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def port() -> int:
    """A TCP port that is free on 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a verb in this process that must refuse its input; the one line that it says."""

    def run(*arguments: object) -> str:
        try:
            code = cli.main([str(a) for a in arguments])
        except SystemExit as e:
            code = e.code
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("blasst: error: "), err
        assert err.count("\n") == 1, err
        return err

    return run


class FakeVllm:
    """Greedy tokens 0, 1, 2, ...; as deployed others from `differs_at` on, dense ones from
    `dense_differs_at` on for every second dense request."""

    def __init__(self):
        self.differs_at = None
        self.dense_differs_at = None
        self.drop = 0.0
        self.requests = []
        self.answer = None
        self.before_answer = lambda: None
        self.dense_seen = 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply({"data": [{"id": "tiny"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append((self.path, body, self.headers.get("Authorization")))
                fake.before_answer()
                self.reply(fake.made(body))

            def reply(self, body):
                data = json.dumps(body).encode() if fake.answer is None else fake.answer
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def made(self, body):
        dense = body.get("vllm_xargs", {}).get("blasst_mag") == "off"
        self.dense_seen += dense
        at = self.differs_at
        if dense:
            at = self.dense_differs_at if self.dense_seen % 2 == 0 else None
        drop = 0.0 if dense else self.drop
        count = body["max_tokens"]
        tokens = [f"token_id:{i if at is None or i < at else i + 1000}" for i in range(count)]
        probs = [-0.1 - drop] * count
        tops = [
            {t: p, f"token_id:{i}": p - 0.5}
            for i, (t, p) in enumerate(zip(tokens, probs, strict=True))
        ]
        usage = {"prompt_tokens": 5000}
        if "messages" not in body:
            found = {"tokens": tokens, "token_logprobs": probs, "top_logprobs": tops}
            return {"choices": [{"logprobs": found}], "usage": usage}
        content = [
            {
                "token": t,
                "logprob": p,
                "top_logprobs": [{"token": k, "logprob": v} for k, v in top.items()],
            }
            for t, p, top in zip(tokens, probs, tops, strict=True)
        ]
        return {"choices": [{"logprobs": {"content": content}}], "usage": usage}


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    """An engine for the canary that answers as it is told."""
    fake = FakeVllm()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    """The application of the state folder tmp_path, without a socket."""
    from fastapi.testclient import TestClient

    from blasst.kernels.exchange.prometheus import PagesCollector
    from blasst.server.app import create_app
    from blasst.server.control import ControlService
    from blasst.server.observe import highest_generation, refusal
    from blasst.server.settings import Settings

    collector = PagesCollector(tmp_path / "stats", max_age_s=0)
    cache = collector.cache
    control = ControlService(
        tmp_path,
        lambda: highest_generation(cache.pages()),
        lambda: refusal(cache.pages()),
    )
    control.open()
    app = create_app(Settings(tmp_path), control, collector)
    yield TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    control.close()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Collect what a drill counted."""

    def write(**numbers: object) -> None:
        path = os.environ.get("BLASST_DRILLS")
        if path:
            with open(path, "a") as f:
                f.write(json.dumps({"drill": request.node.name, **numbers}) + "\n")

    return write
