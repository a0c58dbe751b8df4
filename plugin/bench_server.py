"""A `vllm serve` of our backend for checks, and the few requests that they send."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KV_BYTES = 1 << 30
"""Of the cache of each rank: named, since servers that share a GPU cannot measure what is free."""
NAME = "checked"


class ServerError(Exception):
    """The server did not start, or did not answer; the message ends with its log's last lines."""


@dataclass(frozen=True)
class Server:
    """Where it listens, and the model's folder."""

    url: str
    model: Path
    log: Path

    def text(self, path: str) -> str:
        """The body of a GET. Raises OSError."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            found: str = answer.read().decode()
        return found

    def call(self, path: str, body: Any, request_id: str = "") -> Any:
        """POST as JSON. Raises ServerError."""
        headers = {"Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                content = answer.read()
        except urllib.error.HTTPError as e:
            with e:
                why = e.read().decode(errors="replace")[:2000]
            raise ServerError(f"{path} answered {e.code}: {why}\n{_tail(self.log)}") from e
        except OSError as e:
            raise ServerError(f"{path} is not answered: {e}\n{_tail(self.log)}") from e
        return json.loads(content) if content else None

    def complete(
        self, prompt: list[int], request_id: str, max_tokens: int = 8, **xargs: Any
    ) -> list[int]:
        """The greedy tokens of an answer."""
        body = {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"vllm_xargs": xargs} if xargs else {}),
        }
        choice = self.call("/v1/completions", body, request_id)["choices"][0]
        return list(choice["token_ids"])


@contextmanager
def served(args: Any, state: Path, log: Path) -> Iterator[Server]:
    """A server with args.tp, .dp, .nodes, .dtype, .chunk, .graphs and .ready_s; ended with its
    children. nodes: so many of vLLM's nodes, all of them on this host; the first one listens."""
    port = free_port()
    command, env = _command(args, port), _environment(state)
    # `timeout` and the like must not leave a server behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with ExitStack() as stack:
        processes = []
        for node in range(args.nodes):
            own = log if node == 0 else log.with_suffix(f".node{node}.log")
            out = stack.enter_context(open(own, "wb"))
            process = subprocess.Popen(
                [*command, *_of_node(args, node)],
                env=env | _of_shared_gpus(args, node),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_end, process)
            processes.append(process)
        server = Server(f"http://127.0.0.1:{port}", Path(args.model), log)
        _wait_until_ready(server, processes, args.ready_s)
        yield server


def _command(args: Any, port: int) -> list[str]:
    from blasst.plugin.bench_engines import GRAPHS, on_cpu

    cpu = on_cpu()
    eager = cpu or args.graphs == "eager"
    options = {
        "served-model-name": NAME,
        "dtype": args.dtype,
        "max-model-len": args.tokens + 64,
        "max-num-batched-tokens": args.chunk,
        "max-num-seqs": 32,
        "tensor-parallel-size": args.tp,
        "data-parallel-size": args.dp,
        "attention-backend": "blasst",
        "worker-extension-cls": "blasst.plugin.rank_recorder.RankRecorder",
        "host": "127.0.0.1",
        "port": port,
    }
    if _whole_engines(args):
        options |= {"data-parallel-size-local": args.dp // args.nodes}
        options |= {"data-parallel-address": "127.0.0.1", "data-parallel-rpc-port": free_port()}
    elif args.nodes > 1:
        options |= {"nnodes": args.nodes, "master-addr": "127.0.0.1", "master-port": free_port()}
        options |= {"distributed-executor-backend": "mp"}
    if not cpu:
        options |= {"gpu-memory-utilization": 0.05, "kv-cache-memory-bytes": KV_BYTES}
    if not eager:
        options["compilation-config"] = json.dumps(GRAPHS["decode"]["compilation_config"])
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(args.model)]
    command += [f"--{name}={value}" for name, value in options.items()]
    # vLLM's own reduction among GPUs wants links that not every host has.
    return [*command, *["--enforce-eager"] * eager, *["--disable-custom-all-reduce"] * (not cpu)]


def _environment(state: Path) -> dict[str, str]:
    return {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_BLASST_STATE_DIR": str(state),
        "VLLM_BLASST_MIN_CONTEXT": "1",
        "VLLM_BLASST_STATS_INTERVAL_S": "0.1",
    }


def _whole_engines(args: Any) -> bool:
    """Each node has engines of its own. vLLM 0.26 takes --nnodes for parts of an engine only."""
    return bool(args.nodes > 1 and args.dp % args.nodes == 0)


def _of_node(args: Any, node: int) -> list[str]:
    headless = ["--headless"] if node > 0 else []
    if _whole_engines(args):
        first = node * args.dp // args.nodes
        return [*headless, *[f"--data-parallel-start-rank={first}"] * (node > 0)]
    return [*headless, *[f"--node-rank={node}"] * (args.nodes > 1)]


def _of_shared_gpus(args: Any, node: int) -> dict[str, str]:
    """NCCL refuses two ranks on one GPU unless it takes their hosts for two."""
    if args.nodes == 1:
        return {}
    return {"NCCL_HOSTID": f"blasst-node-{node}", "NCCL_SOCKET_IFNAME": "lo"}


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait_until_ready(
    server: Server, processes: Sequence[subprocess.Popen[bytes]], seconds: float
) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for node, process in enumerate(processes):
            if process.poll() is not None:
                what = f"node {node}" if len(processes) > 1 else "it"
                raise ServerError(f"{what} ended with {process.returncode}\n{_tail(server.log)}")
        try:
            server.text("/health")
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise ServerError(f"it was not ready after {seconds:.0f} s\n{_tail(server.log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with suppress(ProcessLookupError):  # the group is the server's own: ranks that outlived it
        os.killpg(process.pid, signal.SIGKILL)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])
