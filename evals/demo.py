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
    from blasst.evals.runner import Runner
    from blasst.evals.samples import Sample

_EPILOG = """exit codes: 0 done, 1 the server failed or a check did not hold, 2 bad input, 130
interrupted. Whatever was started is stopped in every case."""
_TASKS = ("niah_single_2", "niah_multivalue", "vt")
_SEED = 7
_MAX_TOKENS = 48
"""Four numbers and their commas fit; RULER's 128 would only make the demo longer."""
_MIN_CONTEXT = 512
_MOST_SAMPLES = 10
_GRACE_S = 100.0
"""More time for the first round, so that a slow machine too has every cell."""
_PLANNED_SHARE = 0.85
"""Of the time left, so that a slower moment of the machine does not end the sweep early."""


@dataclass(frozen=True)
class DemoOptions:
    """lengths: tokens. minutes: for everything after the server is ready, at most."""

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
        default=7.0,
        help="time for the measurements; decides how many samples (default: %(default)s)",
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
    from blasst.evals import demo_acts
    from blasst.evals.client import Completions
    from blasst.evals.deployment import Deployment
    from blasst.evals.models import SMOLLM2_NAME, smollm2_folder
    from blasst.evals.progress import Progress
    from blasst.evals.runner import Runner, RunOptions
    from blasst.evals.sidecar import Sidecar
    from blasst.evals.store import ResultStore
    from blasst.evals.suite import Suite, make_samples

    progress = Progress(0)
    model = smollm2_folder(progress.say)
    suite = Suite.of(_TASKS, options.lengths, _MOST_SAMPLES, _SEED)
    samples = list(make_samples(suite, model, "auto", progress.say))
    results_file = _fresh_results(options.out)
    command = [*options.command, str(model), "--served-model-name", SMOLLM2_NAME]
    command += ["--dtype", "float32", "--max-model-len", str(max(options.lengths))]
    command += ["--max-num-seqs", "4", "--enforce-eager", "--min-context", str(_MIN_CONTEXT)]
    progress.say("starting the server: blasst serve " + " ".join(command[len(options.command) :]))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Deployment(command, options.out / "serve.log", progress.say))
        ready = time.monotonic()
        client = Completions(server.url)
        stack.callback(client.close)
        sidecar = Sidecar(server.sidecar_url)
        stack.callback(sidecar.close)
        store = stack.enter_context(ResultStore(results_file))
        limits = RunOptions(max_tokens=_MAX_TOKENS, min_context=_MIN_CONTEXT)
        runner = Runner(client, sidecar, store, limits)
        demo_acts.long_prompts(runner, options.points, samples, progress.say)
        demo_acts.change_while_serving(runner, options.points[-1], samples, progress.say)
        demo_acts.per_request(runner, options.points[-1], samples, progress.say)
        _sweep(runner, options, samples, progress, ready)
        progress.say("stopping the server")
    _publish(options, results_file)


def _fresh_results(folder: Path) -> Path:
    """A demo measures anew each time: results of an earlier one are removed."""
    path = folder / "results.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    except OSError as e:
        raise InputError(f"{folder} cannot be written: {e.strerror}; give another --out") from e
    return path


def _sweep(
    runner: Runner,
    options: DemoOptions,
    samples: list[Sample],
    progress: Progress,
    ready: float,
) -> None:
    """One sample of every cell first; its time then says how many more fit.

    ready: when the server was, on time.monotonic().
    """
    from blasst.evals.progress import duration
    from blasst.evals.sweep import Plan, run_sweep

    cells = len(options.points) * len(options.lengths) * len(_TASKS)
    progress.say(f"RULER: {cells} cells, one sample each to begin with")
    start = time.monotonic()
    first = Plan(options.points, [s for s in samples if s.index == 0])
    stop_at = ready + 60.0 * options.minutes
    run_sweep(runner, first, progress, stop_at + _GRACE_S)
    now = time.monotonic()
    left = stop_at - now
    more = int(left * _PLANNED_SHARE / max(now - start, 1e-3))
    count = min(_MOST_SAMPLES, 1 + max(0, more))
    progress.say(
        f"a round takes {duration(now - start)} and {duration(left)} are left: "
        f"{count} sample{'s' if count > 1 else ''} a cell"
    )
    if count > 1:
        more_plan = Plan(options.points, [s for s in samples if s.index < count])
        run_sweep(runner, more_plan, progress, stop_at)
    progress.close()


def _publish(options: DemoOptions, results_file: Path) -> None:
    from blasst.evals.cells import collect
    from blasst.evals.report import as_json, text_table, write_report
    from blasst.evals.store import read_results

    results = collect(read_results(results_file))
    target = write_report(results, options.out)
    print(json.dumps(as_json(results)) if options.json else "\n" + text_table(results))
    print(f"\nreport: {target}", file=sys.stderr)
