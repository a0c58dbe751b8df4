"""What a sweep will cost, before it begins: from single requests at the ends of its lengths."""

from __future__ import annotations

import time
from dataclasses import dataclass

from blasst.evals.eta import WAIT_S, Costs, Ends
from blasst.evals.progress import duration
from blasst.evals.runner import Runner
from blasst.evals.samples import Sample
from blasst.evals.sweep import Plan, all_jobs

_PROBE_TOKENS = 8


@dataclass(frozen=True)
class Estimate:
    """seconds: with every request on its own; skipping makes it less. least: with those of the
    accuracy pass side by side at no cost, which decoding comes near to and long prefills do not.
    costs: None with nothing to do."""

    requests: int
    prompt_tokens: int
    seconds: float
    least: float
    costs: Costs | None = None

    def words(self) -> str:
        return (
            f"{self.requests} requests, {self.prompt_tokens / 1e6:.2g} million prompt tokens: at "
            f"most about {duration(self.seconds)}, and {duration(self.least)} if requests side by "
            "side cost no more than one"
        )


def estimate(runner: Runner, plan: Plan) -> Estimate:
    """Of what is still to be measured."""
    jobs = list(all_jobs(runner, plan))
    if not jobs:
        return Estimate(0, 0, 0.0, 0.0)
    costs = probe(runner, plan)
    sent = [prompt for job in jobs for prompt in job.prompts for _ in range(1 + prompt[1])]
    seconds = least = 0.0
    for job in jobs:
        work, waits = sum(job.parts(costs)), WAIT_S * job.waits
        seconds += waits + work
        together = runner.options.concurrency if job.kind[0] == "accuracy" else 1
        least += waits + work / together
    return Estimate(len(sent), sum(tokens for tokens, _ in sent), seconds, least, costs)


def probe(runner: Runner, plan: Plan) -> Costs:
    """Under the threshold that is in force, at the shortest and the longest prompt; the first
    request of a server pays for what no later one does, and is not counted."""
    ends = [min(plan.samples, key=_size), max(plan.samples, key=_size)]
    before = runner.sidecar.counters()
    name, client = runner.model.name, runner.client
    client.generate(name, ends[0].prompt, 1)
    sent = [len(ends[0].prompt)]
    prefill, nll, token_s = [], [], 0.0
    for sample in ends:
        answer = client.generate(name, sample.prompt, _PROBE_TOKENS)
        prefill.append((len(sample.prompt), answer.ttft_s))
        token_s = (answer.total_s - answer.ttft_s) / max(1, answer.completion_tokens - 1)
        sent.append(len(sample.prompt))
        nll.append((len(sample.prompt), _nll_s(runner, plan, sample, sent)))
    # What is counted late would look like somebody else's traffic in the first cell.
    runner.sidecar.settled(before, sum(sent) - len(sent), runner.options.settle_s)
    return Costs(Ends(*prefill), Ends(*nll), token_s)


def _nll_s(runner: Runner, plan: Plan, sample: Sample, sent: list[int]) -> float:
    """0 where no sample's gold NLL is measured."""
    if not any(runner.wants_nll(s) for s in plan.samples):
        return 0.0
    start = time.perf_counter()
    runner.client.gold_nll(runner.model.name, sample.prompt, sample.gold)
    sent.append(len(sample.prompt) + len(sample.gold))
    return time.perf_counter() - start


def _size(sample: Sample) -> int:
    return len(sample.prompt)
