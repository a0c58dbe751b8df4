"""Many answers at once from one server: the accuracy pass. Nothing here measures time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blasst.evals.client import (
    AnswerStream,
    Completions,
    Generation,
    XArgs,
    request_body,
    scored,
    streamed,
)
from blasst.evals.metrics import gold_nll

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class Job:
    """prompt, gold: token ids; gold None: its NLL is not asked for. max_tokens: of the answer."""

    prompt: tuple[int, ...]
    gold: tuple[int, ...] | None
    max_tokens: int


def measure(
    client: Completions,
    model: str,
    jobs: Sequence[Job],
    concurrency: int,
    xargs: XArgs | None = None,
) -> list[tuple[Generation, float | None]]:
    """Answer (with its tokens) and gold NLL of each job, in their order; at most `concurrency`
    requests at once. The first ServerError ends all of them."""
    return asyncio.run(_measure(client, model, jobs, concurrency, xargs))


async def _measure(
    client: Completions, model: str, jobs: Sequence[Job], concurrency: int, xargs: XArgs | None
) -> list[tuple[Generation, float | None]]:
    import httpx

    room = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=client.url,
        timeout=client.timeout_s,
        headers=client.headers,
        limits=limits,
        trust_env=False,
    ) as http:

        async def one(job: Job) -> tuple[Generation, float | None]:
            async with room:
                answer = await _generate(http, client, model, job, xargs)
                if job.gold is None:
                    return answer, None
                return answer, await _gold_nll(http, client, model, job.prompt, job.gold, xargs)

        tasks = [asyncio.create_task(one(job)) for job in jobs]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()


async def _generate(
    http: httpx.AsyncClient, client: Completions, model: str, job: Job, xargs: XArgs | None
) -> Generation:
    body = streamed(request_body(model, job.prompt, job.max_tokens, xargs), tokens=True)
    with client.errors():
        sent, start = len(job.prompt), time.perf_counter()
        stream = AnswerStream(client.url, sent, job.max_tokens, start, client.timeout_s)
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
            client.check(response)
            async for line in response.aiter_lines():
                stream.take(line, time.perf_counter())
        return stream.answer(time.perf_counter())


async def _gold_nll(
    http: httpx.AsyncClient,
    client: Completions,
    model: str,
    prompt: tuple[int, ...],
    gold: tuple[int, ...],
    xargs: XArgs | None,
) -> float:
    body = scored(request_body(model, [*prompt, *gold], 1, xargs))
    with client.errors():
        response = await http.post("/v1/completions", json=body)
        client.check(response)
        choice = response.json()["choices"][0]
        return gold_nll(choice.get("prompt_logprobs"), len(prompt), gold)
