"""kill -9 of every process of a deployment while its threshold changes and requests come.

Each answer is checked twice: against what vLLM's processes wrote down about its request, and by its
own numbers, which differ between thresholds.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blasst.deploy.drills import processes, recorder
from blasst.deploy.drills.control import Watchers, change, converged, lambda_of
from blasst.deploy.drills.deployment import START_S, Deployment
from blasst.deploy.drills.history import Lambda, Write
from blasst.deploy.drills.load import Ask, Client, Fingerprint, Load, distance, prompts
from blasst.deploy.drills.processes import Service
from blasst.deploy.drills.verdict import Evidence, References, Result, judge

CONVERGE_S = 60.0
_CHANGES_WITHOUT_ENGINE = 4
_STEP_MAG = 0.001
"""Changes of one class differ by this, so that each has a lambda of its own: far too little to
change what is skipped."""


@dataclass(frozen=True)
class Plan:
    """mags: the classes of thresholds; dense is one more. engine_kills: roles; they and the
    sidecar's kills fall on random changes. pause_s: on average, between two changes."""

    model: Path
    folder: Path
    changes: int = 200
    sidecar_kills: int = 20
    engine_kills: tuple[str, ...] = processes.ROLES * 3
    mags: tuple[float, ...] = (200.0, 2000.0, 4000.0)
    prompt_tokens: int = 640
    vocabulary: int = 4000
    clients: int = 2
    pause_s: float = 1.0
    seed: int = 1
    options: tuple[str, ...] = ("--max-model-len", "2048")

    def __post_init__(self) -> None:
        kills = self.sidecar_kills + len(self.engine_kills)
        if kills >= self.changes:
            raise ValueError(f"{kills} kills need more than {self.changes} changes to fall on")


def run(plan: Plan, say: Any = print) -> Result:
    """Raises TimeoutError where a process does not come up, RuntimeError where the drill itself
    cannot tell what it must."""
    deployment = Deployment(plan.model, plan.folder, plan.options)
    result = Result()
    texts = prompts(3, plan.prompt_tokens, plan.vocabulary, plan.seed)
    client = Client(deployment.port, texts)
    try:
        deployment.engine.wait_ready(START_S)
        writes, references, noise = _learn(plan, deployment, client)
        result.numbers["noise_nats"], result.numbers["gap_nats"] = noise
        say(f"learned {len(references)} classes: noise {noise[0]:.2g}, gap {noise[1]:.2g} nats")
        client.close()
        own: Sequence[float | str] = (*plan.mags, "off")
        watchers = Watchers(deployment.state, deployment.control_port)
        load = Load(deployment.port, texts, own, plan.clients, 0.02, plan.seed)
        began = time.monotonic()
        try:
            writes += _change_and_kill(plan, deployment, say)
            deployment.engine.wait_ready(START_S)
            seconds = converged(deployment.control_port, CONVERGE_S)
            result.numbers["converged_at_the_end_s"] = round(seconds, 2)
            time.sleep(1.0)
        finally:
            load.stop()
            watchers.stop()
        result.numbers["seconds"] = round(time.monotonic() - began)
        last = client.send(Ask(999_999, 0))
        outages = deployment.engine.outages, deployment.sidecar.outages
        evidence = Evidence(
            deployment.state,
            writes,
            watchers,
            [*load.answers, last],
            references,
            *outages,
            list(recorder.read(deployment.records)),
        )
        judge(evidence, result)
        result.faults += deployment.faults()
    finally:
        client.close()
        deployment.stop()
    return result


def _learn(
    plan: Plan, deployment: Deployment, client: Client
) -> tuple[list[Write], References, tuple[float, float]]:
    """What the answers look like under each threshold, from a quiet engine; also (noise, gap)."""
    writes: list[Write] = []
    references: dict[Lambda, dict[int, Fingerprint]] = {}
    noise, number = 0.0, 0
    for mag in (None, *plan.mags):
        writes.append(change(deployment.control_port, mag))
        converged(deployment.control_port, CONVERGE_S)
        for prompt in range(3):
            pair = []
            for _ in range(2):
                number += 1
                answer = client.send(Ask(number, prompt))
                if answer.status != 200:
                    raise RuntimeError(f"the engine answers {answer.status}: {answer.error}")
                pair.append(answer.fingerprint)
            noise = max(noise, distance(*pair))
            references.setdefault(lambda_of(mag), {})[prompt] = pair[0]
    gap = min(
        distance(references[a][p], references[b][p])
        for a in references
        for b in references
        if a is not b and a != b
        for p in range(3)
    )
    if gap < max(20 * noise, 5e-4):
        raise RuntimeError(
            f"answers differ by {gap:.2g} between thresholds and by {noise:.2g} without reason: "
            "too little to tell them apart; give other --mags or longer prompts"
        )
    return writes, references, (noise, gap)


def _change_and_kill(plan: Plan, deployment: Deployment, say: Any) -> list[Write]:
    """Changes go on for a while when the engine is down, and then wait for it."""
    rng = random.Random(plan.seed)
    roles = (*plan.engine_kills, *("sidecar",) * plan.sidecar_kills)
    kills = dict(zip(rng.sample(range(1, plan.changes), len(roles)), roles, strict=True))
    writes: list[Write] = []
    patience = 0
    for number in range(plan.changes):
        deployment.sidecar.wait_ready(START_S)
        role = kills.get(number)
        if patience == 0 or role in processes.ROLES:
            deployment.engine.wait_ready(START_S)
            patience = rng.randint(1, _CHANGES_WITHOUT_ENGINE)
        patience -= not deployment.engine.ready
        timer = None
        if role is not None:
            say(f"change {number}: kill -9 {role}")
            took_s = writes[-1].ended - writes[-1].began
            timer = _kill_later(deployment, role, rng.uniform(0.0, 2 * took_s))
        mag = rng.choice((None, *plan.mags))
        if mag is None and writes and writes[-1].skip_lambda is None:
            mag = plan.mags[0]  # the value in force is no change
        value = None if mag is None else round(mag + _STEP_MAG * (number + 1), 3)
        writes.append(change(deployment.control_port, value))
        if timer is not None:
            timer.join()
        time.sleep(rng.uniform(0.0, 2 * plan.pause_s))
    return writes


def _service(deployment: Deployment, role: str) -> Service:
    return deployment.sidecar if role == "sidecar" else deployment.engine


def _kill_later(deployment: Deployment, role: str, delay_s: float) -> threading.Timer:
    service = _service(deployment, role)
    timer = threading.Timer(delay_s, service.kill, ("" if role == "sidecar" else role,))
    timer.start()
    return timer
