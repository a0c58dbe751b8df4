"""`blasst ruler`: samples, measurement, verdicts, calibration and reports."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from blasst.evals import verb_measure, verb_server
from blasst.evals.errors import MALFORMED, EvalsError, InputError
from blasst.evals.verb_measure import say
from blasst.evals.verb_options import (
    add_generator_options,
    add_points,
    add_run_options,
    add_server_options,
    points_of,
)

EPILOG = """exit codes: 0 done; 1 the server failed, or a counter or threshold was not as it
must be; 2 bad input; 130 interrupted (the deployment's threshold is put back, the same command
resumes)"""
VERDICT_EPILOG = """exit codes: 0 GO; 1 NO-GO; 2 INCONCLUSIVE, also for arguments that cannot be
read; 3 the results cannot be judged"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the sub-verbs and their options."""
    parser.description = "RULER at skip thresholds: tasks, measurement, verdict, report."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="ruler_verb", required=True, metavar="VERB")
    fetch = _verb(verbs, "fetch", "fetch and convert the demo model and RULER's texts", _fetch)
    fetch.add_argument(
        "--retrieval", type=Path, metavar="FOLDER", help="also take retrieval-26m from there"
    )
    generate = _verb(
        verbs, "generate", "write samples as token ids, one a line", verb_measure.generate
    )
    add_generator_options(generate)
    generate.add_argument("--out", type=Path, required=True, help="file to write (JSON lines)")
    generate.add_argument(
        "--nvidia", type=Path, metavar="FOLDER", help="also as text, for NVIDIA's client"
    )
    run_ = _verb(verbs, "run", "measure samples from a file at thresholds", verb_measure.run)
    run_.add_argument("--samples", type=Path, required=True, help="file of `ruler generate`")
    add_run_options(run_)
    sweep = _verb(
        verbs, "sweep", "generate and measure: thresholds x lengths x tasks", verb_measure.sweep
    )
    add_generator_options(sweep)
    add_run_options(sweep)
    _add_judging(verbs)
    _add_server_verbs(verbs)


def _add_judging(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = _verb(verbs, "report", "HTML and Markdown from results", _report)
    verdict = _verb(
        verbs, "verdict", "GO, NO-GO or INCONCLUSIVE for each threshold and length", _verdict
    )
    recommend = _verb(
        verbs, "recommend", "the threshold with the best TTFT that is GO everywhere", _recommend
    )
    export = _verb(verbs, "export", "answers as NVIDIA's evaluation program reads them", _export)
    add_points(export)
    export.add_argument("--length", type=int, required=True, help="nominal tokens")
    export.add_argument("--out", type=Path, required=True, help="folder for TASK.jsonl")
    for sub in (report, verdict, recommend, export):
        sub.add_argument("results", type=Path, help="results file of `ruler run` or `sweep`")
    report.add_argument(
        "--out", type=Path, help="folder for index.html and report.md (default: beside results)"
    )
    add_points(verdict)
    for sub in (verdict, recommend):
        sub.epilog = VERDICT_EPILOG
        sub.set_defaults(judges=True)
        sub.add_argument(
            "--margin",
            type=float,
            default=1.0,
            help="points of RULER's mean score that may be lost (default: %(default)s)",
        )


def _add_server_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = _verb(
        verbs, "doctor", "does the server read prompts as they are sent?", verb_server.doctor
    )
    calibrate = _verb(
        verbs,
        "calibrate",
        "measure skip rates, write a preset",
        verb_server.calibrate,
    )
    check = _verb(
        verbs, "bench-check", "is our TTFT that of `vllm bench serve`?", verb_server.bench_check
    )
    check.add_argument("--count", type=int, default=10, help="prompts (default: %(default)s)")
    check.add_argument(
        "--rounds", type=int, default=2, help="runs of the other program (default: %(default)s)"
    )
    check.add_argument("--vllm-command", default="vllm", help="program (default: %(default)s)")
    for sub in (doctor, calibrate, check):
        add_server_options(sub)
        sub.add_argument("--model", type=Path, help="model folder (default: the demo model)")
        sub.add_argument("--prompt-format", default="auto", help="as for `ruler sweep`")
        sub.add_argument(
            "--lengths", type=int, nargs="+", default=[4096], metavar="TOKENS", help="tokens"
        )
    add = calibrate.add_argument
    add("--tasks", nargs="+", default=["niah_multivalue", "vt"], metavar="TASK", help="of RULER")
    add("--count", type=int, default=2, help="prompts a task and length (default: %(default)s)")
    add("--data", type=Path, help="folder with RULER's texts, as for `ruler sweep`")
    add("--results", type=Path, help="take the counters of a sweep instead of a server")
    add("--geometry", metavar="IMPL:MxN", help="with --results: of the server's kernel")
    add("--out", type=Path, required=True, help="preset file to write")
    add("--sparse-config", type=Path, help="also as sparse_attention_config (TensorRT-LLM)")
    add("--target", type=float, help="target skip rate to put into --sparse-config")
    preset = _verb(verbs, "preset", "show a preset, or convert it", verb_server.preset)
    add = preset.add_argument
    add("preset", type=Path, help="preset file")
    add("--target", type=float, help="skip rate (0..1) whose scale is wanted")
    add("--to-config", type=Path, help="put it into this config.json")
    add("--from-config", type=Path, help="write the preset from this config.json")
    add("--geometry", metavar="IMPL:MxN", help="with --from-config: what it was calibrated for")
    add("--model-name", help="with --from-config: as served (default: the folder's name)")


def run(args: argparse.Namespace) -> int:
    """Run the chosen sub-verb; failures become one line and an exit code."""
    handler: Callable[[argparse.Namespace], int] = args.ruler_handler
    try:
        with terminate_as_interrupt(), _of_results(getattr(args, "results", None)):
            return _judged(handler, args) if getattr(args, "judges", False) else handler(args)
    except EvalsError as e:
        print(f"blasst: error: {e}", file=sys.stderr)
        return 3 if getattr(args, "judges", False) else e.exit_code
    except KeyboardInterrupt:
        print("blasst: interrupted; the same command resumes", file=sys.stderr)
        return 130


def _judged(handler: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """A verdict that nobody could read is none, and neither is a fault of this program: no 1."""
    if sys.stdout is None:  # Python's word for a closed one
        raise InputError("the verdict cannot be written: standard output is closed")
    try:
        code = handler(args)
        sys.stdout.flush()
    except (EvalsError, KeyboardInterrupt, *MALFORMED):
        raise
    except OSError as e:
        # Python would try it again at the end, and end with 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InputError(f"the verdict cannot be written: {e.strerror}") from e
    except Exception:  # whatever it is, it ends the program as Python would, but for the code
        traceback.print_exc()
        return 3
    return code


@contextlib.contextmanager
def _of_results(path: Path | None) -> Iterator[None]:
    """What reading a damaged file of results raises somewhere, as one line: 1 would be a NO-GO."""
    try:
        yield
    except MALFORMED as e:
        if path is None:
            raise
        raise InputError(
            f"{path} lacks a field or holds a wrong type ({e!r}): it was edited or is of another "
            "release; measure again with another --out"
        ) from e


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
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")
    return parser


def _fetch(args: argparse.Namespace) -> int:
    from blasst.evals.models import (
        essays_path,
        retrieval_folder,
        ruler_package,
        smollm2_folder,
    )

    found = {
        "model": str(smollm2_folder(say)),
        "essays": str(essays_path(say)),
        "questions": str(ruler_package(say)),
    }
    if args.retrieval is not None:
        found["retrieval"] = str(retrieval_folder(say, args.retrieval))
    lines = (f"{name}: {path}" for name, path in found.items())
    print(json.dumps(found) if args.json else "\n".join(lines))
    return 0


def _report(args: argparse.Namespace) -> int:
    from blasst.evals.cells import collect
    from blasst.evals.report import as_json, as_text, write_report
    from blasst.evals.store import read_results

    results = collect(read_results(args.results))
    target = write_report(results, args.out or args.results.parent)
    say(f"report: {target}")
    print(json.dumps(as_json(results)) if args.json else as_text(results))
    return 0


def _verdict(args: argparse.Namespace) -> int:
    from blasst.evals import verdict
    from blasst.evals.cells import collect
    from blasst.evals.store import read_results

    results = collect(read_results(args.results))
    _say_others(results.others)
    found = verdict.judge(results, points_of(args) or None, args.margin)
    print(json.dumps(verdict.as_json(found)) if args.json else verdict.as_words(found))
    return verdict.EXIT_CODES[verdict.overall(found)]


def _say_others(number: int) -> None:
    if number:
        say(f"{number} samples in the file are of another server or setting and are left out")


def _export(args: argparse.Namespace) -> int:
    from blasst.evals.cells import collect
    from blasst.evals.interop import nvidia_predictions
    from blasst.evals.store import read_results

    points = points_of(args, ("dense",))
    if len(points) != 1:
        raise InputError("give one threshold to export")
    results = collect(read_results(args.results))
    files = nvidia_predictions(results, points[0], args.length, args.out)
    print(json.dumps([str(f) for f in files]) if args.json else f"{len(files)} files in {args.out}")
    return 0


def _recommend(args: argparse.Namespace) -> int:
    from blasst.evals import recommend
    from blasst.evals.cells import collect
    from blasst.evals.store import read_results
    from blasst.evals.verdict import EXIT_CODES

    results = collect(read_results(args.results))
    _say_others(results.others)
    found = recommend.recommend(results, args.margin)
    print(json.dumps(recommend.as_json(found)) if args.json else recommend.as_words(found))
    return EXIT_CODES[found.outcome]
