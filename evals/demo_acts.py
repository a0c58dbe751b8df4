"""What the demo shows before its sweep: long prompts, a change while serving, one request's own."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence

from blasst.evals.errors import ServerError
from blasst.evals.packages import Say
from blasst.evals.runner import Runner
from blasst.evals.samples import Sample
from blasst.evals.sidecar import Counters
from blasst.evals.thresholds import Point, name_of

_ADMITTED_S = 0.25
"""Time for a request to be admitted on the same machine; its prefill then takes seconds."""


def long_prompts(
    runner: Runner, points: Sequence[Point], samples: Sequence[Sample], say: Say
) -> None:
    """One prompt of each length, dense and at each MAG."""
    say("long prompts, dense and under thresholds (each after a warm-up that is not shown):")
    for length in sorted({s.length for s in samples}):
        sample = _first(samples, length)
        for point in points:
            runner.activate(point, sample)
            runner.warm_up(point, sample)
            ttft, moved = _send(runner, sample)
            say(
                f"  {len(sample.prompt):>6} tokens  {name_of(point):<10} "
                f"time to first token {ttft:6.3f} s{_skip_words(moved)}"
            )


def change_while_serving(runner: Runner, point: Point, samples: Sequence[Sample], say: Say) -> None:
    """A request in flight keeps what it was admitted with; the next one has the new threshold."""
    if point is None:
        return
    sample = _first(samples, max(s.length for s in samples))
    model, settle = runner.model.name, runner.options.settle_s
    runner.activate(None, sample)
    before = runner.sidecar.counters()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        flight = pool.submit(runner.client.generate, model, sample.prompt, 8)
        time.sleep(_ADMITTED_S)
        start = time.monotonic()
        setting = runner.sidecar.put(point, min_context=runner.min_context, reason="demo")
        setting = runner.sidecar.wait_converged(setting.generation, settle)
        took = time.monotonic() - start
        in_flight = not flight.done()
        flight.result()
    after = runner.sidecar.settled(before, len(sample.prompt) - 1, settle)
    old = after.since(before)
    if old.vote_tokens:
        raise ServerError("a request in flight took over a threshold that was set after it")
    _, new = _send(runner, sample)
    if not new.vote_tokens:
        raise ServerError("a request after the change still ran dense")
    say("threshold changed through the sidecar while it serves:")
    say(
        f"  dense -> {name_of(point)}: in force for every new request after {took:.2f} s "
        f"(generation {setting.generation})"
    )
    state = "in flight during the change" if in_flight else "admitted before the change"
    say(f"  request {state}: {old.dense_tokens} tokens dense, as admitted")
    say(f"  next request: {new.vote_tokens} tokens under {name_of(point)}{_skip_words(new)}")


def per_request(runner: Runner, point: Point, samples: Sequence[Sample], say: Say) -> None:
    """The deployment is dense; one request brings its own threshold in vllm_xargs."""
    if point is None:
        return
    sample = _first(samples, min(s.length for s in samples))
    runner.activate(None, sample)
    xargs = {f"blasst_{point.unit}": point.value}
    _, own = _send(runner, sample, xargs)
    _, other = _send(runner, sample)
    if not own.vote_tokens or other.vote_tokens:
        raise ServerError(
            f"vllm_xargs {xargs}: {own.vote_tokens} tokens of that request ran under a threshold, "
            f"and {other.vote_tokens} of the next one, which asked for nothing"
        )
    say(f"deployment dense, one request with vllm_xargs {xargs}:")
    say(f"  that request: {own.vote_tokens} tokens under {name_of(point)}{_skip_words(own)}")
    say(f"  the next one without: {other.dense_tokens} tokens dense")


def _first(samples: Sequence[Sample], length: int) -> Sample:
    return next(s for s in samples if s.length == length)


def _send(
    runner: Runner, sample: Sample, xargs: dict[str, float] | None = None
) -> tuple[float, Counters]:
    """TTFT in seconds of one prompt, and what it added to the counters."""
    before = runner.sidecar.counters()
    answer = runner.client.generate(runner.model.name, sample.prompt, 2, xargs)
    after = runner.sidecar.settled(before, len(sample.prompt) - 1, runner.options.settle_s)
    return answer.ttft_s, after.since(before)


def _skip_words(moved: Counters) -> str:
    """Empty for a dense request, which visits no tiles."""
    if not moved.visited:
        return ""
    return f", {moved.skipped / moved.visited:.1%} of {moved.visited} tiles skipped"
