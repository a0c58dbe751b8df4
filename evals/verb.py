"""`blasst ruler`: fetch, generate, run, sweep and report."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from blasst.evals.errors import EvalsError, InputError
from blasst.evals.packages import Say
from blasst.evals.thresholds import Point, parse_points

if TYPE_CHECKING:
    from blasst.evals.samples import Sample

EPILOG = """exit codes: 0 done; 1 the server failed, or a counter or threshold was not as it
must be; 2 bad input; 130 interrupted (the deployment's threshold is put back, the same command
resumes)"""
DEFAULT_TASKS = ("niah_single_2", "niah_multivalue", "vt")
DEFAULT_MAGS = ("dense", "10000", "7000", "4500", "2500", "1500", "1000")
SEED = 42


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the sub-verbs and their options."""
    parser.description = "RULER at skip thresholds: tasks, measurement, report."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="ruler_verb", required=True, metavar="VERB")
    fetch = _verb(verbs, "fetch", "fetch and convert the demo model and the essays, once", _fetch)
    generate = _verb(verbs, "generate", "write samples as token ids, one a line", _generate)
    run_ = _verb(verbs, "run", "measure samples from a file at thresholds", _run)
    sweep = _verb(verbs, "sweep", "generate and measure: thresholds x lengths x tasks", _sweep)
    report = _verb(verbs, "report", "HTML and Markdown from results", _report)
    _add_generator_options(generate)
    generate.add_argument("--out", type=Path, required=True, help="file to write (JSON lines)")
    run_.add_argument("--samples", type=Path, required=True, help="file of `ruler generate`")
    _add_run_options(run_)
    _add_generator_options(sweep)
    _add_run_options(sweep)
    report.add_argument("results", type=Path, help="results file of `ruler run` or `sweep`")
    report.add_argument(
        "--out", type=Path, help="folder for index.html and report.md (default: beside results)"
    )
    for sub in (fetch, generate, run_, sweep, report):
        sub.add_argument("--json", action="store_true", help="print one JSON object to stdout")


def run(args: argparse.Namespace) -> int:
    """Run the chosen sub-verb; failures become one line and an exit code."""
    handler: Callable[[argparse.Namespace], int] = args.ruler_handler
    try:
        with terminate_as_interrupt():
            return handler(args)
    except EvalsError as e:
        print(f"blasst: error: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print("blasst: interrupted; the same command resumes", file=sys.stderr)
        return 130


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt once, so that what must be undone is.

    Further ones are ignored from then on: an impatient second Ctrl-C must not stop the undoing.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    interrupted = False

    def interrupt(number: int, frame: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [(number, signal.signal(number, interrupt)) for number in numbers]
    try:
        yield
    finally:
        if not interrupted:
            for number, handler in before:
                signal.signal(number, handler)


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],  # argparse has no public name
    name: str,
    text: str,
    handler: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(ruler_handler=handler)
    return parser


def _add_generator_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, help="model folder, for its tokenizer (default: the demo model)")
    add(
        "--tasks",
        nargs="+",
        default=list(DEFAULT_TASKS),
        metavar="TASK",
        help=f"RULER's names (default: {' '.join(DEFAULT_TASKS)})",
    )
    add(
        "--lengths",
        nargs="+",
        type=int,
        default=[4096],
        metavar="TOKENS",
        help="nominal lengths in tokens: prompt plus the answer's budget (default: 4096)",
    )
    add("--count", type=int, default=100, help="samples per task and length (default: %(default)s)")
    add(
        "--seed",
        type=int,
        default=SEED,
        help="of all samples; each also has its own index (default: %(default)s)",
    )
    add(
        "--prompt-format",
        default="auto",
        help="chatml, llama3, plain, or auto (default): by the vocabulary's special tokens",
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--url",
        default="http://127.0.0.1:8000",
        help="OpenAI-compatible server (default: %(default)s)",
    )
    add(
        "--sidecar",
        default="http://127.0.0.1:8300",
        help="sidecar of the same deployment (default: %(default)s)",
    )
    add("--served-model", help="served name (default: the first that the server lists)")
    add("--token-file", type=Path, help="file with the sidecar's bearer token")
    add(
        "--mag",
        nargs="+",
        default=[],
        metavar="M",
        help=f"MAGs, or dense; lambda = 2^(-M/1000) (default: {' '.join(DEFAULT_MAGS)})",
    )
    add("--skip-lambda", nargs="+", default=[], metavar="X", help="lambdas, 0 <= X < 1")
    add("--scale", nargs="+", default=[], metavar="S", help="scales, lambda = S / prompt tokens")
    add(
        "--min-context",
        type=int,
        help="prompt tokens below which requests run dense (default: the deployment's)",
    )
    add("--max-tokens", type=int, help="answer tokens at most (default: RULER's budget per task)")
    add(
        "--settle",
        type=float,
        default=20.0,
        help="seconds that counters may lag behind (default: %(default)s)",
    )
    add(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds for one request (default: %(default)s)",
    )
    add("--out", type=Path, required=True, help="results file (JSON lines); resumed if it exists")
    add("--report", type=Path, help="folder for index.html and report.md")


def _fetch(args: argparse.Namespace) -> int:
    from blasst.evals.models import essays_path, smollm2_folder

    found = {"model": str(smollm2_folder(_say)), "essays": str(essays_path(_say))}
    if args.json:
        print(json.dumps(found))
    return 0


def _generate(args: argparse.Namespace) -> int:
    from blasst.evals.samples import write_samples
    from blasst.evals.suite import Suite, make_samples

    suite = Suite.of(args.tasks, args.lengths, args.count, args.seed)
    samples = make_samples(suite, args.model, args.prompt_format, _say)
    try:
        count = write_samples(args.out, samples)
    except OSError as e:
        raise InputError(f"{args.out} cannot be written: {e.strerror}") from e
    if args.json:
        print(json.dumps({"samples": count, "file": str(args.out)}))
    else:
        print(f"{count} samples in {args.out}")
    return 0


def _run(args: argparse.Namespace) -> int:
    from blasst.evals.samples import read_samples

    return _measure(args, lambda: read_samples(args.samples))


def _sweep(args: argparse.Namespace) -> int:
    from blasst.evals.suite import Suite, make_samples

    suite = Suite.of(args.tasks, args.lengths, args.count, args.seed)
    return _measure(args, lambda: list(make_samples(suite, args.model, args.prompt_format, _say)))


def _measure(args: argparse.Namespace, make: Callable[[], list[Sample]]) -> int:
    """The server is asked first: generating samples for one that is not there is time lost."""
    from blasst.evals.cells import collect
    from blasst.evals.client import Completions
    from blasst.evals.progress import Progress
    from blasst.evals.report import as_json, as_text, write_report
    from blasst.evals.runner import Runner, RunOptions
    from blasst.evals.sidecar import Sidecar
    from blasst.evals.store import ResultStore
    from blasst.evals.sweep import Plan, run_sweep

    points = _points(args)
    options = RunOptions(args.max_tokens, args.settle, args.min_context)
    with contextlib.ExitStack() as stack:
        client = Completions(args.url, timeout_s=args.timeout)
        stack.callback(client.close)
        sidecar = Sidecar(args.sidecar, token=_token(args.token_file))
        stack.callback(sidecar.close)
        store = stack.enter_context(ResultStore(args.out))
        progress = Progress(0)
        stack.callback(progress.close)
        runner = Runner(client, sidecar, store, options, args.served_model)
        runner.check_length(max(getattr(args, "lengths", [0])))
        run_sweep(runner, Plan(points, make()), progress)
        results = collect(store.records)
    if args.report is not None:
        _say(f"report: {write_report(results, args.report)}")
    print(json.dumps(as_json(results)) if args.json else as_text(results))
    return 0


def _report(args: argparse.Namespace) -> int:
    from blasst.evals.cells import collect
    from blasst.evals.report import as_json, as_text, write_report
    from blasst.evals.store import read_results

    results = collect(read_results(args.results))
    target = write_report(results, args.out or args.results.parent)
    _say(f"report: {target}")
    print(json.dumps(as_json(results)) if args.json else as_text(results))
    return 0


def _points(args: argparse.Namespace) -> list[Point]:
    given = args.mag or args.skip_lambda or args.scale
    return parse_points(args.mag if given else DEFAULT_MAGS, args.skip_lambda, args.scale)


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as e:
        raise InputError(f"--token-file {path} cannot be read: {e.strerror}") from e


def _say_line(text: str) -> None:
    print(f"blasst: {text}", file=sys.stderr, flush=True)


_say: Say = _say_line
