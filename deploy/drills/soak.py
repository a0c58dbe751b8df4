"""Hours of a deployment's life, compressed: what people, scrapers and fools do to it, and what of
it stays behind in memory and open files of every process."""

from __future__ import annotations

import http.client
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blasst.deploy.drills import processes
from blasst.deploy.drills.control import change
from blasst.deploy.drills.deployment import START_S, Deployment
from blasst.deploy.drills.load import Load, prompts
from blasst.deploy.drills.verdict import Result

MOST_GROWTH_MIB = 20.0
WARM_UP = 0.2
"""Share of the time before the first sample that counts: caches fill, pools open."""

_SAMPLE_EVERY_S = 5.0
_MAGS = (200.0, 2000.0, 4000.0)
PER_HOUR: Mapping[str, int] = {
    "/metrics": 480,  # two Prometheus servers, every 15 s
    "/v1/blasst/threshold": 900,  # a status page, every 4 s
    "/v1/blasst/status": 900,
    "/v1/blasst/audit": 60,
    "change": 120,
    "refused body": 120,
    "dropped connection": 120,
    "unknown path": 120,
}


@dataclass(frozen=True)
class Plan:
    """minutes: how long it takes; hours: how much of a deployment's life is put into it."""

    model: Path
    folder: Path
    minutes: float = 15.0
    hours: float = 2.0
    prompt_tokens: int = 640
    vocabulary: int = 4000
    clients: int = 2
    request_pause_s: float = 0.5
    seed: int = 1
    options: tuple[str, ...] = ("--max-model-len", "2048")


@dataclass(frozen=True)
class Sample:
    """Of one process: seconds since the start, MiB, open file descriptors."""

    at_s: float
    mib: float
    files: int


def growth(samples: Sequence[Sample]) -> tuple[float, int]:
    """(MiB, descriptors) of the last tenth over those right after the warm-up, by medians.

    A median does not see the one connection that is open at the moment of a sample."""
    end = samples[-1].at_s
    first = [s for s in samples if WARM_UP * end <= s.at_s <= (WARM_UP + 0.1) * end]
    last = [s for s in samples if s.at_s >= 0.9 * end]

    def middle(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    mib = middle([s.mib for s in last]) - middle([s.mib for s in first])
    files = middle([s.files for s in last]) - middle([s.files for s in first])
    return mib, round(files)


def run(plan: Plan, say: Callable[[str], None] = print) -> Result:
    """Raises TimeoutError where a process does not come up."""
    deployment = Deployment(plan.model, plan.folder, plan.options)
    try:
        deployment.engine.wait_ready(START_S)
        say(f"sidecar at http://127.0.0.1:{deployment.control_port}, engine at {deployment.port}")
        texts = prompts(8, plan.prompt_tokens, plan.vocabulary, plan.seed)
        own = (*_MAGS, "off")
        load = Load(deployment.port, texts, own, plan.clients, plan.request_pause_s, plan.seed)
        try:
            samples, calls = _live(plan, deployment, say)
        finally:
            load.stop()
        result = Result()
        _judge(result, samples, calls)
        answers = Counter(answer.status for answer in load.answers)
        result.numbers |= {"completions": dict(answers), "minutes": plan.minutes}
        if answers.keys() != {200}:
            result.faults.append(f"completions were answered {dict(answers)}")
        result.faults += deployment.faults()
    finally:
        deployment.stop()
    return result


def _live(
    plan: Plan, deployment: Deployment, say: Callable[[str], None]
) -> tuple[dict[str, list[Sample]], Counter[str]]:
    rng = random.Random(plan.seed)
    seconds = 60 * plan.minutes
    pids = {"sidecar": deployment.sidecar.pid}
    pids |= {role: deployment.engine.find(role) or 0 for role in processes.ROLES}
    samples: dict[str, list[Sample]] = {name: [] for name in pids}
    calls: Counter[str] = Counter()
    kinds, weights = list(PER_HOUR), list(PER_HOUR.values())
    every_s = seconds / (plan.hours * sum(weights))
    began = time.monotonic()
    next_call, next_sample, said = began, began, 0
    while (now := time.monotonic()) < began + seconds:
        if now >= next_sample:
            next_sample += _SAMPLE_EVERY_S
            for name, pid in pids.items():
                samples[name].append(Sample(now - began, *processes.memory_and_files(pid)))
        kind = rng.choices(kinds, weights)[0]
        calls[f"{kind}: {_do(kind, deployment.control_port, rng)}"] += 1
        next_call += every_s
        time.sleep(max(0.0, next_call - time.monotonic()))
        if (now - began) // 60 > said:
            said += 1
            say(f"minute {said}: {sum(calls.values())} calls")
    return samples, calls


def _do(kind: str, port: int, rng: random.Random) -> str:
    """One call; what came of it."""
    if kind == "change":
        change(port, rng.choice(_MAGS) + rng.random())
        return "done"
    if kind == "dropped connection":
        with socket.create_connection(("127.0.0.1", port)) as s:
            s.sendall(rng.randbytes(20))
        return "dropped"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        if kind == "refused body":
            connection.request("PUT", "/v1/blasst/threshold", rng.randbytes(99))
        else:
            connection.request("GET", kind if kind.startswith("/") else f"/{rng.random()}")
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    finally:
        connection.close()


def _judge(result: Result, samples: Mapping[str, Sequence[Sample]], calls: Counter[str]) -> None:
    wrong = [key for key in calls if key.rpartition(": ")[2].startswith("5")]
    result.faults += [f"the sidecar answered {key} {calls[key]} times" for key in wrong]
    result.numbers |= {"calls": sum(calls.values()), "answers": dict(sorted(calls.items()))}
    for name, own in samples.items():
        mib, files = growth(own)
        result.numbers[name] = {
            "mib": [round(own[0].mib, 1), round(own[-1].mib, 1)],
            "grew_mib": round(mib, 1),
            "files": [own[0].files, own[-1].files],
            "grew_files": files,
        }
        if mib >= MOST_GROWTH_MIB:
            result.faults.append(f"{name} grew by {mib:.1f} MiB; {MOST_GROWTH_MIB} are allowed")
        if files > 0:
            result.faults.append(f"{name} has {files} more descriptors open than after its start")
