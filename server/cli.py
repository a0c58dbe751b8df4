"""The `blasst` program: finds the verb, loads only that one, turns failures into one clear line.

A verb is a module with `configure(parser)` and `run(args) -> exit code`, named by an entry point of
the group `blasst.verbs`. ACCEPTS_UNKNOWN = True in it hands unknown options over as `args.extra`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import NoReturn

GROUP = "blasst.verbs"
_SUMMARIES = {
    "serve": "run vLLM with the blasst backend, and the sidecar beside it",
    "sidecar": "run the sidecar alone, for a vLLM started elsewhere",
    "threshold": "show, set or watch the threshold of a running deployment",
    "doctor": "check this machine and say what would run and why",
    "bench": "measure the attention implementations",
    "verify": "execute a GPU kernel's PTX on this CPU, with races and an oracle",
    "trace": "timelines of the Hopper kernel's warps, and hardware counters",
    "ruler": "RULER: generate, run, sweep, report",
    "completion": "print the completion script of a shell",
    "canary": "compare a deployment with dense answers, once",
    "demo": "serve a small model on this CPU and sweep thresholds",
}
_EXTRAS = {
    "fastapi": "server",
    "starlette": "server",
    "pydantic": "server",
    "uvicorn": "server",
    "prometheus_client": "server",
    "httpx": "evals",
    "jinja2": "evals",
    "tokenizers": "evals",
    "gguf": "evals",
    "numpy": "evals",
    "transformers": "evals",
    "wonderwords": "evals",
    "torch": "cpu",
    "vllm": "cpu",
}
_ABOUT = """Cheaper long-context prefill for vLLM by skipping attention blocks.

verbs:
"""
_EPILOG = "exit codes: 0 done, 1 failed, 2 bad input or usage, 130 interrupted"


class _Parser(argparse.ArgumentParser):
    """Errors in one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        print(f"blasst: error: {message} (see `{self.prog} --help`)", file=sys.stderr)
        raise SystemExit(2)


def fail(message: object, code: int) -> int:
    """Print the one line of a failure; the exit code again."""
    print(f"blasst: error: {message}", file=sys.stderr)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    verbs = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    if not args or args[0].startswith("-"):
        return _top_level(args, verbs)
    name, rest = args[0], args[1:]
    if name not in verbs:
        return fail(f"no verb {name!r}; choose one of {', '.join(sorted(verbs))}", 2)
    try:
        return _run_verb(name, verbs[name], rest)
    except ModuleNotFoundError as e:
        return fail(_missing(name, e), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output left (`| head`); Python would complain again while closing it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:
        return fail(e, 1)


def _top_level(args: Sequence[str], verbs: dict[str, EntryPoint]) -> int:
    order = [*(n for n in _SUMMARIES if n in verbs), *sorted(verbs.keys() - _SUMMARIES)]
    lines = [f"  {name:<10} {_SUMMARIES.get(name, '')}".rstrip() for name in order]
    parser = _Parser(
        prog="blasst",
        usage="blasst VERB [options]\n       blasst VERB --help",
        description=_ABOUT + "\n".join(lines),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = f"blasst {importlib.metadata.version('blasst')}"
    parser.add_argument("--version", action="version", version=version)
    parser.parse_args(args)
    parser.print_help(sys.stderr)
    return 2


def _run_verb(name: str, point: EntryPoint, rest: Sequence[str]) -> int:
    module: ModuleType = importlib.import_module(point.module)
    parser = _Parser(
        prog=f"blasst {name}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    args, extra = parser.parse_known_args(rest)
    if getattr(module, "ACCEPTS_UNKNOWN", False):
        args.extra = extra
    elif extra:
        parser.error(f"unknown argument {extra[0]!r}")
    code: int = module.run(args)
    return code


def _missing(verb: str, error: ModuleNotFoundError) -> str:
    module = error.name or str(error)
    if module.partition(".")[0] == "blasst":
        return f"{verb} is not part of this installation: no module {module}"
    extra = _EXTRAS.get(module.partition(".")[0])
    if extra is None:
        return f"{verb} needs the Python package {module}, which is not installed"
    return f"{verb} needs {module}: pip install 'blasst[{extra}]'"
