"""`blasst ruler` generate, run and sweep: samples, and their measurement."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from blasst.evals.errors import InputError
from blasst.evals.verb_options import (
    DEFAULT_MAGS,
    count_of,
    endpoints_of,
    points_of,
    tasks_of,
    token_of,
)

if TYPE_CHECKING:
    from blasst.evals.eta import Costs
    from blasst.evals.progress import Progress
    from blasst.evals.runner import Runner, RunOptions
    from blasst.evals.samples import Sample
    from blasst.evals.store import ResultStore, Store
    from blasst.evals.suite import Suite
    from blasst.evals.sweep import Plan
    from blasst.evals.thresholds import Point


def say(text: str) -> None:
    """A line on stderr."""
    print(f"blasst: {text}", file=sys.stderr, flush=True)


def generate(args: argparse.Namespace) -> int:
    from blasst.evals.samples import write_samples

    try:
        count = write_samples(args.out, _samples(args, _suite(args)))
    except OSError as e:
        raise InputError(f"{args.out} cannot be written: {e.strerror}") from e
    if args.nvidia is not None:
        _write_for_nvidia(args)
    if args.json:
        print(json.dumps({"samples": count, "file": str(args.out)}))
    else:
        print(f"{count} samples in {args.out}")
    return 0


def _write_for_nvidia(args: argparse.Namespace) -> None:
    from blasst.evals.interop import nvidia_samples
    from blasst.evals.models import smollm2_folder
    from blasst.evals.prompts import PromptEncoder
    from blasst.evals.samples import read_samples

    encoder = PromptEncoder(args.model or smollm2_folder(say), args.prompt_format)
    nvidia_samples(read_samples(args.out), encoder, args.nvidia)


def run(args: argparse.Namespace) -> int:
    from blasst.evals.samples import read_samples

    return _measure(args, lambda: read_samples(args.samples), {"samples": str(args.samples)})


def sweep(args: argparse.Namespace) -> int:
    suite = _suite(args)
    return _measure(args, lambda: list(_samples(args, suite)), {})


def _suite(args: argparse.Namespace) -> Suite:
    from blasst.evals.suite import Suite

    return Suite.of(tasks_of(args), args.lengths, count_of(args), args.seed, args.mode)


def _samples(args: argparse.Namespace, suite: Suite) -> Iterator[Sample]:
    from blasst.evals.suite import make_samples

    return make_samples(suite, args.model, args.prompt_format, say, args.data)


def _measure(
    args: argparse.Namespace, make: Callable[[], list[Sample]], data: dict[str, str]
) -> int:
    """The server is asked first: generating samples for one that is not there is time lost."""
    from blasst.evals.cells import collect
    from blasst.evals.estimate import estimate
    from blasst.evals.on_ray import the_package
    from blasst.evals.progress import Progress
    from blasst.evals.report import as_json, as_text, write_report
    from blasst.evals.runner import RunOptions
    from blasst.evals.scaleout import run_everywhere
    from blasst.evals.store import ResultStore
    from blasst.evals.sweep import Plan, check_plan

    if args.timed < 0:
        raise InputError(f"--timed {args.timed}: give at least 0")
    points = points_of(args, DEFAULT_MAGS)
    if args.ray is not None:
        the_package()
    options = RunOptions(
        max_tokens=args.max_tokens,
        nll=args.nll,
        settle_s=args.settle,
        min_context=args.min_context,
        concurrency=args.concurrency,
    )
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(ResultStore(args.out))
        progress = Progress(0)
        stack.callback(progress.close)
        runners = runners_of(args, store, options, stack)
        _check_lengths(args, runners[0], points)
        together = options.concurrency > 1
        samples = make()
        plan = Plan(
            points,
            samples,
            chunk=options.concurrency if together else 0,
            timed=args.timed if together else None,
            data=_data_of(samples) | data,
        )
        check_plan(runners[0], plan)
        cost = estimate(runners[0], plan)
        if cost.requests:
            progress.say(f"blasst: {cost.words()}")
        if args.dry_run:
            return 0
        if args.ray is not None:
            _on_ray(args, plan, store, options, progress, cost.costs)
        else:
            run_everywhere(runners, plan, progress, cost.costs)
        results = collect(store.records)
    if args.report is not None:
        say(f"report: {write_report(results, args.report)}")
    print(json.dumps(as_json(results)) if args.json else as_text(results))
    return 0


def _check_lengths(args: argparse.Namespace, runner: Runner, points: list[Point]) -> None:
    """What can be said of prompts that are not made yet."""
    from blasst.evals.tasks import task_named

    if lengths := getattr(args, "lengths", ()):
        runner.check_length(max(lengths))
        least = min(task_named(task).max_tokens for task in tasks_of(args))
        runner.check_in_force(points, max(lengths) - least)


def _data_of(samples: list[Sample]) -> dict[str, str]:
    """File -> origin and sha256, of the texts that the samples name."""
    return {name: origin for s in samples for name, _, origin in [s.data.partition(": ")] if name}


def runners_of(
    args: argparse.Namespace, store: Store, options: RunOptions, stack: contextlib.ExitStack
) -> list[Runner]:
    from blasst.evals.client import Completions
    from blasst.evals.runner import Runner
    from blasst.evals.sidecar import Sidecar

    runners = []
    for url, sidecar_url in endpoints_of(args):
        client = Completions(url, timeout_s=args.timeout)
        stack.callback(client.close)
        sidecar = Sidecar(sidecar_url, token=token_of(args))
        stack.callback(sidecar.close)
        runners.append(Runner(client, sidecar, store, options, args.served_model))
    return runners


def _on_ray(
    args: argparse.Namespace,
    plan: Plan,
    store: ResultStore,
    options: RunOptions,
    progress: Progress,
    costs: Costs | None,
) -> None:
    from blasst.evals.on_ray import Endpoint, run_on_ray

    token = token_of(args)
    endpoints = [Endpoint(u, s, token, args.timeout) for u, s in endpoints_of(args)]
    run_on_ray(
        endpoints,
        plan,
        store,
        options,
        progress,
        name=args.served_model,
        address=args.ray,
        costs=costs,
    )
