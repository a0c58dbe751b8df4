"""The canary against a fake engine whose answers differ from dense ones as told."""

from __future__ import annotations

import json
import time

import pytest

from blasst.kernels.exchange.desired import read_desired
from blasst.kernels.exchange.schedule import Schedule
from blasst.kernels.threshold import SkipThreshold
from blasst.server import cli
from blasst.server.audit import AuditLog
from blasst.server.canary import STATE_NAME, Canary, base_of, raised
from blasst.server.canary_plan import Bounds, CanaryPlan
from blasst.server.control import ControlService, Wish
from blasst.server.follow import Follower
from blasst.server.probe import Endpoint, Prompt
from blasst.server.problems import Problem

MAG = SkipThreshold("mag", 2500)


@pytest.fixture
def control(tmp_path):
    service = ControlService(tmp_path)
    service.open()
    yield service
    service.close()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def make(vllm, control):
    """A canary whose clock is moved by hand; probes are sent by calling `probe`."""

    def make(threshold=MAG, min_context=100, follows=True, short=0, **plan):
        if threshold is not None:
            control.set(Wish(threshold, min_context), "*")
        plan = {"max_tokens": 10, "min_probes": 3, "window": 5, **plan}
        bounds = plan.pop("bounds", Bounds())
        plan = CanaryPlan((Prompt("a"), Prompt([1, 2])), Endpoint(vllm.url), bounds, **plan)
        clock = Clock()
        canary = Canary(plan, control, lambda generation: follows, lambda: short, clock=clock)
        canary.clock = clock
        return canary

    return make


def test_equal_answers_change_nothing(make, control, vllm):
    canary = make()
    assert [canary.probe() for _ in range(6)] == ["ok"] * 6
    state = canary.state()
    assert (state.agreement, state.control, state.nll_increase) == (1.0, 1.0, 0.0)
    assert (state.probes, state.steps, state.breached) == (5, 0, False)
    assert control.read().generation == 1
    # Dense, deployed, dense again; one salt a probe; both kinds of prompt in turn.
    sent = [body for _, body, _ in vllm.requests[:6]]
    assert ["vllm_xargs" in body for body in sent] == [True, False, True] * 2
    salts = [body["cache_salt"] for body in sent]
    assert salts[:3] == salts[:1] * 3
    assert salts[3] != salts[0]
    assert (sent[0]["prompt"], sent[3]["prompt"]) == ("a", [1, 2])
    assert all(body["temperature"] == 0 and body["model"] == "tiny" for body in sent)


def test_a_crossed_bound_raises_the_mag_once_a_cooldown(make, control, vllm, tmp_path):
    canary = make(cooldown_s=100.0)
    vllm.differs_at = 5
    assert [canary.probe() for _ in range(2)] == ["ok", "ok"]
    assert control.read().threshold == MAG, "too few probes to judge"
    canary.probe()
    state = control.read()
    assert (state.threshold, state.generation) == (SkipThreshold("mag", 3000), 2)
    assert (state.updated_by, state.min_context) == ("canary", 100)
    assert base_of(state) == "mag 2500"
    for _ in range(5):
        canary.probe()
    assert control.read().generation == 2, "it cools down"
    canary.clock.now = 100.0
    canary.probe()
    after = control.read()
    assert (after.threshold.value, base_of(after)) == (3500, "mag 2500")
    record = AuditLog(tmp_path).tail(1)[0]
    assert (record["who"], record["old"]["threshold"]["value"]) == ("canary", 3000)
    assert "token agreement 0.500 is below 0.9 over" in record["reason"]
    assert AuditLog(tmp_path).verify() == 3
    assert canary.state().steps == 2


def test_nll_alone_crosses_and_a_breach_ends_by_its_margin_only(make, control, vllm):
    canary = make(bounds=Bounds(max_nll_increase=0.2), window=3, cooldown_s=0.0)
    vllm.drop = 0.3
    for _ in range(3):
        canary.probe()
    assert control.read().threshold.value == 3000
    assert "NLL rose by 0.3000 nats" in control.read().reason
    vllm.drop = 0.18  # within the bound, not by its margin
    for _ in range(4):
        canary.probe()
    assert canary.state().breached
    assert control.read().threshold.value == 3000
    vllm.drop = 0.1
    for _ in range(4):
        canary.probe()
    assert not canary.state().breached
    assert control.read().threshold.value == 3000, "it never goes down"


def test_an_endpoint_that_differs_from_itself_is_no_reason_to_step(make, control, vllm):
    canary = make()
    vllm.differs_at, vllm.dense_differs_at = 5, 5
    for _ in range(5):
        canary.probe()
    state = canary.state()
    assert (state.noisy, state.breached, state.steps) == (True, True, 0)
    assert "differ as much among themselves" in state.error
    assert control.read().generation == 1
    assert control.tally.errors()["canary"] > 0


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ({"threshold": None}, "dense"),
        ({"follows": False}, "not_followed"),
        ({"min_context": 6000}, "dense"),
        ({"min_context": None, "short": 6000}, "dense"),
        ({"threshold": Schedule.parse("16k=off,rest=mag:2500")}, "dense"),
    ],
)
def test_what_says_nothing_about_the_threshold_is_not_counted(make, vllm, options, outcome):
    canary = make(**options)
    vllm.differs_at = 0
    assert [canary.probe() for _ in range(4)] == [outcome] * 4
    assert (canary.state().probes, canary.state().counts[outcome]) == (0, 4)


def test_a_change_during_a_probe_discards_it(make, control, vllm):
    canary = make()
    canary.probe()
    vllm.before_answer = lambda: control.set(Wish(SkipThreshold("mag", 9000)), "*")
    assert canary.probe() == "changed_meanwhile"
    vllm.before_answer = lambda: None
    canary.probe()
    assert canary.state().probes == 1, "results of the old threshold are gone"


def test_somebody_quicker_wins(make, control, vllm, monkeypatch):
    canary = make(min_probes=1)
    vllm.differs_at = 0
    real = control.set

    def slower(wish, if_match):
        real(Wish(SkipThreshold("mag", 9000), by="a person"), "*")
        return real(wish, if_match)

    monkeypatch.setattr(control, "set", slower)
    assert canary.probe() == "changed_meanwhile"
    assert control.read().threshold.value == 9000


@pytest.mark.parametrize(
    ("at_ceiling", "last"), [("dense", None), ("hold", SkipThreshold("mag", 3200))]
)
def test_above_the_ceiling(make, control, vllm, at_ceiling, last):
    canary = make(ceiling_mag=3200.0, at_ceiling=at_ceiling, min_probes=1, cooldown_s=0.0)
    vllm.differs_at = 0
    seen = []
    for _ in range(4):
        canary.probe()
        seen.append(control.read().threshold)
    assert [t.value for t in seen[:2]] == [3000, 3200]
    assert seen[2:] == [last, last]


def test_a_step_of_a_schedule_holds_at_the_ceiling_while_others_go_up(make, control, vllm):
    schedule = Schedule.parse("1k=mag:3200,rest=mag:2500")
    canary = make(schedule, ceiling_mag=3200.0, at_ceiling="hold", min_probes=1, cooldown_s=0.0)
    vllm.differs_at = 0
    seen = []
    for _ in range(3):
        canary.probe()
        seen.append(control.read().threshold)
    assert seen[0] == Schedule.parse("1k=mag:3200,rest=mag:3000")
    assert seen[1] == seen[2] == Schedule.parse("1k=mag:3200,rest=mag:3200")
    assert "it holds there" in canary.state().error


def test_dense_attention_ends_a_breach(make, control, vllm):
    canary = make(SkipThreshold("mag", 14000), min_probes=1)
    vllm.differs_at = 0
    canary.probe()
    assert (control.read().threshold, canary.state().breached) == (None, True)
    assert canary.probe() == "dense"
    assert not canary.state().breached
    control.set(Wish(Schedule.parse("1k=off,rest=off")), "*")
    canary._breached = True
    assert canary.probe() == "dense"
    assert not canary.state().breached


def test_that_an_engines_own_environment_is_not_watched_is_said(make, control, vllm):
    canary = make(threshold=None)
    assert canary.probe() == "dense"
    assert "environment is not watched" in canary.state().error
    assert control.tally.errors()["canary"] == 0
    control.set(Wish(None), "*")
    assert canary.probe() == "dense"
    assert canary.state().error == ""


def test_a_step_that_the_disk_refuses_is_a_failure(make, control, vllm, monkeypatch):
    canary = make(min_probes=1)
    vllm.differs_at = 0

    def full(wish, if_match):
        raise Problem(507, "no-space", "The disk is full.")

    monkeypatch.setattr(control, "set", full)
    assert canary.probe() == "failed"
    assert canary.state().error == "The disk is full."


def test_watching_steps_never(make, control, vllm):
    canary = make(watch_only=True)
    vllm.differs_at = 0
    for _ in range(5):
        canary.probe()
    assert canary.state().breached
    assert control.read().generation == 1


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (MAG, SkipThreshold("mag", 3000)),
        (SkipThreshold("lambda", 2**-2.5), SkipThreshold("mag", 3000)),
        (SkipThreshold("lambda", 0.0), SkipThreshold("lambda", 0.0)),
        (SkipThreshold("scale", 1000), SkipThreshold("scale", 1000 * 2**-0.5)),
        (SkipThreshold("scale", 1e9), SkipThreshold("scale", 1e9 * 2**-0.5)),
        (SkipThreshold("mag", 14000), None),
        (SkipThreshold("mag", 13900), SkipThreshold("mag", 14000)),
        (
            Schedule.parse("1k=off,2k=mag:14000,rest=mag:2500"),
            Schedule.parse("1k=off,2k=off,rest=mag:3000"),
        ),
        (Schedule.parse("1k=mag:14000,rest=off"), None),
        (SkipThreshold("scale", 5e-324), None),
    ],
)
def test_one_step_of_every_kind(threshold, expected):
    assert raised(threshold, 500, 14000, 10_000) == expected


def test_the_window_and_the_step_survive_a_restart(make, control, vllm, tmp_path):
    make().probe()
    again = make(threshold=None)
    again._load()
    assert again.state().probes == 1
    good = (tmp_path / STATE_NAME).read_text()
    for damaged in (
        "",
        "{",
        "[]",
        '{"schema_version": 9}',
        '{"schema_version": 1}',
        "[" * 100_000,
        good.replace("5000", "Infinity"),
        good.replace("5000", "0"),
        good.replace('"agreement": 1.0', '"agreement": NaN'),
        good.replace('"agreement": 1.0', '"agreement": 1' + "0" * 400),
        good.replace('"generation": 1', '"generation": Infinity'),
    ):
        assert damaged != good
        (tmp_path / STATE_NAME).write_text(damaged)
        fresh = make(threshold=None)
        fresh._load()
        assert fresh.state().probes == 0
        assert "begun anew" in fresh.state().error
    vllm.differs_at = 0
    stepping = make(threshold=None, min_probes=1)
    stepping.probe()
    raised_to = control.read()
    declared = tmp_path / "threshold.json"
    declared.write_text('{"mag": 2500, "min_context": 100}')
    Follower(declared, control, keep_raised=True).step()
    assert control.read() == raised_to
    follower = Follower(declared, control, keep_raised=True)
    follower.step()
    declared.write_text('{"mag": 2500, "min_context": 100, "reason": "back to it"}')
    follower.step()
    assert control.read().threshold == MAG, "a file that changed is an order"


def test_without_an_endpoint_probes_fail_and_serving_goes_on(make, control, vllm):
    canary = make()
    for answer, message in (
        (b"{}", "names no model"),
        (b"[]", "no JSON object"),
        (b"x", "no usable answer"),
        (b'{"a":' + b"[" * 100_000, "no usable answer"),
    ):
        vllm.answer = answer
        assert canary.probe() == "failed"
        assert message in canary.state().error
    vllm.answer = None
    canary.probe()
    assert canary.state().error == ""
    vllm.server.server_close()
    vllm.server.shutdown()
    assert canary.probe() == "failed"
    assert control.tally.last.kind == "canary"
    assert control.read().generation == 1


def test_messages_and_api_key(vllm):
    endpoint = Endpoint(vllm.url, "m", "secret")
    vllm.differs_at = 4
    result = endpoint.probe(Prompt(messages=[{"role": "user", "content": "hi"}]), 8)
    assert (result.agreement, result.control, result.prompt_tokens) == (0.5, 1.0, 5000)
    # Four equal tokens, then the dense one at 0.5 nats less.
    assert result.nll_increase == pytest.approx(0.1)
    path, _, authorization = vllm.requests[0]
    assert (path, authorization) == ("/v1/chat/completions", "Bearer secret")
    assert "secret" not in repr(endpoint)


def test_the_verb_measures_once_and_changes_nothing(vllm, tmp_path, capsys):
    (tmp_path / "p").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    plan = tmp_path / "plan.toml"
    plan.write_text('prompts = "p"\nmax_tokens = 10\n')

    def run(*options):
        code = cli.main(["canary", str(plan), "--engine-url", vllm.url, *options])
        return code, *capsys.readouterr()

    code, out, err = run()
    assert (code, err) == (0, "")
    assert "prompt 2, 5000 tokens: agreement 1.000, dense again 1.000" in out
    assert "mean of 2: agreement 1.000" in out
    vllm.differs_at = 5
    code, out, err = run("--json")
    assert (code, err) == (3, "blasst: error: token agreement 0.500 is below 0.9\n")
    assert json.loads(out.splitlines()[-1])["crossed"]
    vllm.dense_differs_at = 5
    assert run()[0] == 4
    vllm.answer = b"{}"
    assert run()[0] == 1
    plan.write_text("")
    assert run()[0] == 2


def test_in_a_sidecar_it_shows_in_status_and_metrics(make_canary_sidecar, vllm, connect):
    url, engine = make_canary_sidecar(vllm.url)
    client = connect(url)
    vllm.differs_at = 3
    headers = {"if-match": "*"}
    wish = {"mag": 2500, "min_context": 1}
    set_now = client.put("/v1/blasst/threshold", json=wish, headers=headers)
    engine.acknowledge(set_now.json()["generation"])
    end = time.monotonic() + 20
    while (shown := client.get("/v1/blasst/status").json())["canary"]["probes"] == 0:
        assert time.monotonic() < end, shown["canary"]
        time.sleep(0.1)
    assert shown["canary"]["agreement"] == pytest.approx(0.3)
    text = client.get("/metrics").text
    assert 'blasst_canary_probes_total{result="ok"}' in text


@pytest.fixture
def make_canary_sidecar(blasst, fake_engine, tmp_path):
    def make(url):
        engine = fake_engine(tmp_path / "state" / "stats")
        engine.front(42)
        (tmp_path / "p").write_text('{"prompt": "x"}\n')
        plan = tmp_path / "plan.toml"
        plan.write_text('prompts = "p"\ninterval_s = 1\nmax_tokens = 10\nwatch_only = true\n')
        process = blasst(
            *("sidecar", "--port", 0, "--state-dir", tmp_path / "state"),
            *("--canary", plan, "--engine-url", url),
        )
        return process.url(), engine

    return make


def test_the_state_file_of_a_step_is_read_by_the_release_before(make, control, vllm, tmp_path):
    canary = make(min_probes=1)
    vllm.differs_at = 0
    canary.probe()
    assert json.loads((tmp_path / "desired.json").read_text())["schema_version"] == 2
    assert read_desired(tmp_path / "desired.json").threshold.value == 3000
