"""The report in a real browser: everything is drawn, nothing is cut off, narrow screens too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from blasst.evals.cells import Results, collect
from blasst.evals.report import write_report
from blasst.evals.tasks import tasks

pytestmark = pytest.mark.browser

THRESHOLDS = ("dense", "mag:7000.0", "mag:2500.0", "mag:1000.0")


def results(kind: str) -> Results:
    """All 13 tasks at three lengths; or with two thirds of the cells missing; or one cell."""
    rng = random.Random(8)
    lengths = [4096] if kind == "one cell" else [4096, 8192, 32768]
    names = ["vt"] if kind == "one cell" else list(tasks())
    keys = ["dense"] if kind == "one cell" else list(THRESHOLDS)
    server = {"model": "a-model", "root": "a-model", "max_model_len": 40000}
    server |= {"vllm_version": "0.32", "blasst_version": "0.1", "min_context": 512}
    plan: dict[str, Any] = {"kind": "plan", "fingerprint": "f" * 32, "server": server, "at": 0.0}
    plan |= {"thresholds": keys, "lengths": lengths, "tasks": names, "seeds": [42]}
    plan |= {"prompt_format": "chatml", "tokenizer_sha256": "0" * 64, "max_tokens": None}
    plan |= {"blasst_version": "0.1", "python": "3.11", "machine": "A machine, 2 cores"}
    plan |= {"command": ["blasst", "ruler", "sweep", "--lengths", "4096", "8192"]}
    records = [plan]
    for length in lengths:
        for task in names:
            for level, key in enumerate(keys):
                if kind == "holes" and rng.random() < 0.66:
                    continue
                for i in range(6):
                    record = {"kind": "sample", "pass": "both", "fingerprint": "f" * 32}
                    record |= {"threshold": key, "task": task, "length": length, "tokens": []}
                    record |= {"prompt_sha256": f"{i}", "prompt_tokens": length - 100}
                    record |= {"prediction": "a b", "match": float(rng.random() > 0.1 * level)}
                    record |= {"gold_nll": 0.1 + 0.02 * level, "ttft_s": length / 4096}
                    record |= {"visited": 100 * (level > 0), "skipped": 20 * level}
                    record |= {"layers": [[n, 10, level * n // 8] for n in range(30)]}
                    records.append(record)
    return collect(records)


OUTSIDE = """
return [...document.querySelectorAll('svg')].flatMap(svg => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text, circle, rect, polyline, line')]
    .map(e => [e, e.getBoundingClientRect()])
    .filter(([e, r]) => r.left < box.left - 1 || r.right > box.right + 1 ||
                        r.top < box.top - 1 || r.bottom > box.bottom + 1)
    .map(([e, r]) => svg.getAttribute('aria-label') + ': ' + (e.textContent || e.tagName));
});"""
OVERLAPS = """
return [...document.querySelectorAll('svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].map(e => [e, e.getBoundingClientRect()]);
  return texts.flatMap(([a, r], i) => texts.slice(i + 1)
    .filter(([b, s]) => r.left < s.right - 1 && s.left < r.right - 1 &&
                        r.top < s.bottom - 3 && s.top < r.bottom - 3)
    .map(([b, s]) => [svg.getAttribute('aria-label'), a.textContent, b.textContent].join(' / ')));
});"""


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("kind", ["whole", "holes", "one cell"])
def test_everything_is_drawn_inside_its_figure(
    kind: str, width: int, browser: Any, tmp_path: Path
) -> None:
    page = write_report(results(kind), tmp_path)
    browser.set_window_size(width, 1000)
    browser.get(page.as_uri())
    figures = browser.execute_script("return document.querySelectorAll('svg').length")
    assert figures >= {"whole": 30, "holes": 10, "one cell": 7}[kind]
    assert browser.execute_script(OUTSIDE) == []
    if width == 1280:
        assert browser.execute_script(OVERLAPS) == []
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(wide) <= 0
    text = browser.execute_script("return document.body.innerText").lower()
    assert "nan" not in text.replace("finance", "")
    assert ("not measured" in text) == (kind != "whole")
    assert [e for e in browser.get_log("browser") if "favicon" not in e["message"]] == []
