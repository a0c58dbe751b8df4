"""python -P -m blasst.deploy.drills kill: drills of a deployment on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from blasst.deploy.drills import kill
from blasst.deploy.drills.processes import ROLES
from blasst.deploy.drills.verdict import Result

_EPILOG = """exit codes: 0 every promise held, 1 one was broken (a line on stderr says which),
2 bad input or processes that do not come up
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        "python -P -m blasst.deploy.drills",
        description="Damage a deployment on this machine and check what it promised.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    drills = top.add_subparsers(dest="drill", required=True, metavar="kill")
    one = drills.add_parser("kill", help="kill -9 of every process under load and changes")
    one.add_argument("--model", type=Path, required=True, help="folder of a model that vLLM serves")
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
    one.add_argument("--prompt-tokens", type=int, default=kill.Plan.prompt_tokens)
    one.add_argument("--vocabulary", type=int, default=kill.Plan.vocabulary)
    one.add_argument("--clients", type=int, default=kill.Plan.clients)
    one.add_argument(
        "--pause", type=float, default=kill.Plan.pause_s, help="seconds between changes, on average"
    )
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--folder", type=Path, help="empty folder to keep state and logs in")
    one.add_argument("--json", action="store_true", help="the numbers as one JSON object")
    return top


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="blasst-drill-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            result = kill.run(_plan(args, folder), lambda text: print(text, file=sys.stderr))
        except (TimeoutError, RuntimeError, OSError) as e:
            print(f"drills: {e}", file=sys.stderr)
            return 2
    return _report(result)


def _plan(args: argparse.Namespace, folder: Path) -> kill.Plan:
    return kill.Plan(
        model=args.model,
        folder=folder,
        changes=args.changes,
        sidecar_kills=args.sidecar_kills,
        engine_kills=ROLES * args.rounds,
        mags=args.mags,
        prompt_tokens=args.prompt_tokens,
        vocabulary=args.vocabulary,
        clients=args.clients,
        pause_s=args.pause,
        seed=args.seed,
    )


def _report(result: Result) -> int:
    print(json.dumps(result.numbers, indent=1))
    for fault in result.faults:
        print(f"broken: {fault}", file=sys.stderr)
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
