"""python -P -m blasst.deploy.drills --help: drills of a deployment on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.error
from pathlib import Path
from typing import Any

from blasst.deploy.drills import dashboard, kill, soak
from blasst.deploy.drills.processes import ROLES
from blasst.deploy.drills.verdict import Result

DASHBOARD = Path(__file__).parents[1] / "grafana" / "dashboards" / "blasst.json"
_EPILOG = """exit codes: 0 every promise held, 1 one was broken (a line on stderr says which),
2 bad input or processes that do not come up
"""


def parser() -> argparse.ArgumentParser:
    """Of the three drills."""
    top = argparse.ArgumentParser(
        "python -P -m blasst.deploy.drills",
        description="Damage a deployment on this machine and check what it promised.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    drills = top.add_subparsers(dest="drill", required=True, metavar="kill|soak|dashboard")
    _add_kill(drills.add_parser("kill", help="kill -9 of every process under load and changes"))
    _add_soak(drills.add_parser("soak", help="hours of calls in minutes: memory and open files"))
    _add_dashboard(drills.add_parser("dashboard", help="draw the Grafana dashboard as a page"))
    return top


def _add_dashboard(one: argparse.ArgumentParser) -> None:
    one.add_argument("--prometheus", required=True, help="such as http://127.0.0.1:9090")
    one.add_argument("--minutes", type=float, default=15.0, help="of the past (%(default)s)")
    one.add_argument("--dashboard", type=Path, default=DASHBOARD, help="default: blasst's own")


def _add_common(one: argparse.ArgumentParser, plan: type[kill.Plan] | type[soak.Plan]) -> None:
    one.add_argument("--model", type=Path, required=True, help="folder of a model that vLLM serves")
    one.add_argument(
        "--prompt-tokens", type=int, default=plan.prompt_tokens, help="default %(default)s"
    )
    one.add_argument(
        "--vocabulary",
        type=int,
        default=plan.vocabulary,
        help="prompts are token ids below it (default %(default)s)",
    )
    one.add_argument("--clients", type=int, default=plan.clients, help="default %(default)s")
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--folder", type=Path, help="empty folder to keep state and logs in")


def _add_kill(one: argparse.ArgumentParser) -> None:
    _add_common(one, kill.Plan)
    one.add_argument("--changes", type=int, default=200, help="of the threshold (%(default)s)")
    one.add_argument("--sidecar-kills", type=int, default=20, help="default %(default)s")
    one.add_argument(
        "--rounds", type=int, default=3, help="kills of each vLLM process (default %(default)s)"
    )
    one.add_argument(
        "--mags",
        type=lambda text: tuple(map(float, text.split(","))),
        default=kill.Plan.mags,
        help="classes of thresholds, beside dense (default %(default)s)",
    )
    one.add_argument(
        "--pause", type=float, default=kill.Plan.pause_s, help="seconds between changes, on average"
    )


def _add_soak(one: argparse.ArgumentParser) -> None:
    _add_common(one, soak.Plan)
    one.add_argument("--minutes", type=float, default=15.0, help="default %(default)s")
    one.add_argument("--hours", type=float, default=2.0, help="put into them (%(default)s)")


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: those of the epilog."""
    args = parser().parse_args(arguments)
    if args.drill == "dashboard":
        return _draw(args)
    with tempfile.TemporaryDirectory(prefix="blasst-drill-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            result = _run(args, folder)
        except (TimeoutError, RuntimeError, OSError, ValueError) as e:
            print(f"drills: {e}", file=sys.stderr)
            return 2
    return _report(result)


def _draw(args: argparse.Namespace) -> int:
    try:
        print(dashboard.draw(args.prometheus, args.dashboard, args.minutes))
    except urllib.error.URLError as e:
        print(f"drills: no answer of a Prometheus at {args.prometheus}: {e}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as e:
        print(f"drills: {e}", file=sys.stderr)
        return 2
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(args: argparse.Namespace, folder: Path) -> Result:
    if not (args.model / "config.json").is_file():
        raise ValueError(f"--model {args.model} has no config.json; name the folder of a model")
    common: dict[str, Any] = {
        "model": args.model,
        "folder": folder,
        "prompt_tokens": args.prompt_tokens,
        "vocabulary": args.vocabulary,
        "clients": args.clients,
        "seed": args.seed,
    }
    if args.drill == "soak":
        return soak.run(soak.Plan(**common, minutes=args.minutes, hours=args.hours), _say)
    plan = kill.Plan(
        **common,
        changes=args.changes,
        sidecar_kills=args.sidecar_kills,
        engine_kills=ROLES * args.rounds,
        mags=args.mags,
        pause_s=args.pause,
    )
    return kill.run(plan, _say)


def _report(result: Result) -> int:
    print(json.dumps(result.numbers, indent=1))
    for fault in result.faults:
        print(f"broken: {fault}", file=sys.stderr)
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
