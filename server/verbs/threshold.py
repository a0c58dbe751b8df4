"""`blasst threshold get|set|watch`: the threshold of a running deployment, through its sidecar."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NoReturn

from blasst.kernels.exchange.schedule import Schedule, Threshold
from blasst.kernels.threshold import ThresholdError
from blasst.server.cli import fail
from blasst.server.client import ApiError, Target, ThresholdClient
from blasst.server.settings import DEFAULT_HOST, DEFAULT_PORT, SettingsError
from blasst.server.verbs.common import add_threshold_options, threshold_of

NOT_CONVERGED = 3
_EPILOG = """examples:
  blasst threshold set --mag 2500 --wait 10
  blasst threshold set --schedule 16k=off,64k=mag:7000,rest=mag:4500
  blasst threshold get --json

exit codes: 0 done, 1 refused or no sidecar, 2 bad input, 3 not converged within --wait,
130 interrupted
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show, set or watch the skip threshold of a running deployment."
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", required=True, metavar="get|set|watch")
    get = actions.add_parser("get", help="print the threshold and who follows it")
    change = actions.add_parser("set", help="set it; exactly one of the six units")
    watch = actions.add_parser("watch", help="print a line at every change until interrupted")
    for action in (get, change, watch):
        action.allow_abbrev = False
        _add_common(action)
    units = add_threshold_options(change, off=True, required=True)
    units.add_argument(
        "--target-skip-rate",
        type=float,
        metavar="R",
        help="share of the tiles to skip, 0 <= R < 1, through a calibration preset of the sidecar",
    )
    change.add_argument(
        "--preset", default="", metavar="NAME", help="that preset (default: the one that fits)"
    )
    change.add_argument("value", nargs="?", type=_no_unit, metavar="VALUE", help=argparse.SUPPRESS)
    change.add_argument(
        "--min-context",
        type=int,
        metavar="N",
        help="prompts shorter than N tokens run dense (left out: the engine's own setting)",
    )
    change.add_argument("--reason", default="", help="free text, kept with the value")
    change.add_argument(
        "--force", action="store_true", help="also over a corrupt file or a concurrent change"
    )
    for action in (get, change):
        action.add_argument(
            "--wait",
            type=float,
            default=0.0,
            metavar="SECONDS",
            help="wait until every front end follows, at most so long; exit code 3 if not",
        )
    watch.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="default %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    for name in ("wait", "interval"):
        seconds = getattr(args, name, 1.0)
        if not math.isfinite(seconds) or seconds < 0:
            return fail(f"--{name} {seconds} must be a number of seconds, at least 0", 2)
    try:
        client = ThresholdClient.of(args.url, args.token_file, args.ca_file)
        if args.action == "watch":
            return _watch(client, args)
        if args.action == "get":
            return _finish(client, client.get(), args)
        return _set(client, args)
    except (ThresholdError, SettingsError) as e:
        return fail(e, 2)
    except ApiError as e:
        return fail(f"{e}{_remedy(e, args)}", 2 if e.status in (400, 422) else 1)


def _remedy(error: ApiError, args: argparse.Namespace) -> str:
    """What to do about it at the command line, where the API's own words are about HTTP."""
    if error.kind == "state-unreadable":
        return "; from here: `blasst threshold set --mag N --force`"
    if error.status != 401:
        return ""
    if args.token_file is None:
        return " No token was sent: give --token-file FILE, the file the sidecar was started with."
    return (
        f" The token in {args.token_file} is not accepted: --token-file must name the file the "
        "sidecar was started with."
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=f"http://{DEFAULT_HOST}:{DEFAULT_PORT}",
        help="address of the sidecar (default %(default)s)",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the bearer token, if it has one"
    )
    parser.add_argument(
        "--ca-file", type=Path, metavar="FILE", help="PEM certificates to trust for https"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")


def _set(client: ThresholdClient, args: argparse.Namespace) -> int:
    rate = args.target_skip_rate
    if args.preset and rate is None:
        raise SettingsError("--preset goes with --target-skip-rate only")
    threshold: Threshold | Target | None = threshold_of(args)
    if rate is not None:
        threshold = Target(rate, args.preset)
    if_match = "*" if args.force else f'"{client.get()["generation"]}"'
    state = client.put(
        threshold, if_match=if_match, min_context=args.min_context, reason=args.reason
    )
    return _finish(client, state, args)


def _finish(client: ThresholdClient, state: dict[str, Any], args: argparse.Namespace) -> int:
    wanted = state["generation"]
    if args.wait:
        state = client.wait_converged(wanted, args.wait)
    _print(state, args.json)
    if not args.wait or state["converged"]:
        return 0
    follow, live = _followers(state)
    written = "was written but" if args.action == "set" else "is"
    return fail(
        f"generation {wanted} {written} not taken up within {args.wait:g} s: "
        f"{follow}/{live} front ends follow",
        NOT_CONVERGED,
    )


def _watch(client: ThresholdClient, args: argparse.Namespace) -> int:
    last: object = None
    while True:
        state = client.get()
        # Ages move all the time, and stamps with requests, which the text does not show.
        without_ages = {**state, "front_ends": [{**f, "age_s": 0} for f in state["front_ends"]]}
        now = without_ages if args.json else _text(state)
        if now != last:
            _print(state, args.json)
            last = now
        time.sleep(args.interval)


def _print(state: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(state) if as_json else _text(state), flush=True)


def _text(state: dict[str, Any]) -> str:
    threshold = state["threshold"]
    text = "dense" if threshold is None else f"{threshold['unit']} {threshold['value']:g}"
    if state.get("schedule"):
        text = str(Schedule.load(state["schedule"]))
    if threshold is not None and threshold["unit"] == "mag":
        text += f" (lambda {state['lambda']:.6g})"
    if state.get("origin"):
        text += f" ({state['origin']})"
    follow, live = _followers(state)
    return f"{text}, generation {state['generation']}, {follow}/{live} front ends follow"


def _followers(state: dict[str, Any]) -> tuple[int, int]:
    """How many of the running front ends have read this generation; how many run."""
    live = [f for f in state["front_ends"] if f["alive"]]
    return sum(f["generation_read"] == state["generation"] for f in live), len(live)


def _no_unit(text: str) -> NoReturn:
    example = text if text.replace(".", "", 1).isdecimal() else "N"
    raise argparse.ArgumentTypeError(
        f"{text!r} has no unit; give --mag {example}, --skip-lambda, --scale, or --off for dense"
    )
