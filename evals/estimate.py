"""What a sweep will cost, before it begins: from one dense request at the ends of its lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass

from blasst.evals.progress import duration
from blasst.evals.runner import Runner
from blasst.evals.samples import Sample
from blasst.evals.sweep import Plan

_CELL_S = 1.0
"""Setting a threshold, waiting until it is in force, and one short probe."""
_PROBE_TOKENS = 8


@dataclass(frozen=True)
class Estimate:
    """seconds: with every request on its own; skipping makes it less. least: with those of the
    accuracy pass side by side at no cost, which decoding comes near to and long prefills do not."""

    requests: int
    prompt_tokens: int
    seconds: float
    least: float

    def words(self) -> str:
        return (
            f"{self.requests} requests, {self.prompt_tokens / 1e6:.1f} million prompt tokens: at "
            f"most about {duration(self.seconds)}, and {duration(self.least)} if requests side by "
            "side cost no more than one"
        )


@dataclass(frozen=True)
class _Cost:
    tokens: int
    prefill_s: float
    token_s: float


def estimate(runner: Runner, plan: Plan) -> Estimate:
    """Of what is still to be measured."""
    todo = [
        (which, sample)
        for point in plan.points
        for which, sample in plan.measurements()
        if runner.pending([sample], point, which)
    ]
    if not todo:
        return Estimate(0, 0, 0.0, 0.0)
    ends = [min(plan.samples, key=_size), max(plan.samples, key=_size)]
    before = runner.sidecar.counters()
    runner.client.generate(runner.model.name, ends[0].prompt, 1)
    low, high = (_cost(runner, sample) for sample in ends)
    # What is counted late would look like somebody else's traffic in the first cell.
    sent = 2 * low.tokens + high.tokens
    runner.sidecar.settled(before, sent - 3, runner.options.settle_s)
    requests = tokens = 0
    seconds = least = 0.0
    for which, sample in todo:
        prefills = 1 if which == "ttft" or not runner.wants_nll(sample) else 2
        requests += prefills
        tokens += prefills * len(sample.prompt)
        one = prefills * _prefill_s(len(sample.prompt), low, high)
        one += 0 if which == "ttft" else high.token_s * runner.budget(sample)
        seconds += one
        least += one / (runner.options.concurrency if which == "accuracy" else 1)
    rest = _CELL_S * sum(len(group.points) for group in plan.groups())
    return Estimate(requests, tokens, seconds + rest, least + rest)


def _cost(runner: Runner, sample: Sample) -> _Cost:
    answer = runner.client.generate(runner.model.name, sample.prompt, _PROBE_TOKENS)
    more = max(1, answer.completion_tokens - 1)
    return _Cost(len(sample.prompt), answer.ttft_s, (answer.total_s - answer.ttft_s) / more)


def _prefill_s(tokens: int, low: _Cost, high: _Cost) -> float:
    """A power law through both ends, between linear and quadratic."""
    if high.tokens <= low.tokens:
        return high.prefill_s
    ratio = max(high.prefill_s, 1e-9) / max(low.prefill_s, 1e-9)
    power = min(2.0, max(1.0, math.log(ratio) / math.log(high.tokens / low.tokens)))
    return high.prefill_s * float((tokens / high.tokens) ** power)


def _size(sample: Sample) -> int:
    return len(sample.prompt)
