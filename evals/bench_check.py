"""Our TTFT against that of `vllm bench serve`: the same prompts, one at a time, on one server."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blasst.evals.client import Completions
from blasst.evals.errors import InputError, ServerError
from blasst.evals.interop import bench_prompts, prompt_text
from blasst.evals.prompts import PromptEncoder
from blasst.evals.samples import Sample

TOLERANCE = 0.03
"""Above it, one of the two programs measures something else."""


@dataclass(frozen=True)
class Comparison:
    """Seconds, per prompt: median over the runs, which take turns. ours: one run more."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median over the prompts of ours / theirs."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return statistics.median(a / b for a, b in pairs)

    @property
    def agrees(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE


def compare(
    client: Completions,
    name: str,
    model: Path,
    samples: Sequence[Sample],
    encoder: PromptEncoder,
    command: Sequence[str],
    rounds: int = 1,
) -> Comparison:
    """command: `vllm`, or what stands for it. model: folder with the tokenizer. Both send text,
    which is all that program can send, so that the server's tokenizer counts in both. The server's
    prefix cache must be off, or the prompts must differ from their first tokens on: the other
    program gives all its prompts one salt. Raises ServerError when it fails."""
    if rounds < 1:
        raise InputError(f"--rounds {rounds}: give at least 1")
    texts = {prompt_text(sample, encoder): len(sample.prompt) for sample in samples}
    client.generate(name, samples[0].prompt, 1)
    ours, theirs = [_ours(client, name, texts)], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            theirs.append(_theirs(client.url, name, model, texts, command, Path(folder)))
        ours.append(_ours(client, name, texts))
    return Comparison(_medians(ours), _medians(theirs))


def _medians(runs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(seconds) for seconds in zip(*runs, strict=True))


def _ours(client: Completions, name: str, texts: Mapping[str, int]) -> list[float]:
    return [client.generate_from_text(name, text, n, 1).ttft_s for text, n in texts.items()]


def _theirs(
    url: str,
    name: str,
    model: Path,
    texts: Mapping[str, int],
    command: Sequence[str],
    folder: Path,
) -> tuple[float, ...]:
    prompts = bench_prompts([*texts], folder / "prompts.jsonl")
    salt = {"cache_salt": uuid.uuid4().hex, "add_special_tokens": False}
    argv = [*command, "bench", "serve", "--backend", "openai", "--base-url", url]
    argv += ["--endpoint", "/v1/completions", "--model", name, "--tokenizer", str(model)]
    argv += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"]
    argv += ["--custom-output-len", "1", "--disable-shuffle", "--temperature", "0"]
    argv += ["--num-prompts", str(len(texts)), "--max-concurrency", "1", "--num-warmups", "1"]
    argv += ["--extra-body", json.dumps(salt), "--save-result", "--save-detailed"]
    argv += ["--result-dir", str(folder), "--result-filename", "result.json"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=folder)
    result = folder / "result.json"
    if done.returncode or not result.exists():
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ServerError(f"{argv[0]} bench serve ended with {done.returncode}: {last}")
    body: dict[str, Any] = json.loads(result.read_text("utf-8"))
    sent = [int(n) for n in body["input_lens"]]
    if sent != [*texts.values()]:
        raise ServerError(f"{argv[0]} bench serve sent {sent} tokens: not the same prompts")
    return tuple(float(seconds) for seconds in body["ttfts"])
