"""What is counted of changes and errors, and which error is shown as the last one."""

from __future__ import annotations

import re
from pathlib import Path

from blasst.server import tally
from blasst.server.tally import CALLERS, ERRORS, Tally

THRESHOLD = "/v1/blasst/threshold"


def counted(client, name):
    text = client.get("/metrics").text
    found = re.findall(rf'^{name}{{\w+="([^"]+)"}} (\S+)', text, re.M)
    return {label: float(value) for label, value in found if float(value)}


def test_changes_and_errors_are_counted_by_what_became_of_them(client, monkeypatch):
    def put(body, if_match="*"):
        return client.put(THRESHOLD, json=body, headers={"if-match": if_match})

    put({"mag": 2500})
    put({"mag": 2500})
    put({"mag": 7000}, '"99"')
    put({"mag": -1})
    client.get("/nowhere")
    client.get("/healthz", headers={"host": "elsewhere"})
    monkeypatch.setattr("blasst.server.control.write_desired", fail)
    put({"mag": 7000})
    assert counted(client, "blasst_threshold_changes_total") == {
        "applied": 1,
        "unchanged": 1,
        "refused": 1,
        "failed": 1,
    }
    assert counted(client, "blasst_control_errors_total") == {
        "precondition-failed": 1,
        "bad-threshold": 1,
        "not-found": 1,
        "foreign-host": 1,
        "state-unwritable": 1,
    }


def fail(*_):
    raise OSError(13, "Permission denied")


def test_the_last_error_is_of_ours_and_not_of_a_caller(client):
    assert client.get("/v1/blasst/status").json()["last_error"] is None
    client.get("/nowhere")
    client.put(THRESHOLD, content=b"{")
    assert client.get("/v1/blasst/status").json()["last_error"] is None
    client.put(THRESHOLD, json={"mag": 2500}, headers={"if-match": '"99"'})
    shown = client.get("/v1/blasst/status").json()["last_error"]
    client.get("/nowhere")
    assert client.get("/v1/blasst/status").json()["last_error"] == shown
    assert shown["kind"] == "precondition-failed"
    assert "somebody changed it" in shown["message"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", shown["time"])


def test_the_names_are_closed():
    counting = Tally()
    for number in range(1000):
        counting.error(f"made-up-{number}", "x")
    assert counting.errors().keys() == {*ERRORS, tally.OTHER}
    assert counting.errors()[tally.OTHER] == 1000
    assert set(CALLERS) < set(ERRORS)
    source = "".join(f.read_text() for f in Path(tally.__file__).parent.rglob("*.py"))
    kinds = set(re.findall(r'Problem\(\s*\d{3},\s*"([a-z-]+)"', source))
    kinds |= set(re.findall(r'tally\.error\("([a-z-]+)"', source))
    assert len(kinds) > 20
    assert kinds <= set(ERRORS)
