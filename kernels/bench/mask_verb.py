"""Options, files and tables of `blasst bench masks`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blasst.kernels.bench.masks import Row

SECTIONS = (
    "speed",
    "errors",
    "score_mod",
    "backward",
    "determinism",
    "invariance",
    "votes",
    "lists",
)
LENGTHS = {"cuda": "2048,4096,8192,16384,65536", "cpu": "512,1024"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `blasst bench masks`."""
    add = parser.add_argument
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where (default: auto)")
    add("--sections", default=",".join(SECTIONS), metavar="S,S", help="of " + ", ".join(SECTIONS))
    add("--lengths", default=None, metavar="N,N",
        help=f"tokens (default: {LENGTHS['cuda']}; {LENGTHS['cpu']} on a CPU)")  # fmt: skip
    add("--small", type=int, default=4096, help="tokens of the sections about bits (4096)")
    add("--heads", type=int, default=16, help="q and kv heads (default: 16)")
    add("--head-dim", type=int, default=128, help="64 or 128 (default: 128)")
    add("--rounds", type=int, default=30, help="timed rounds (default: 30)")
    add("--markdown", type=Path, default=None, metavar="FILE", help="also write tables here")
    add("--json", type=Path, default=None, metavar="FILE",
        help="also write rows here, after every section; holds the crossover table")  # fmt: skip


def run(args: argparse.Namespace, command: str) -> int:
    """Exit code: 0, 1 cannot run, 2 wrong usage."""
    import torch

    from blasst.kernels.bench import attention, mask_votes, masks

    chosen = args.sections.split(",")
    unknown = [name for name in chosen if name not in SECTIONS]
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    given = (args.lengths or LENGTHS[device]).split(",")
    lengths = [int(n) for n in given if n.isdigit() and int(n) > 0]
    if unknown or len(lengths) < len(given) or args.rounds < 1 or args.small < 64:
        wrong = f"section {unknown[0]!r} is unknown" if unknown else "a number is out of range"
        print(f"blasst: error: {wrong}; see blasst bench masks --help", file=sys.stderr)
        return 2
    if device == "cuda" and not torch.cuda.is_available():
        print("blasst: error: --device cuda: torch finds no GPU here", file=sys.stderr)
        return 1
    plan = masks.Plan(tuple(lengths), args.rounds, device, args.small, args.heads, args.head_dim)
    result: dict[str, Any] = {"where": attention.machine(device), "sections": {}}
    for name in chosen:
        print(f"masks: {name}", file=sys.stderr, flush=True)
        section = mask_votes.votes if name == "votes" else getattr(masks, name)
        rows = result["sections"][name] = []
        for row in section(plan):
            print(f"  {row}", file=sys.stderr, flush=True)
            rows.append(row)
            result["crossover"] = crossover(result["sections"].get("speed", []), device)
            if args.json is not None:
                args.json.write_text(json.dumps(result, indent=1))
    text = markdown(result, command)
    if args.markdown is not None:
        args.markdown.write_text(text)
    print(text)
    return 0


def crossover(rows: Sequence[Row], device: str) -> list[dict[str, object]]:
    """The shortest length from which FA4 through FlexAttention is faster for every mask."""
    if device != "cuda":
        return []
    import torch

    major = torch.cuda.get_device_capability()[0]
    return find_crossover(rows, major)


def find_crossover(rows: Sequence[Row], major: int) -> list[dict[str, object]]:
    """From rows of the section speed."""
    table: list[dict[str, object]] = []
    for column, needs_grad in (("forward_ms", False), ("both_ms", True)):
        ms = {(r["tokens"], r["mask"], r["route"]): r[column] for r in rows if column in r}
        won = None
        for tokens in sorted({n for n, _, _ in ms}, reverse=True):
            pairs = [
                (ms.get((tokens, mask, "flex-fa4")), ms.get((tokens, mask, "flex-triton")))
                for mask in sorted({m for n, m, _ in ms if n == tokens})
            ]
            if not all(a is not None and b is not None and a < b for a, b in pairs):
                break
            won = tokens
        if won is not None:
            table.append({"needs_grad": needs_grad, "major": major, "tokens": won})
    return table


def markdown(result: dict[str, Any], command: str) -> str:
    """One table a section, columns in the order of their first row."""
    where = ", ".join(f"{k} {v}" for k, v in result["where"].items())
    lines = [f"{where}.", "", f"    {command}", ""]
    for name, rows in result["sections"].items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += [f"## {name}", "", "| " + " | ".join(columns) + " |"]
        lines += ["|" + "---|" * len(columns)]
        lines += [
            "| " + " | ".join(_cell(key, row.get(key)) for key in columns) + " |" for row in rows
        ]
        lines.append("")
    if result.get("crossover"):
        lines += ["## crossover", "", "```", json.dumps(result["crossover"]), "```", ""]
    return "\n".join(lines)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if key in ("sparsity", "skip_rate", "hit_rate"):
            return f"{value:.1%}"
        return f"{value:.3f}" if key.endswith(("_ms", "ratio")) else f"{value:.3g}"
    return str(value).replace("|", "/")
