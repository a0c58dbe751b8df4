"""The report of a sweep: one self-contained HTML page, the same as Markdown, and the raw cells."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blasst.evals.cells import Cell, Results
from blasst.evals.errors import MALFORMED, InputError
from blasst.evals.figures import differences, summary
from blasst.evals.identity import SERVED, UNKNOWN, says
from blasst.evals.plots import Chart, Series, heat_map, legend, line_chart
from blasst.evals.thresholds import key_of, name_of
from blasst.evals.verdict import DEFAULT_MARGIN, LengthVerdict, judge
from blasst.evals.verdict import as_json as verdicts_as_json

COLUMNS = (
    "MAG",
    "lambda",
    "task",
    "length",
    "n",
    "score",
    "gold NLL",
    "TTFT (s)",
    "skip rate",
)
CPU_NOTE = (
    "On a CPU attention is a part of the time to first token, and times scatter with the load. "
    "What skipping saves of attention alone: docs/measurements/cpu-attention.md. GPUs differ."
)
_FEW = 20
"""Samples a cell below which a score says little."""
_METRICS: tuple[tuple[str, str, str, float | None, bool], ...] = (
    ("score", "Score", "0..100", 0.0, False),
    ("gold_nll", "Gold-answer NLL", "nats a token", None, False),
    ("ttft_s", "TTFT, median", "seconds", 0.0, False),
    ("skip_rate", "Skip rate", "of visited tiles", 0.0, True),
)


def row_of(cell: Cell) -> tuple[str, ...]:
    """A cell as the words of the table's COLUMNS; "-" for what was not measured."""
    return (
        "dense" if cell.point is None else _number(cell.mag, "{:.5g}"),
        "-" if cell.skip_lambda is None else f"{cell.skip_lambda:.3g}",
        cell.task,
        str(cell.length),
        str(cell.samples),
        _number(cell.score, "{:.1f}"),
        _number(cell.gold_nll, "{:.4f}"),
        _number(cell.ttft_s, "{:.3f}"),
        _number(cell.skip_rate, "{:.1%}"),
    )


def text_table(results: Results) -> str:
    """The table for a terminal, columns aligned."""
    rows = [COLUMNS, *(row_of(cell) for cell in results.cells)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = []
    for row in rows:
        words = [
            word.ljust(w) if i == 2 else word.rjust(w)
            for i, (word, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(words).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def as_text(results: Results) -> str:
    """The table, and below it what must be known to read it."""
    return "\n".join([text_table(results), "", *remarks(results)]).rstrip()


def remarks(results: Results) -> list[str]:
    """What these results in particular do not show, a line each."""
    lines = []
    measured = [cell for cell in results.cells if cell.samples]
    dense = [cell for cell in measured if cell.point is None]
    for task in results.tasks:
        scores = {cell.length: cell.score for cell in dense if cell.task == task}
        zero = [length for length, score in scores.items() if score == 0]
        if zero:
            where = "" if len(zero) == len(scores) else f" at {', '.join(map(str, zero))} tokens"
            lines.append(f"{task}{where} scores 0 without a threshold too: read its gold NLL.")
    counts = sorted({cell.samples for cell in measured})
    if counts and counts[0] < _FEW:
        many = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
        lines.append(
            f"{many} sample{'' if many == '1' else 's'} a cell: this shows that it works, not how "
            "accurate it is."
        )
    return [*lines, *results.plan.get("notes", ())]


def markdown(results: Results) -> str:
    """The table, and how it was made."""
    lines = ["# RULER at thresholds", "", "| " + " | ".join(COLUMNS) + " |"]
    lines.append("|" + "|".join("--" if i == 2 else "--:" for i in range(len(COLUMNS))) + "|")
    lines += ["| " + " | ".join(row_of(cell)) + " |" for cell in results.cells]
    for paragraph in (*remarks(results), *_notes(results)):
        lines += ["", paragraph]
    lines += _verdict_lines(judge(results))
    lines += ["", "## To reproduce", ""]
    lines += [f"* {name}: `{value}`" for name, value in _facts(results)]
    return "\n".join(lines) + "\n"


def as_json(results: Results) -> dict[str, Any]:
    """Cells as numbers; null for what was not measured."""
    return {
        "cells": [
            {
                "threshold": key_of(cell.point),
                "mag": cell.mag,
                "lambda": cell.skip_lambda,
                "task": cell.task,
                "length": cell.length,
                "samples": cell.samples,
                "prompt_tokens": _finite(cell.prompt_tokens),
                "score": _finite(cell.score),
                "gold_nll": _finite(cell.gold_nll),
                "ttft_s": _finite(cell.ttft_s),
                "skip_rate": _finite(cell.skip_rate),
            }
            for cell in results.cells
        ],
        "verdicts": verdicts_as_json(judge(results)),
        "plan": _json(results.plan),
        "other_samples": results.others,
    }


def page(results: Results) -> str:
    """The HTML page: no script, nothing loaded from elsewhere."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    verdicts = judge(results)
    return environment.get_template("report.html.j2").render(
        verdict_columns=VERDICT_COLUMNS,
        verdicts=[_verdict_row(verdict) for verdict in verdicts],
        verdict_note=_VERDICT_NOTE,
        summary=summary(results),
        length_legend=legend([f"{length} tokens" for length in results.lengths]),
        threshold_legend=legend([name_of(point) for point in results.points]),
        differences=differences(verdicts),
        columns=COLUMNS,
        rows=[row_of(cell) for cell in results.cells],
        group=len(results.points),
        remarks=remarks(results),
        notes=_notes(results),
        machine=results.plan["machine"],
        legend=legend(results.tasks),
        charts=_charts(results),
        heat_maps=_heat_maps(results),
        facts=_facts(results),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(results.plan["at"])),
    )


VERDICT_COLUMNS = (
    "verdict",
    "threshold",
    "length",
    "pairs",
    "difference",
    "95% bounds",
    "detectable",
    "NLL",
    "agreement",
    "why",
)
_VERDICT_NOTE = (
    f"GO: at most {DEFAULT_MARGIN:g} point worse than dense on the mean over the tasks (one-sided "
    "95%, stratified bootstrap over paired samples). Detectable: the true loss that this many "
    "samples find with 80% probability. NLL and agreement move long before a score does."
)


def _verdict_row(v: LengthVerdict) -> tuple[str, ...]:
    bounds = "-" if math.isnan(v.low) else f"{v.low:+.2f} to {v.high:+.2f}"
    return (
        v.outcome,
        v.threshold,
        str(v.length),
        str(v.pairs),
        _number(v.difference, "{:+.2f}"),
        bounds,
        _number(v.detectable, "{:.2f}"),
        _number(v.nll, "{:+.4f}"),
        _number(v.agreement, "{:.1%}"),
        v.reason,
    )


def _verdict_lines(verdicts: Sequence[LengthVerdict]) -> list[str]:
    """The verdicts, and each task's difference, as Markdown tables."""
    if not verdicts:
        return []
    lines = ["", "## Verdicts", "", "| " + " | ".join(VERDICT_COLUMNS) + " |"]
    lines.append("|" + "--|" * len(VERDICT_COLUMNS))
    lines += ["| " + " | ".join(_verdict_row(v)) + " |" for v in verdicts]
    lines += ["", _VERDICT_NOTE, "", "## Differences from dense", ""]
    lines.append(
        "| threshold | length | task | pairs | dense | score | 95% interval | worse | "
        "better | McNemar p | NLL | agreement |"
    )
    lines.append("|" + "--|" * 12)
    lines += [
        f"| {v.threshold} | {v.length} | {t.task} | {t.pairs} | {t.dense:.1f} | {t.score:.1f} | "
        f"{t.interval.low:+.2f} to {t.interval.high:+.2f} | {t.worse} | {t.better} | {t.p:.3g} | "
        f"{_number(t.nll, '{:+.4f}')} | {_number(t.agreement, '{:.1%}')} |"
        for v in verdicts
        for t in v.tasks
    ]
    return lines


def write_report(results: Results, folder: Path) -> Path:
    """index.html and report.md in `folder`; returns the page's path."""
    try:
        text, html = markdown(results), page(results)
    except MALFORMED as e:
        raise InputError(
            f"the plan in the results lacks a field or holds a wrong type ({e!r}): the file was "
            "edited or is of another release; measure again with another --out"
        ) from e
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "index.html"
        for file, content in ((folder / "report.md", text), (target, html)):
            # A server's name may hold what UTF-8 does not.
            file.write_bytes(content.encode(errors="replace"))
    except OSError as e:
        raise InputError(f"{folder} cannot be written: {e.strerror}; give another --out") from e
    return target


def _charts(results: Results) -> list[tuple[int, list[str]]]:
    """Per length, one chart for each metric over the thresholds."""
    x = [_short(name_of(point)) for point in results.points]
    out = []
    for length in results.lengths:
        charts = []
        for field, title, unit, low, percent in _METRICS:
            series = [
                Series(
                    task, [getattr(results.cell(p, task, length), field) for p in results.points]
                )
                for task in results.tasks
            ]
            charts.append(line_chart(Chart(title, unit, x, series, low, percent)))
        out.append((length, charts))
    return out


def _heat_maps(results: Results) -> list[str]:
    out = []
    for length in results.lengths:
        rates = {
            name_of(point): found
            for point in results.points
            if (found := results.layer_rates.get((key_of(point), length)))
        }
        layers = sorted({layer for found in rates.values() for layer in found})
        if layers:
            values = [[found.get(n, math.nan) for n in layers] for found in rates.values()]
            title = f"Skip rate by layer at {length} tokens"
            out.append(heat_map(title, list(rates), layers, values))
    return out


def _notes(results: Results) -> list[str]:
    holes = sum(cell.samples == 0 for cell in results.cells)
    notes = [
        "A higher MAG skips less: lambda = 2^(-MAG/1000). Score is RULER's string_match_all (qa: "
        "string_match_part), 0 to 100. Gold NLL is the mean -ln p of the gold answer's "
        "tokens, which are then part of the prefill. TTFT is the median at concurrency 1, "
        "measured by the client, without prefix-cache hits. Skip rate is skipped / visited tiles "
        "of P.V."
    ]
    real = [c.prompt_tokens for c in results.cells if math.isfinite(c.prompt_tokens)]
    if real:
        shares = [c.prompt_tokens / c.length for c in results.cells if c.samples]
        notes.append(
            f"Real prompts hold {min(shares):.0%} to {max(shares):.0%} of the nominal tokens."
        )
    if holes:
        notes.append(f"{holes} of {len(results.cells)} cells are not measured yet (n = 0).")
    server = results.plan["server"]
    if mute := [name.replace("_", " ") for name in SERVED if not says(server, name)]:
        notes.append(
            f"The server did not say its {', '.join(mute)}: that all answers are of the same is "
            "not known."
        )
    if results.others:
        notes.append(
            f"{results.others} samples in the file are of another server, model or setting and "
            "are left out."
        )
    return notes


def _facts(results: Results) -> list[tuple[str, str]]:
    plan = results.plan
    server = plan["server"]
    facts: list[tuple[str, object]] = [
        ("command", shlex.join(plan["command"])),
        ("model", f"{server['root']} (served as {server['model']})"),
        ("max_model_len", server["max_model_len"]),
        ("min_context", server["min_context"]),
        ("kernel", plan.get("kernels") or "unknown"),
        *((name.replace("_", " "), server.get(name) or UNKNOWN) for name in SERVED),
        ("vLLM", server["vllm_version"] or "unknown"),
        ("blasst", server["blasst_version"] or plan["blasst_version"]),
        ("Python", plan["python"]),
        ("machine", plan["machine"]),
        ("mode", plan.get("mode", "balanced")),
        ("seeds", ", ".join(map(str, plan["seeds"]))),
        *(("texts: " + name, origin) for name, origin in plan.get("data", {}).items()),
        ("prompt format", plan["prompt_format"]),
        ("answer tokens", "as RULER" if plan["max_tokens"] is None else f"<= {plan['max_tokens']}"),
        ("tokenizer sha256", plan["tokenizer_sha256"]),
        ("server fingerprint", plan["fingerprint"]),
    ]
    return [(name, str(value)) for name, value in facts]


def _short(name: str) -> str:
    return name.removeprefix("MAG ")


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None or not math.isfinite(value) else pattern.format(value)


def _json(value: Any) -> Any:
    """Without the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
