"""`blasst doctor`: is this machine ready, what would run, and if not, what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blasst.plugin.doctor_checks import Finding

_EPILOG = """exit codes: 0 everything is fine; 1 there are warnings: it works, but not all of it;
2 there are errors: `vllm serve --attention-backend blasst` would fail or could not skip"""
_EXIT = {"ok": 0, "warning": 1, "error": 2}
_MARK = {"ok": "ok      ", "warning": "WARNING ", "error": "ERROR   "}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints versions, the GPU, the implementation that would run and why, shadowed or missing "
        "packages, write permission of the state folder and the VLLM_BLASST_* settings."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from blasst.plugin.doctor_checks import examine

    findings = examine()
    code = exit_code(findings)
    if args.json:
        report = {"exit_code": code, "findings": [dataclasses.asdict(f) for f in findings]}
        print(json.dumps(report, indent=1))
    else:
        for f in findings:
            print(f"{_MARK[f.status]}{f.name:<22} {f.detail}")
            if f.remedy:
                print(f"{'':8}{'':<22} -> {f.remedy}")
    return code


def exit_code(findings: list[Finding]) -> int:
    """The worst status decides."""
    return max((_EXIT[f.status] for f in findings), default=0)
