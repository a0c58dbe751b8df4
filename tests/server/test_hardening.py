"""Scopes, rotation, secret files, rate limits, presets and the audit log."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from blasst.kernels.exchange.desired import FILE_NAME, read_desired
from blasst.kernels.exchange.presets import Preset, PresetFit, PresetGeometry
from blasst.kernels.exchange.prometheus import PagesCollector
from blasst.kernels.threshold import SparsityCurve
from blasst.server import audit
from blasst.server.app import create_app
from blasst.server.control import ControlService, Wish
from blasst.server.limits import Bucket, Buckets, Limits
from blasst.server.settings import Settings, SettingsError
from blasst.server.tokens import Tokens

THRESHOLD = "/v1/blasst/threshold"
WRITE, READ, NEW = "w" * 32, "r" * 32, "n" * 32


@pytest.fixture
def secret(tmp_path):
    def make(name, token, mode=0o600):
        path = tmp_path / name
        path.write_text(token + "\n")
        path.chmod(mode)
        return path

    return make


@pytest.fixture
def make_app(tmp_path):
    opened = []

    def make(limits=None, **settings):
        chosen = Settings(tmp_path, **settings)
        control = ControlService(tmp_path)
        control.open()
        opened.append(control)
        app = create_app(chosen, control, PagesCollector(tmp_path / "stats", max_age_s=0), limits)
        return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)

    yield make
    for control in opened:
        control.close()


@pytest.fixture
def scoped(make_app, secret):
    return make_app(token_file=secret("write", WRITE), read_token_file=secret("read", READ))


def put(client, body=None, token=None, if_match="*"):
    headers = {"if-match": if_match}
    if token:
        headers["authorization"] = f"Bearer {token}"
    return client.put(THRESHOLD, json=body or {"mag": 2500}, headers=headers)


def kind(response):
    return response.json()["type"].rpartition(":")[2]


def test_the_read_token_reads_and_never_writes(scoped, tmp_path):
    bearer = {"authorization": f"Bearer {READ}"}
    for path in (THRESHOLD, *(f"/v1/blasst/{p}" for p in ("status", "presets", "audit"))):
        assert scoped.get(path, headers=bearer).status_code == 200, path
    for refused in (
        put(scoped, token=READ),
        scoped.delete(THRESHOLD, headers={**bearer, "if-match": "*"}),
        scoped.post("/metrics", headers=bearer),
        scoped.patch("/healthz", headers=bearer),
    ):
        assert (refused.status_code, kind(refused)) == (403, "read-only")
    assert not (tmp_path / FILE_NAME).exists()
    assert put(scoped, token=WRITE).json()["updated_by"] == "testclient (write token)"


def test_a_replaced_token_file_rules_at_once(scoped, secret):
    assert put(scoped, token=WRITE).status_code == 200
    os.replace(secret("new", NEW), secret("write", WRITE))
    assert put(scoped, token=WRITE).status_code == 401
    assert put(scoped, token=NEW).status_code == 200
    assert scoped.get(THRESHOLD, headers={"authorization": f"Bearer {READ}"}).status_code == 200


@pytest.mark.parametrize("bad", ["short", "", None, "world"])
def test_a_bad_rotation_locks_nobody_out_and_shows(scoped, secret, tmp_path, bad, caplog):
    path = tmp_path / "write"
    if bad is None:
        path.unlink()
    else:
        secret("write", NEW if bad == "world" else bad, 0o644 if bad == "world" else 0o600)
    assert put(scoped, token=WRITE).status_code == 200
    assert put(scoped, token=NEW).status_code == 401
    assert "blasst_token_files_ok 0.0" in scoped.get("/metrics").text
    said = [r.getMessage() for r in caplog.records if "old token" in r.getMessage()]
    assert len(said) == 1
    assert NEW not in said[0]
    secret("write", NEW)
    assert put(scoped, token=NEW).status_code == 200


@pytest.mark.parametrize(("name", "same"), [("write", READ), ("read", WRITE)])
def test_a_rotation_to_one_token_for_both_makes_no_reader_a_writer(
    scoped, secret, name, same, caplog
):
    assert put(scoped, token=WRITE).status_code == 200
    os.replace(secret("new", same), secret(name, "x" * 20))
    refused = put(scoped, token=same)
    assert (refused.status_code, kind(refused)) == (403, "read-only")
    assert "blasst_token_files_ok 0.0" in scoped.get("/metrics").text
    assert len([r for r in caplog.records if "hold the same token" in r.getMessage()]) == 1
    secret(name, NEW)
    assert put(scoped, token=NEW if name == "write" else WRITE).status_code == 200


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o640, 0o620, 0o660, 0o602, 0o777])
def test_a_secret_that_others_can_touch_is_refused(secret, mode):
    with pytest.raises(SettingsError, match=f"has mode {mode:04o}.*chmod 600"):
        Tokens(secret("write", WRITE, mode))


def test_roots_file_may_be_group_readable_for_another_user(secret, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("needs a file of root")
    path = secret("write", WRITE, 0o640)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    Tokens(path)
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 640"):
        Tokens(path)


def test_one_token_for_both_scopes_is_refused(secret):
    with pytest.raises(SettingsError, match="hold the same token"):
        Tokens(secret("write", WRITE), secret("read", WRITE))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"read_token_file": "x"}, "needs --token-file"),
        ({"tls_cert": "x"}, "go together"),
        ({"tls_cert": "x", "tls_key": "x", "uds": "x"}, "needs none"),
        ({"vllm_metrics": True}, "give --engine-url"),
        ({"canary": "x"}, "give --engine-url"),
        ({"engine_url": "ftp://x"}, "must look like http"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, settings, message):
    with pytest.raises(SettingsError, match=message):
        Settings(tmp_path, **settings)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_bucket_refills_with_time():
    clock = Clock()
    bucket = Bucket(2.0, 3.0, clock)
    assert [bucket.take() for _ in range(3)] == [0.0] * 3
    assert bucket.take() == pytest.approx(0.5)
    clock.now = 0.5
    assert bucket.take() == 0.0
    clock.now = 1e9
    assert [bucket.take() > 0 for _ in range(4)] == [False, False, False, True]
    # A clock that stands still, as a monotonic one may, gives nothing.
    assert bucket.take() > 0


def test_a_scan_of_many_addresses_costs_no_memory():
    buckets = Buckets(1.0, 1.0, most=10)
    for n in range(1000):
        assert buckets.take(n) == 0.0
    assert len(buckets) == 10
    assert buckets.take(999) > 0.0


def limits(clock):
    return Limits(Bucket(1.0, 3.0, clock), Bucket(1.0, 5.0, clock), Buckets(1.0, 2.0, clock=clock))


def test_writes_and_reads_have_limits_of_their_own(make_app):
    clock = Clock()
    client = make_app(limits(clock))
    assert [put(client).status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = put(client)
    assert (kind(refused), refused.headers["retry-after"]) == ("too-many", "1")
    assert [client.get("/metrics").status_code for _ in range(6)] == [200] * 5 + [429]
    # Probes are answered whatever else is asked, or the sidecar would be restarted as dead.
    assert [client.get(p).status_code for p in ("/healthz", "/readyz") * 9] == [200] * 18
    clock.now = 1.0
    assert put(client).status_code == 200
    assert put(client).status_code == 429


def test_guessing_is_limited_and_the_right_token_is_never_held_up(make_app, secret):
    client = make_app(limits(Clock()), token_file=secret("write", WRITE))
    answers = [put(client, token="x" * 32) for _ in range(5)]
    assert [a.status_code for a in answers] == [401, 401, 429, 429, 429]
    assert kind(answers[-1]) == "too-many-refused"
    assert put(client, token=WRITE).status_code == 200
    # What was refused used up no write.
    assert [put(client, token=WRITE).status_code for _ in range(3)] == [200, 200, 429]


def preset(model="tiny", impl="cpu", low=0.1, high=0.9):
    return Preset(
        model,
        PresetGeometry(impl, 64, 128),
        SparsityCurve(10.0, 4.0),
        PresetFit(0.02, 12, low, high, (4096,)),
        "essays",
    ).dumps()


@pytest.fixture
def presets(tmp_path):
    folder = tmp_path / "presets"
    folder.mkdir()

    def make(name, text):
        (folder / f"{name}.json").write_text(text)

    return make


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (["128x128"], "calibrated for cpu:64x128 and tiles of 128x128 vote"),
        (["64x128", "128x128"], "tiles of 128x128, 64x128 vote"),
        ([""], "does not say how many rows and keys"),
        (["64x128", ""], "does not say how many rows and keys"),
    ],
)
def test_a_preset_of_other_tiles_is_refused(client, fake_engine, presets, ranks, message):
    engine = fake_engine()
    for rank, tiles in enumerate(ranks):
        engine.rank(rank, tiles=tiles)
    presets("ours", preset())
    answer = put(client, {"target_skip_rate": 0.5})
    assert (answer.status_code, kind(answer)) == (409, "preset-unfit")
    assert message in client.get("/v1/blasst/presets").json()["presets"][0]["refusal"]


def test_a_target_becomes_the_scale_of_the_preset_that_fits(client, fake_engine, presets):
    fake_engine().rank(0, tiles="64x128")
    presets("ours", preset())
    presets("other-model", preset(model="large"))
    presets("other-kernel", preset(impl="hopper"))
    presets("damaged", "{")
    listed = {p["name"]: p for p in client.get("/v1/blasst/presets").json()["presets"]}
    assert [name for name, p in listed.items() if p["usable"]] == ["ours"]
    assert "'large' and tiny runs" in listed["other-model"]["refusal"]
    assert "hopper:64x128 and cpu runs" in listed["other-kernel"]["refusal"]
    assert listed["damaged"]["model"] is None
    for body in ({"target_skip_rate": 0.5}, {"target_skip_rate": 0.5, "preset": "ours"}):
        state = put(client, body).json()
        assert state["threshold"]["unit"] == "scale"
        assert state["origin"] == "preset ours: target skip rate 0.5"
        assert state["threshold"]["value"] == pytest.approx(10 * math.exp(2))
    for name, status, what in [
        ("other-model", 409, "preset-unfit"),
        ("damaged", 409, "preset-unfit"),
        ("../ours", 404, "no-preset"),
    ]:
        answer = put(client, {"target_skip_rate": 0.5, "preset": name})
        assert (answer.status_code, kind(answer)) == (status, what)
    assert "0.1..0.9" in put(client, {"target_skip_rate": 0.95}).json()["detail"]
    presets("second", preset())
    assert "2 presets fit" in put(client, {"target_skip_rate": 0.5}).json()["detail"]
    assert client.get(THRESHOLD).json()["generation"] == 1


def test_presets_that_no_number_and_no_text_can_hold_are_refused(
    client, fake_engine, presets, tmp_path
):
    fake_engine().rank(0, tiles="64x128")
    presets("steep", preset().replace('"b": 4.0', '"b": 100000.0'))
    presets("huge", preset().replace('"a": 10.0', '"a": 1' + "0" * 400))
    (tmp_path / "presets" / os.fsdecode(b"\xff.json")).write_text(preset())
    listed = {p["name"]: p for p in client.get("/v1/blasst/presets").json()["presets"]}
    assert listed.keys() == {"steep", "huge", "\ufffd"}
    assert "damaged" in listed["huge"]["refusal"]
    answer = put(client, {"target_skip_rate": 0.5, "preset": "steep"})
    assert (answer.status_code, kind(answer)) == (422, "bad-threshold")
    assert put(client, {"target_skip_rate": 0.5, "preset": "\ufffd"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [{"target_skip_rate": v} for v in (-0.1, 1, 1.5, "0.5", True, None)]
    + [{"mag": 1, "preset": "x"}, {"target_skip_rate": 0.5, "mag": 1}, {"preset": "x"}],
)
def test_a_bad_target_is_422(client, body):
    assert put(client, body).status_code == 422


def test_no_engine_no_target(client, presets):
    presets("ours", preset())
    answer = put(client, {"target_skip_rate": 0.5})
    assert (answer.status_code, kind(answer)) == (409, "preset-unfit")


def test_every_change_is_a_line_of_the_audit_log(client, tmp_path):
    assert client.get("/v1/blasst/audit").json() == {"records": []}
    put(client, {"mag": 2500, "reason": "first"})
    put(client, {"mag": 2500, "reason": "no change"})
    put(client, {"lambda": 0.5, "min_context": 7})
    client.delete(THRESHOLD, headers={"if-match": "*"})
    records = client.get("/v1/blasst/audit").json()["records"]
    assert [(r["generation"], r["result"]) for r in records] == [(n, "applied") for n in (1, 2, 3)]
    assert records[0]["old"] == {"threshold": None, "schedule": None, "min_context": None}
    assert records[0]["reason"] == "first"
    assert records[1]["old"] == records[0]["new"]
    assert records[1]["new"] == {
        "threshold": {"unit": "lambda", "value": 0.5},
        "schedule": None,
        "min_context": 7,
    }
    assert records[2]["who"] == "testclient"
    log = tmp_path / audit.FILE_NAME
    assert (log.stat().st_mode & 0o777) == 0o600
    assert audit.AuditLog(tmp_path).verify() == 3
    edited = log.read_text().replace("first", "other")
    log.write_text(edited)
    with pytest.raises(ValueError, match=r"line 1 .* breaks the chain"):
        audit.AuditLog(tmp_path).verify()
    lines = edited.splitlines(keepends=True)
    log.write_text("".join(lines[1:]))
    with pytest.raises(ValueError, match="breaks the chain"):
        audit.AuditLog(tmp_path).verify()


@pytest.mark.parametrize("tail", ['{"time": "half', "\x00" * 5000])
def test_a_torn_last_line_is_replaced_by_the_next_record(tmp_path, tail):
    log = audit.AuditLog(tmp_path)
    entry = audit.Entry("x", None, {"threshold": None, "min_context": None}, "", 1)
    log.append(entry)
    with log.path.open("a") as f:
        f.write(tail)
    assert len(log.tail(10)) == 1
    log.append(entry)
    assert log.verify() == 2


def test_a_change_that_the_disk_refused_is_failed_and_one_before_a_crash_is_lost(
    tmp_path, monkeypatch
):
    service = ControlService(tmp_path)
    service.open()
    service.set(Wish(None, by="a"), "*")

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("blasst.server.control.write_desired", refuse)
    with pytest.raises(Exception, match="disk is full"):
        service.set(Wish(None, 5, by="b"), "*")
    monkeypatch.undo()

    def crash(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("blasst.server.control.write_desired", crash)
    with pytest.raises(KeyboardInterrupt):
        service.set(Wish(None, 6, by="c"), "*")
    monkeypatch.undo()
    service.close()
    after = ControlService(tmp_path)
    after.open()
    results = [(r["who"], r["result"]) for r in after.audit.tail(9)]
    assert results == [
        ("a", "applied"),
        ("b", "applied"),
        ("b", "failed"),
        ("c", "applied"),
        ("c", "lost"),
    ]
    assert (
        after.set(Wish(None, 7), "*").generation > read_desired(tmp_path / FILE_NAME).generation - 1
    )
    assert after.audit.verify() == 6
    after.close()


def test_without_room_for_the_record_nothing_changes(tmp_path, monkeypatch):
    service = ControlService(tmp_path)
    service.open()
    service.set(Wish(None), "*")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.suffix.startswith(".json")}

    def full(fd, data, at):
        os.pwrite(fd, data[:10], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(audit, "_write_all", full)
    with pytest.raises(Exception, match="disk is full"):
        service.set(Wish(None, 5), "*")
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.suffix.startswith(".json")}
    assert after == before
    service.close()


def test_damaged_records_are_not_shown_as_ours(client, tmp_path):
    put(client)
    with (tmp_path / audit.FILE_NAME).open("a") as f:
        f.write(json.dumps({"time": 5}) + "\n[]\nx\n")
    assert len(client.get("/v1/blasst/audit").json()["records"]) == 1
    assert put(client, {"mag": 1}).status_code == 200


def test_only_ages_are_taken_from_the_wall_clock():
    """A clock that jumps must not stretch a limit, a timeout or a cache."""
    source = Path(__file__).parents[2] / "server"
    users = {p.name for p in source.rglob("*.py") if "time.time(" in p.read_text()}
    assert users == {"observe.py"}
