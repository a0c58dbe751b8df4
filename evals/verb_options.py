"""Options that several verbs of `blasst ruler` share."""

from __future__ import annotations

import argparse
from pathlib import Path

from blasst.evals.errors import InputError
from blasst.evals.thresholds import Point, parse_points

DEFAULT_TASKS = ("niah_single_2", "niah_multivalue", "vt")
ALL_TASKS = "all"
DEFAULT_MAGS = ("dense", "10000", "7000", "4500", "2500", "1500", "1000")
SEED = 42
COUNTS = {"smoke": 5, "full": 500}
DEFAULT_COUNT = 100


def add_generator_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, help="model folder, for its tokenizer (default: the demo model)")
    add(
        "--tasks",
        nargs="+",
        default=list(DEFAULT_TASKS),
        metavar="TASK",
        help=f"RULER's names, or all for the 13 (default: {' '.join(DEFAULT_TASKS)})",
    )
    add(
        "--lengths",
        nargs="+",
        type=int,
        default=[4096],
        metavar="TOKENS",
        help="nominal lengths in tokens, 512 to 1048576: prompt plus the answer's budget "
        "(default: 4096)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--count", type=int, help=f"samples a task and length ({DEFAULT_COUNT})")
    size.add_argument("--smoke", action="store_true", help="5 samples: does everything work?")
    size.add_argument("--full", action="store_true", help="500 samples, as RULER publishes")
    add(
        "--mode",
        default="balanced",
        help="balanced (default): even depths and gold positions; official: NVIDIA's generators, "
        "byte for byte",
    )
    add("--data", type=Path, help="folder with RULER's texts (default: NVIDIA's pinned package)")
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


def add_server_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--url",
        nargs="+",
        default=["http://127.0.0.1:8000"],
        help="OpenAI-compatible servers, equal ones if several (default: http://127.0.0.1:8000)",
    )
    add(
        "--sidecar",
        nargs="+",
        default=["http://127.0.0.1:8300"],
        help="the sidecar of each, in the same order (default: http://127.0.0.1:8300)",
    )
    add("--served-model", help="served name (default: the first that the server lists)")
    add("--token-file", type=Path, help="file with the sidecar's bearer token")
    add(
        "--min-context",
        type=int,
        help="prompt tokens below which requests run dense (default: the deployment's)",
    )
    add(
        "--settle",
        type=float,
        default=20.0,
        help="seconds that counters may lag behind (default: %(default)s)",
    )
    add("--timeout", type=float, default=600.0, help="seconds for one request (%(default)s)")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    add = parser.add_argument
    add_points(parser, DEFAULT_MAGS)
    add("--max-tokens", type=int, help="answer tokens at most (default: RULER's budget per task)")
    add(
        "--concurrency",
        type=int,
        default=8,
        help="requests at once in the accuracy pass; 1 measures time and answers in one pass "
        "(default: %(default)s)",
    )
    add(
        "--nll",
        type=int,
        metavar="N",
        help="gold NLL of only the first N samples a task and length; it costs a server far more "
        "than an answer (default: all)",
    )
    add(
        "--timed",
        type=int,
        default=10,
        help="samples a task and length in the TTFT pass, one at a time (default: %(default)s)",
    )
    add("--ray", metavar="ADDRESS", help="measure from the nodes of this Ray cluster (or: local)")
    add("--dry-run", action="store_true", help="print the cost estimate and stop")
    add("--out", type=Path, required=True, help="results file (JSON lines); resumed if it exists")
    add("--report", type=Path, help="folder for index.html and report.md")


def add_points(parser: argparse.ArgumentParser, mags: tuple[str, ...] = ()) -> None:
    add = parser.add_argument
    default = f"(default: {' '.join(mags)})" if mags else "(default: all in the results)"
    help_mag = f"MAGs, or dense; lambda = 2^(-M/1000) {default}"
    add("--mag", nargs="+", default=[], metavar="M", help=help_mag)
    add("--skip-lambda", nargs="+", default=[], metavar="X", help="lambdas, 0 <= X < 1")
    add("--scale", nargs="+", default=[], metavar="S", help="scales, lambda = S / prompt tokens")


def points_of(args: argparse.Namespace, default: tuple[str, ...] = ()) -> list[Point]:
    given = args.mag or args.skip_lambda or args.scale
    return parse_points(args.mag if given else default, args.skip_lambda, args.scale)


def count_of(args: argparse.Namespace) -> int:
    for name, count in COUNTS.items():
        if getattr(args, name):
            return count
    return DEFAULT_COUNT if args.count is None else int(args.count)


def tasks_of(args: argparse.Namespace) -> list[str]:
    from blasst.evals.tasks import tasks

    return list(tasks()) if args.tasks == [ALL_TASKS] else list(args.tasks)


def endpoints_of(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(server, sidecar), paired in order."""
    if len(args.url) != len(args.sidecar):
        raise InputError(
            f"{len(args.url)} --url and {len(args.sidecar)} --sidecar: give one sidecar a server"
        )
    for option, urls in (("--url", args.url), ("--sidecar", args.sidecar)):
        if len(set(urls)) < len(urls):
            raise InputError(
                f"{option} names {max(urls, key=urls.count)} twice: one sweep at a time on a server"
            )
    return list(zip(args.url, args.sidecar, strict=True))


def one_endpoint_of(args: argparse.Namespace) -> None:
    """Raises InputError where several servers are given to what asks one."""
    if len(args.url) != 1 or len(args.sidecar) != 1:
        raise InputError(
            f"{len(args.url)} --url and {len(args.sidecar)} --sidecar: give one of each here"
        )


def token_of(args: argparse.Namespace) -> str:
    if args.token_file is None:
        return ""
    try:
        return str(args.token_file.read_text(encoding="utf-8")).strip()
    except OSError as e:
        raise InputError(f"--token-file {args.token_file} cannot be read: {e.strerror}") from e
