"""`blasst canary PLAN`: every prompt of a canary's plan once, and what the numbers say."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

from blasst.server.canary_plan import CanaryPlan, load_plan
from blasst.server.cli import fail
from blasst.server.probe import ProbeError, Result
from blasst.server.settings import SettingsError

CROSSED = 3
_EPILOG = """Sends each prompt three times: dense, as deployed, dense again. Changes nothing. It
asks vLLM alone: a prompt that runs dense anyway (no threshold, below min_context) counts as equal.

exit codes: 0 within the bounds, 1 no usable answer, 2 bad input, 3 a bound is crossed, 4 dense
answers differ among themselves: nothing can be judged
"""
NOISY = 4


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure how far answers as deployed are from dense ones."
    parser.epilog = _EPILOG
    parser.add_argument(
        "plan", type=Path, metavar="PLAN", help="TOML, as for --canary of a sidecar"
    )
    parser.add_argument(
        "--engine-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="vLLM's address where the plan has none (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")


def run(args: argparse.Namespace) -> int:
    try:
        plan = load_plan(args.plan, args.engine_url)
        results = [_probe(plan, number, args.json) for number in range(len(plan.prompts))]
    except SettingsError as e:
        return fail(e, 2)
    except ProbeError as e:
        return fail(e, 1)
    agreement, control, rise = (
        math.fsum(values) / len(results)
        for values in zip(*((r.agreement, r.control, r.nll_increase) for r in results), strict=True)
    )
    summary = {"agreement": agreement, "control": control, "nll_increase": rise}
    crossed = plan.bounds.crossed(agreement, rise)
    noisy = control < plan.bounds.min_agreement
    if args.json:
        print(json.dumps({"prompts": len(results), **summary, "crossed": crossed, "noisy": noisy}))
    else:
        print(f"mean of {len(results)}: {_text(agreement, control, rise)}")
    if noisy:
        return fail("dense answers differ among themselves: nothing can be judged", NOISY)
    return fail(crossed, CROSSED) if crossed else 0


def _probe(plan: CanaryPlan, number: int, as_json: bool) -> Result:
    result = plan.endpoint.probe(plan.prompts[number], plan.max_tokens)
    if as_json:
        print(json.dumps({"prompt": number + 1, **asdict(result)}), flush=True)
    else:
        text = _text(result.agreement, result.control, result.nll_increase)
        print(f"prompt {number + 1}, {result.prompt_tokens} tokens: {text}", flush=True)
    return result


def _text(agreement: float, control: float, rise: float) -> str:
    return f"agreement {agreement:.3f}, dense again {control:.3f}, NLL {rise:+.4f} nats a token"
