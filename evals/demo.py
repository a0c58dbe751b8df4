"""`blasst demo`: serve a small real model on this CPU, change its threshold live, sweep RULER."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blasst.evals.errors import EvalsError, InputError
from blasst.evals.thresholds import Point, parse_points

if TYPE_CHECKING:
    from blasst.evals.progress import Progress
    from blasst.evals.sweep import Plan

_EPILOG = """exit codes: 0 done, 1 the server failed or a check did not hold, 2 bad input, 130
interrupted. Whatever was started is stopped in every case."""
_TASKS = ("niah_single_2", "niah_multivalue", "vt")
_SEED = 7
_MAX_TOKENS = 48
"""Four numbers and their commas fit; RULER's 128 would only make the demo longer."""
_MIN_CONTEXT = 512
_SAMPLES = 2
"""Of each task and length; an idle machine of two cores has time for both."""
_END_S = 25.0
"""For stopping the server and the report."""
_OVERRUN_S = 40.0
"""What a group may take longer than foreseen before it is dropped."""
_FILES = ("index.html", "report.md", "results.jsonl", "serve.log")


@dataclass(frozen=True)
class DemoOptions:
    """lengths: tokens. minutes: for everything, from the start to the report."""

    out: Path
    lengths: tuple[int, ...]
    points: tuple[Point, ...]
    minutes: float
    command: tuple[str, ...]
    json: bool


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Serve SmolLM2-135M-Instruct on this machine's CPU with the blasst backend, send long "
        "prompts dense and at two MAGs, change the threshold while it serves, run a small RULER "
        "sweep, and write a report."
    )
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo-report"), help="folder (default: %(default)s)")
    add(
        "--lengths",
        type=int,
        nargs="+",
        default=[2048, 4096],
        metavar="TOKENS",
        help="prompt plus answer, tokens, 1024 to 8192 (default: 2048 4096)",
    )
    add(
        "--mag",
        nargs="+",
        default=["4500", "1500"],
        metavar="M",
        help="compared with dense; lambda = 2^(-M/1000) (default: 4500 1500)",
    )
    add(
        "--minutes",
        type=float,
        default=8.5,
        help="time for everything; what does not fit is left out (default: %(default)s)",
    )
    add("--serve-command", default="", metavar="CMD", help="instead of the `blasst serve` beside")
    add("--json", action="store_true", help="print the cells as one JSON object to stdout")


def run(args: argparse.Namespace) -> int:
    """The whole demo; the exit code."""
    from blasst.evals.verb import terminate_as_interrupt

    try:
        with terminate_as_interrupt():
            _demo(_options(args))
    except EvalsError as e:
        print(f"blasst: error: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print("blasst: interrupted; everything that was started is stopped", file=sys.stderr)
        return 130
    return 0


def _options(args: argparse.Namespace) -> DemoOptions:
    outside = [n for n in args.lengths if not 1024 <= n <= 8192]
    if outside:
        raise InputError(f"length {outside[0]} is outside 1024..8192 tokens, what the model takes")
    if not 0 < args.minutes < float("inf"):
        raise InputError(f"--minutes {args.minutes:g}: give minutes above 0")
    beside = [str(Path(sys.executable).with_name("blasst")), "serve"]
    return DemoOptions(
        out=args.out,
        lengths=tuple(sorted(set(args.lengths))),
        points=tuple(parse_points(["dense", *args.mag], [], [])),
        minutes=args.minutes,
        command=tuple(shlex.split(args.serve_command) or beside),
        json=args.json,
    )


def _demo(options: DemoOptions) -> None:
    from blasst.evals.machine import describe_machine
    from blasst.evals.models import SMOLLM2_NAME, smollm2_folder
    from blasst.evals.output import OutputFolder
    from blasst.evals.progress import Progress, duration
    from blasst.evals.report import CPU_NOTE
    from blasst.evals.suite import Suite, make_samples
    from blasst.evals.sweep import Plan

    start, machine = time.monotonic(), describe_machine()
    progress = Progress(0)
    progress.say(machine)
    model = smollm2_folder(progress.say)
    suite = Suite.of(_TASKS, options.lengths, _SAMPLES, _SEED)
    samples = list(make_samples(suite, model, "auto", progress.say))
    plan = Plan(options.points, samples, by_round=True, notes=(CPU_NOTE,), machine=machine)
    command = [*options.command, str(model), "--served-model-name", SMOLLM2_NAME]
    command += ["--dtype", "float32", "--max-model-len", str(max(options.lengths))]
    command += ["--max-num-seqs", "4", "--enforce-eager", "--min-context", str(_MIN_CONTEXT)]
    with OutputFolder(options.out, _FILES) as output:
        words = " ".join(command[len(options.command) :])
        progress.say("starting the server: blasst serve " + words)
        _measure(command, output.partial, plan, progress, start + 60.0 * options.minutes)
        text = _report(output.partial, as_json=options.json)
        output.publish()
    print(text)
    target = options.out / "index.html"
    print(f"\nreport: {target}, after {duration(time.monotonic() - start)}", file=sys.stderr)


def _measure(
    command: list[str], folder: Path, plan: Plan, progress: Progress, until: float
) -> None:
    """Serve, show, sweep and stop. until: on time.monotonic(), with the report written."""
    from blasst.evals import demo_acts
    from blasst.evals.client import Completions
    from blasst.evals.deployment import Deployment
    from blasst.evals.runner import Runner, RunOptions
    from blasst.evals.sidecar import Sidecar
    from blasst.evals.store import ResultStore
    from blasst.evals.sweep import run_sweep
    from blasst.evals.timebox import TimeBox

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Deployment(command, folder / "serve.log", progress.say))
        client = Completions(server.url)
        stack.callback(client.close)
        sidecar = Sidecar(server.sidecar_url)
        stack.callback(sidecar.close)
        store = stack.enter_context(ResultStore(folder / "results.jsonl"))
        limits = RunOptions(max_tokens=_MAX_TOKENS, min_context=_MIN_CONTEXT)
        runner = Runner(client, sidecar, store, limits)
        strongest = plan.points[-1]
        demo_acts.long_prompts(runner, plan.points, plan.samples, progress.say)
        demo_acts.change_while_serving(runner, strongest, plan.samples, progress.say)
        demo_acts.per_request(runner, strongest, plan.samples, progress.say)
        progress.say(
            f"RULER: {len(_TASKS)} tasks x {len(plan.lengths())} lengths x {len(plan.points)} "
            f"thresholds, up to {_SAMPLES} samples each"
        )
        end = until - _END_S
        run_sweep(runner, plan, progress, TimeBox(end, end + _OVERRUN_S))
        progress.close()
        progress.say("stopping the server")


def _report(folder: Path, *, as_json: bool) -> str:
    """Write the report; returns what to print."""
    from blasst.evals import report
    from blasst.evals.cells import collect
    from blasst.evals.store import read_results

    results = collect(read_results(folder / "results.jsonl"))
    report.write_report(results, folder)
    return json.dumps(report.as_json(results)) if as_json else "\n" + report.as_text(results)
