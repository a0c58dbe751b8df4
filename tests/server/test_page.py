"""The status page in a real browser, over a sidecar whose statistics pages are written by hand."""

from __future__ import annotations

import json
import os
import struct
import time

import pytest

from blasst.kernels.exchange.desired import FILE_NAME
from blasst.kernels.exchange.schedule import Schedule
from blasst.server.control import Wish
from blasst.server.probe import Result
from blasst.server.settings import Settings
from blasst.server.sidecar import Sidecar

pytestmark = pytest.mark.browser

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def sidecar(tmp_path, request):
    token_file = None
    if getattr(request, "param", None):
        token_file = tmp_path / "token"
        token_file.write_text(request.param)
        token_file.chmod(0o600)
    sidecar = Sidecar(Settings(tmp_path, port=0, token_file=token_file))
    sidecar.prepare(dead_pages_older_than_s=1e9)
    sidecar.start()
    yield sidecar
    sidecar.stop()


class Page:
    def __init__(self, browser, url):
        self.browser = browser
        # The page of the test before still asks its sidecar, which is gone: leave it first.
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(url)

    def find(self, selector):
        return self.browser.find_elements("css selector", selector)

    def text(self, selector):
        (element,) = self.find(selector)
        return element.text

    def until(self, selector, wanted, timeout_s=15.0):
        """Wait until the text of one element contains this."""
        deadline = time.monotonic() + timeout_s
        while wanted not in (shown := " ".join(e.text for e in self.find(selector))):
            assert time.monotonic() < deadline, f"{selector} shows {shown!r}, not {wanted!r}"
            time.sleep(0.05)

    def set(self, unit, value=""):
        (select,) = self.find(f"#unit option[value={unit}]")
        select.click()
        (field,) = self.find("#value")
        if unit != "off":
            field.clear()
            field.send_keys(value)
        self.find("#set")[0].click()

    def script_errors(self):
        """What the console says, but for refused requests, which tests cause on purpose."""
        return [
            line["message"]
            for line in self.browser.get_log("browser")
            if "the server responded with a status of" not in line["message"]
        ]


@pytest.fixture
def page(browser, sidecar):
    page = Page(browser, sidecar.url)
    yield page
    assert page.script_errors() == []


def test_an_empty_state_says_so(page):
    page.until("#threshold", "never set")
    assert page.text("#converged") == "no front end"
    for selector in ("#no-front-ends", "#no-tiles", "#no-ttft"):
        assert page.find(selector)[0].is_displayed()
    for selector in (
        "#heat",
        "#legend",
        "#ttft",
        "#ttft-note",
        "#front-ends",
        "#error",
        "#token-box",
    ):
        assert not page.find(selector)[0].is_displayed()


def test_the_heat_map_has_a_coloured_cell_for_each_layer_and_head(page, fake_engine):
    engine = fake_engine()
    engine.rank(0)
    engine.rank(1)
    page.until("#heat-title", "Skip rate")
    page.until("#heat-total", "20% of 1,200 tiles skipped")
    rows = page.find("#heat tbody tr")
    assert [row.text.split() for row in rows] == [
        ["0", "10%", "10%", "10%", "10%"],
        ["1", "20%", "20%", "20%", "20%"],
        ["2", "30%", "30%", "30%", "30%"],
    ]
    headers = [th.text for th in page.find("#heat thead th")]
    assert headers == ["layer", "head 0", "head 1", "head 2", "head 3"]
    colours = [
        row.find_elements("css selector", "td")[0].value_of_css_property("background-color")
        for row in rows
    ]
    assert len(set(colours)) == 3


def test_a_hostile_model_name_is_text(page, fake_engine):
    name = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    fake_engine(model=name).front(42)
    page.until("#models", name)
    assert page.browser.title == "blasst"
    assert page.find("#models *") == []


def test_pages_that_cannot_be_read_are_told(page, tmp_path):
    page.until("#threshold", "never set")
    assert page.text("#unreadable") == ""
    (tmp_path / "stats" / "front-9.stats").write_bytes(b"OTHERFMT" + bytes(100))
    page.until("#unreadable", "1 statistics pages cannot be read")


def test_a_schedule_and_the_last_error_are_shown(page, sidecar, fake_engine):
    fake_engine().front(42)
    steps = Schedule.parse("16k=off,64k=mag:7000,rest=mag:4500")
    sidecar.control.set(Wish(steps), "*")
    page.until("#threshold", "dense to 16384, MAG 7000 to 65536, MAG 4500 above")
    assert page.text("#lambda") == "by length"
    assert page.text("#canary") == page.text("#last-error") == ""
    sidecar.control.tally.error("followed-file", "<b>the file</b> is refused")
    page.until("#last-error", "<b>the file</b> is refused")


@pytest.mark.parametrize(
    ("results", "shown"),
    [
        ([], "canary: nothing judged yet, agreement - over 0 probes, 0 steps"),
        ([Result(1.0, 1.0, 0.0, 9)], "canary: within bounds, agreement 100% over 1 probes"),
        ([Result(0.5, 1.0, 0.0, 9)], "canary: bound crossed, agreement 50% over 1 probes"),
        ([Result(0.5, 0.5, 0.0, 9)], "canary: cannot judge, agreement 50% over 1 probes"),
    ],
)
def test_the_canary_is_shown(browser, tmp_path, results, shown):
    (tmp_path / "p").write_text('{"prompt": "x"}')
    (tmp_path / "plan.toml").write_text('prompts = "p"\ninterval_s = 3600\n')
    state = tmp_path / "state"
    settings = Settings(
        state, port=0, canary=tmp_path / "plan.toml", engine_url="http://127.0.0.1:1"
    )
    sidecar = Sidecar(settings)
    sidecar.prepare(dead_pages_older_than_s=1e9)
    breached = [r.agreement < 0.9 <= r.control for r in results] == [True]
    body = {"schema_version": 1, "breached": breached, "generation": 0}
    text = json.dumps({**body, "results": [vars(r) for r in results]})
    (state / "canary.json").write_text(text)
    sidecar.start()
    try:
        page = Page(browser, sidecar.url)
        page.until("#canary", shown)
        assert page.script_errors() == []
    finally:
        sidecar.stop()


def test_the_form_sets_the_threshold_and_convergence_follows(page, fake_engine, sidecar):
    engine = fake_engine()
    engine.rank(0)
    engine.front(42)
    page.until("#front-ends tbody", "front-42")
    page.set("mag", "2500")
    page.until("#set-result", "Set, generation 1.")
    page.until("#threshold", "MAG 2500")
    assert page.text("#lambda") == "0.176777"
    assert page.text("#generation") == "1"
    assert page.text("#converged") == "0 of 1 front ends"
    assert sidecar.control.read().threshold.value == 2500
    engine.acknowledge(1)
    page.until("#converged", "1 of 1 front ends")
    page.set("scale", "500")
    page.until("#threshold", "scale 500")
    assert page.text("#lambda") == "by length"
    page.set("off")
    page.until("#threshold", "dense")
    assert sidecar.control.read().threshold is None


@pytest.mark.parametrize(
    ("unit", "value", "message"),
    [
        ("mag", "", "Give a number."),
        ("mag", "high", "Give a number."),
        ("mag", "-5", "MAG -5 is outside"),
        ("mag", "1e9", "outside"),
        ("lambda", "1.5", "lambda 1.5 is outside 0 <= lambda < 1"),
        ("scale", "-1", "negative"),
    ],
)
def test_a_bad_value_is_explained_and_changes_nothing(page, sidecar, unit, value, message):
    page.until("#threshold", "never set")
    page.set(unit, value)
    page.until("#set-result", message)
    assert "bad" in page.find("#set-result")[0].get_attribute("class")
    assert sidecar.control.read().generation == 0


def test_setting_the_threshold_keeps_min_context(page, sidecar):
    page.until("#threshold", "never set")
    sidecar.control.set(Wish(None, min_context=4096), "*")
    page.until("#min-context", "4096 tokens")
    page.set("mag", "2500")
    page.until("#set-result", "Set, generation 2.")
    assert sidecar.control.read().min_context == 4096


def test_a_change_by_somebody_else_is_not_overwritten_unseen(page, sidecar):
    from blasst.kernels.threshold import SkipThreshold
    from blasst.server.control import Wish

    page.until("#threshold", "never set")
    page.browser.execute_script("refresh = async () => {};")
    sidecar.control.set(Wish(SkipThreshold("mag", 7000)), "*")
    page.set("mag", "2500")
    page.until("#set-result", "somebody changed it")
    assert sidecar.control.read().threshold.value == 7000


def test_a_dead_front_end_is_shown_as_gone(page, fake_engine):
    engine = fake_engine()
    engine.rank(0)
    name = engine.front(41)
    engine.front(42)
    page.until("#front-ends tbody", "front-42")
    assert "gone" not in page.text("#front-ends")
    engine.kill(name)
    page.until("#front-ends", "gone")
    (dead,) = page.find("#front-ends tr.gone")
    assert dead.text.startswith("front-41 gone")
    assert page.text("#converged") == "1 of 1 front ends"


def test_while_no_rank_runs_the_engine_is_waited_for(page, fake_engine):
    engine = fake_engine()
    engine.front(42)
    page.until("#converged", "waiting for the engine")
    assert "good" not in page.find("#converged")[0].get_attribute("class")
    page.until("#front-ends tr.loading", "loading")
    rank = engine.rank(0)
    page.until("#converged", "1 of 1 front ends")
    assert "good" in page.find("#converged")[0].get_attribute("class")
    page.until("#front-ends tr.live", "live")
    engine.kill(rank.path.name)
    page.until("#converged", "waiting for the engine")


def test_a_front_end_that_stopped_writing_is_shown_as_stale(page, fake_engine):
    engine = fake_engine()
    with (engine.stats / engine.front(42)).open("r+b") as f:
        f.seek(24)
        f.write(struct.pack("<d", time.time() - 300))
    page.until("#front-ends tr.stale", "stale")
    assert "5 min ago" in page.text("#front-ends")


def test_ttft_of_each_class(page, fake_engine):
    engine = fake_engine()
    engine.front(42)
    engine.requests(None, 3000, [1.5, 1.5])
    engine.requests(0.05, 3000, [0.25, 0.25, 0.25])
    page.until("#ttft tbody", "MAG")
    rows = [
        [td.text for td in row.find_elements("css selector", "td")]
        for row in page.find("#ttft tbody tr")
    ]
    assert [row[:4] for row in rows] == [
        ["\u2264 4K", "dense", "2", "1.50 s"],
        ["\u2264 4K", "MAG 2500\u20134499", "3", "250 ms"],
    ]
    assert [row[4:] for row in rows] == [["-", "-"]] * 2
    (cell,) = page.find("#ttft tbody tr:first-child td:last-child")
    assert "Fewer than 20 requests" in cell.get_attribute("title")
    engine.requests(0.05, 3000, [0.25] * 17)
    page.until("#ttft tbody", "20")
    assert page.text("#ttft tbody tr:last-child td:last-child").endswith(" ms")
    assert page.find("#ttft-note")[0].is_displayed()


def test_a_model_that_ran_before_is_not_mixed_in(page, fake_engine):
    before = fake_engine(model="before")
    before.rank(0, visited=1000)
    before.front(1)
    before.requests(0.05, 3000, [0.1] * 77)
    for writer in before.writers:
        writer.detach()
    page.until("#heat-total", "of 6,000 tiles")
    page.until("#ttft tbody", "77")
    now = fake_engine(model="now")
    now.rank(1)
    now.front(2)
    now.requests(0.05, 3000, [0.1] * 5)
    page.until("#heat-total", "of 600 tiles")
    page.until("#ttft tbody", "5")
    assert "77" not in page.text("#ttft tbody")


def test_a_corrupt_file_is_told_and_repaired_from_the_page(page, sidecar):
    page.set("mag", "2500")
    page.until("#threshold", "MAG 2500")
    (sidecar.settings.state_dir / FILE_NAME).write_text("{")
    page.until("#error", "is not JSON")
    page.set("mag", "3000")
    page.until("#threshold", "MAG 3000")
    page.until("#generation", "2")
    assert not page.find("#error")[0].is_displayed()


@pytest.mark.parametrize("sidecar", [TOKEN], indirect=True)
def test_the_token_is_asked_for_and_used(page):
    page.until("#token-box", "Token")
    (field,) = page.find("#token")
    field.send_keys("wrong-but-long-enough" + "\n")
    page.until("#error", "not accepted")
    field.send_keys(TOKEN + "\n")
    page.until("#threshold", "never set")
    assert not page.find("#token-box")[0].is_displayed()
    page.set("mag", "2500")
    page.until("#set-result", "Set, generation 1.")
    stored = "return [document.cookie, localStorage.length, sessionStorage.length]"
    assert page.browser.execute_script(stored) == ["", 0, 0]


def test_a_sidecar_that_went_away_is_an_error(browser, sidecar):
    page = Page(browser, sidecar.url)
    page.until("#threshold", "never set")
    sidecar.stop()
    page.until("#error", "does not answer")


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_and_text_is_readable(page, fake_engine, width, scheme):
    engine = fake_engine(model="organisation/a-model-with-a-rather-long-name-128k-instruct")
    engine.rank(0)
    engine.front(42)
    for skip_lambda in (None, 0.05, 1e-5):
        engine.requests(skip_lambda, 100_000, [12.5] * 1000)
    command = page.browser.execute_cdp_cmd
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    command("Emulation.setDeviceMetricsOverride", size)
    preference = [{"name": "prefers-color-scheme", "value": scheme}]
    command("Emulation.setEmulatedMedia", {"features": preference})
    page.until("#ttft tbody", "MAG")
    if folder := os.environ.get("BLASST_SCREENSHOTS"):
        page.browser.save_screenshot(f"{folder}/page-{scheme}-{width}.png")
    root = "document.documentElement"
    wide = page.browser.execute_script(f"return {root}.scrollWidth - {root}.clientWidth")
    assert wide <= 0
    for selector in ("#ttft", "#front-ends", "#heat"):
        (table,) = page.find(selector)
        beyond = "return arguments[0].parentNode.scrollWidth - arguments[0].parentNode.clientWidth"
        assert page.browser.execute_script(beyond, table) <= 0, selector
    ink = page.browser.execute_script("return getComputedStyle(document.body).color")
    assert ink == {"light": "rgb(27, 35, 48)", "dark": "rgb(230, 234, 241)"}[scheme]
    command("Emulation.clearDeviceMetricsOverride", {})
