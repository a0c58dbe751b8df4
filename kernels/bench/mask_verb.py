"""Options, files and tables of `blasst bench masks`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
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
    "settings",
    "invariance",
    "votes",
    "lists",
)
MASKS = ("causal", "shared_prefix", "strip_thinking")
LENGTHS = {"cuda": "2048,4096,8192,16384,65536", "cpu": "512,1024"}
SMALL = {"cuda": 4096, "cpu": 512}


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `blasst bench masks`."""
    add = parser.add_argument
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where (default: auto)")
    add("--sections", default=",".join(SECTIONS), metavar="S,S", help="of " + ", ".join(SECTIONS))
    add("--masks", default=",".join(MASKS), metavar="M,M", help="of " + ", ".join(MASKS))
    add("--lengths", default=None, metavar="N,N",
        help=f"tokens (default: {LENGTHS['cuda']}; {LENGTHS['cpu']} on a CPU)")  # fmt: skip
    add("--small", type=int, default=None, metavar="N", help="tokens of the sections about bits "
        f"(default: {SMALL['cuda']}; {SMALL['cpu']} on a CPU)")  # fmt: skip
    add("--heads", type=int, default=16, help="q and kv heads (default: 16)")
    add("--head-dim", type=int, default=128, help="64 or 128 (default: 128)")
    add("--rounds", type=int, default=30, help="timed rounds (default: 30)")
    add("--markdown", type=Path, default=None, metavar="FILE", help="also write tables here")
    add("--json", type=Path, default=None, metavar="FILE",
        help="also write rows here, after every section; holds the crossover table")  # fmt: skip


def run(args: argparse.Namespace, command: str) -> int:
    """Exit code: 0, 1 cannot run, 2 wrong usage."""
    import torch

    from blasst.kernels.bench import attention, mask_bits, mask_votes, masks

    chosen = args.sections.split(",")
    named = args.masks.split(",")
    unknown = [f"section {name!r}" for name in chosen if name not in SECTIONS]
    unknown += [f"mask {name!r}" for name in named if name not in MASKS]
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    given = (args.lengths or LENGTHS[device]).split(",")
    lengths = [int(n) for n in given if n.isdigit() and int(n) > 0]
    small = SMALL[device] if args.small is None else args.small
    if unknown or len(lengths) < len(given) or args.rounds < 1 or small < 64:
        wrong = f"{unknown[0]} is unknown" if unknown else "a number is out of range"
        print(f"blasst: error: {wrong}; see blasst bench masks --help", file=sys.stderr)
        return 2
    if device == "cuda" and not torch.cuda.is_available():
        print("blasst: error: --device cuda: torch finds no GPU here", file=sys.stderr)
        return 1
    sizes = small, args.heads, args.head_dim
    plan = masks.Plan(tuple(lengths), args.rounds, device, *sizes, masks=tuple(named))
    bits = dict.fromkeys(("determinism", "settings", "invariance"), mask_bits)
    modules = {"votes": mask_votes, **bits}
    result: dict[str, Any] = {"where": attention.machine(device), "sections": {}}
    for name in chosen:
        print(f"masks: {name}", file=sys.stderr, flush=True)
        section = getattr(modules.get(name, masks), name)
        rows = result["sections"][name] = []
        for row in section(plan):
            print(f"  {row}", file=sys.stderr, flush=True)
            rows.append(row)
            result["crossover"] = crossover(
                result["sections"].get("speed", []), device, args.head_dim
            )
            if args.json is not None:
                args.json.write_text(json.dumps(result, indent=1))
    text = markdown(result, command)
    if args.markdown is not None:
        args.markdown.write_text(text)
    print(text)
    return 0


def crossover(rows: Sequence[Row], device: str, head_dim: int) -> list[dict[str, object]]:
    """The shortest lengths from which FA4, called directly and through FlexAttention, beats
    FlexAttention's own kernels for every mask, and from which our kernel beats all three."""
    if device != "cuda":
        return []
    import torch

    major = torch.cuda.get_device_capability()[0]
    return [row | {"head_dim": head_dim} for row in find_crossover(rows, major)]


RIVALS = {
    "fa4": ("flex-triton",),
    "flex-fa4": ("flex-triton",),
    "blasst": ("fa4", "flex-fa4", "flex-triton"),
}


def find_crossover(rows: Sequence[Row], major: int) -> list[dict[str, object]]:
    """From rows of the section speed."""
    table: list[dict[str, object]] = []
    for route, rivals in RIVALS.items():
        for column, needs_grad in (("forward_ms", False), ("both_ms", True)):
            ms = {
                (r["tokens"], r["mask"], r["route"]): float(r[column])
                for r in rows
                if r.get(column) is not None
            }
            tokens = _first_won(ms, route, rivals)
            if tokens is not None:
                table.append(
                    {"route": route, "needs_grad": needs_grad, "major": major, "tokens": tokens}
                )
    return table


def _first_won(
    ms: Mapping[tuple[int, str, str], float], route: str, rivals: Sequence[str]
) -> int | None:
    """The shortest length from which on `route` is the fastest for every mask; None = at none."""
    won = None
    for tokens in sorted({n for n, _, _ in ms}, reverse=True):
        for mask in {m for n, m, _ in ms if n == tokens}:
            ours = ms.get((tokens, mask, route))
            theirs = [ms.get((tokens, mask, rival)) for rival in rivals]
            if ours is None or any(other is None or other <= ours for other in theirs):
                return won
        won = tokens
    return won


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
