"""What callers choose freely, thresholds, lengths and names, makes no new label values."""

from __future__ import annotations

import random
import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from blasst.kernels.exchange.layout import LAMBDA_CLASSES, LENGTH_CLASSES
from blasst.kernels.exchange.prometheus import PagesCollector
from blasst.kernels.threshold import SkipThreshold
from blasst.plugin.admission import AdmissionError
from blasst.plugin.front_end import FrontEnd, cell
from blasst.plugin.settings import Settings

REQUESTS = 5000


@pytest.fixture
def front(tmp_path):
    (tmp_path / "stats").mkdir()
    front = FrontEnd(Settings(state_dir=tmp_path, min_context=0), "m", "0.32.0", None)
    yield front
    front.close()


def series(folder):
    registry = CollectorRegistry()
    registry.register(PagesCollector(folder / "stats", max_age_s=0))
    return generate_latest(registry).decode()


def test_5000_requests_that_all_ask_for_something_else(front, tmp_path):
    rng = random.Random(4)
    refused = 0
    for number in range(REQUESTS):
        tokens = int(10 ** rng.uniform(0, 6.5))
        if number % 10 == 0:
            with pytest.raises(AdmissionError):
                front.wish({f"blasst_{rng.random()}": number})
            refused += 1
            continue
        wish = SkipThreshold("mag", rng.uniform(1, 20_000)) if number % 3 else "off"
        stamp = front.admit(wish, tokens)
        front.first_token(cell(stamp, tokens), rng.uniform(0.001, 100))
    front.close()
    text = series(tmp_path)
    cells = len(LAMBDA_CLASSES) * len(LENGTH_CLASSES)
    lines = re.findall(r"^blasst_requests_admitted_total\{(.*)\}", text, re.M)
    assert 10 < len(lines) <= cells
    names = set(re.findall(r'lambda_class="([^"]*)"', text))
    assert names <= {*LAMBDA_CLASSES, "other"}
    assert set(re.findall(r'model_name="([^"]*)"', text)) == {"m"}
    admitted = re.findall(r"^blasst_requests_admitted_total\{.*\} (\S+)$", text, re.M)
    assert sum(map(float, admitted)) == REQUESTS - refused
    assert "blasst_requests_rejected_total" in text
