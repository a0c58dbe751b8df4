"""The threshold over HTTP: units, refusals, generations, preconditions, a state that is lost."""

from __future__ import annotations

import json
import threading

import jsonschema
import pytest

from blasst.kernels.exchange.desired import FILE_NAME, DesiredReader, read_desired
from blasst.server.auth import MAX_BODY_BYTES

THRESHOLD = "/v1/blasst/threshold"
JSON = {"content-type": "application/json"}


def put(client, body, if_match="*", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body)
    given = {**JSON, **headers}
    if if_match is not None:
        given["if-match"] = if_match
    return client.put(THRESHOLD, content=content, headers=given)


def assert_problem(response, status, kind):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["type"] == f"urn:blasst:problem:{kind}"
    assert body["status"] == status
    assert body["title"]
    assert body["detail"]
    assert "Traceback" not in response.text
    return body["detail"]


def test_before_any_change_the_deployment_is_dense_at_generation_0(client):
    response = client.get(THRESHOLD)
    assert response.status_code == 200
    assert response.headers["etag"] == '"0"'
    body = response.json()
    assert body["generation"] == 0
    assert body["threshold"] is body["mag"] is body["lambda"] is body["min_context"] is None
    assert body["converged"] is False
    assert body["front_ends"] == []


def test_a_put_is_durable_and_answers_all_units(client, tmp_path):
    response = put(client, {"mag": 2500, "min_context": 4096, "reason": "a sweep"}, '"0"')
    assert response.status_code == 200
    assert response.headers["etag"] == '"1"'
    body = response.json()
    assert body["threshold"] == {"unit": "mag", "value": 2500.0}
    assert body["mag"] == 2500.0
    assert body["lambda"] == pytest.approx(2**-2.5)
    assert (body["min_context"], body["reason"]) == (4096, "a sweep")
    assert client.get(THRESHOLD).json() == body
    on_disk = read_desired(tmp_path / FILE_NAME)
    assert (on_disk.generation, on_disk.threshold.value) == (1, 2500.0)
    assert on_disk.updated_by == "testclient"


@pytest.mark.parametrize(
    ("body", "unit", "mag", "skip_lambda"),
    [
        ({"lambda": 0.5}, "lambda", 1000.0, 0.5),
        ({"lambda": 0}, "lambda", None, 0.0),
        ({"scale": 500}, "scale", None, None),
        ({"mag": 126000}, "mag", 126000.0, 2.0**-126),
    ],
)
def test_units(client, body, unit, mag, skip_lambda):
    answer = put(client, body).json()
    assert answer["threshold"]["unit"] == unit
    assert (answer["mag"], answer["lambda"]) == (mag, skip_lambda)


def test_a_schedule_by_prompt_length(client, tmp_path):
    steps = [{"up_to": 16384, "off": True}, {"up_to": 65536, "mag": 7000}, {"lambda": 0.05}]
    body = put(client, {"schedule": steps, "min_context": 5}).json()
    assert (body["threshold"], body["mag"], body["lambda"]) == (None, None, None)
    assert body["schedule"] == [
        {"up_to": 16384, "threshold": None},
        {"up_to": 65536, "threshold": {"unit": "mag", "value": 7000.0}},
        {"up_to": None, "threshold": {"unit": "lambda", "value": 0.05}},
    ]
    assert client.get(THRESHOLD).json() == body
    assert str(read_desired(tmp_path / FILE_NAME).threshold).endswith("lambda 0.05 above")
    assert put(client, {"schedule": steps, "min_context": 5}).json()["generation"] == 1
    assert put(client, {"mag": 5}).json()["schedule"] is None
    (first, second) = client.get("/v1/blasst/audit").json()["records"]
    assert first["new"]["schedule"] == body["schedule"] == second["old"]["schedule"]
    # What only the steps together get wrong, no schema can say.
    for bad, message in (
        ([{"up_to": 5, "off": True}], "longer prompts would have none"),
        ([{"up_to": 5, "off": True}, {"up_to": 5, "off": True}, {"mag": 5}], "must be above"),
        ([{"mag": 5}, {"mag": 5}], "only the last step"),
    ):
        answer = put(client, {"schedule": bad})
        assert answer.status_code == 422
        assert message in answer.json()["detail"]


def test_off_and_delete_are_dense_and_count_as_changes(client):
    put(client, {"mag": 2500})
    assert put(client, {"off": True}).json()["threshold"] is None
    put(client, {"mag": 2500})
    deleted = client.delete(THRESHOLD, headers={"if-match": '"3"'})
    assert deleted.status_code == 200
    assert (deleted.json()["threshold"], deleted.json()["generation"]) == (None, 4)


def test_the_first_off_is_written_so_that_it_overrules_an_environment_default(client, tmp_path):
    assert put(client, {"off": True}).json()["generation"] == 1
    assert read_desired(tmp_path / FILE_NAME).threshold is None


def test_the_same_value_again_is_no_new_generation(client, tmp_path):
    put(client, {"mag": 2500})
    before = (tmp_path / FILE_NAME).stat().st_ino
    again = put(client, {"mag": 2500.0, "reason": "another"}, '"1"')
    assert again.json()["generation"] == 1
    # Each write makes a new file; times would change when it is read.
    assert (tmp_path / FILE_NAME).stat().st_ino == before
    assert put(client, {"mag": 2500, "min_context": 1}).json()["generation"] == 2


BAD_VALUES = [
    {"mag": 0},
    {"mag": -2500},
    {"mag": 1e9},
    {"mag": 10**400},
    {"mag": "2500"},
    {"mag": "high"},
    {"mag": True},
    {"mag": None},
    {"mag": [2500]},
    {"mag": {}},
    {"lambda": 1},
    {"lambda": -0.1},
    {"lambda": False},
    {"scale": -1},
    {"scale": None},
    {"off": False},
    {"off": 1},
    {"off": None},
    {},
    {"mag": 2500, "lambda": 0.1},
    {"mag": 2500, "off": True},
    {"mag": 2500, "lambda": None},
    {"skip_lambda": 0.1},
    {"MAG": 2500},
    {"mag": 2500, "url": "http://example.org"},
    {"mag": 2500, "generation": 9},
    {"mag": 2500, "min_context": -1},
    {"mag": 2500, "min_context": 1 << 30},
    {"mag": 2500, "min_context": 1.5},
    {"mag": 2500, "min_context": True},
    {"mag": 2500, "min_context": None},
    {"schedule": []},
    {"schedule": {}},
    {"schedule": None},
    {"schedule": [{}]},
    {"schedule": [{"up_to": None, "off": True}]},
    {"schedule": [{"up_to": 0, "off": True}, {"off": True}]},
    {"schedule": [{"up_to": 1.5, "off": True}, {"off": True}]},
    {"schedule": [{"mag": 5, "off": True}]},
    {"schedule": [{"target_skip_rate": 0.5}]},
    {"schedule": [{"mag": 1e9}]},
    {"schedule": [{"off": True}] * 13},
    {"schedule": [{"mag": 2500}], "mag": 2500},
    {"mag": 2500, "reason": 5},
    {"mag": 2500, "reason": "x" * 501},
    [],
    ["mag", 2500],
    2500,
    "mag",
    None,
]


@pytest.mark.parametrize("body", BAD_VALUES, ids=[json.dumps(b)[:40] for b in BAD_VALUES])
def test_a_bad_value_is_422_and_disturbs_nothing(client, body):
    put(client, {"mag": 7000})
    assert_problem(put(client, body), 422, "bad-threshold")
    state = client.get(THRESHOLD).json()
    assert (state["generation"], state["mag"]) == (1, 7000.0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"mag": NaN}',
        b'{"mag": Infinity}',
        b'{"mag": -Infinity}',
        b'{"mag": 2500, "mag": 1000}',
        b'{"mag": 2500} {"mag": 1}',
        b"\xff\xfe{}",
        b'{"mag": ' + b"9" * 5000 + b"}",
        b"[" * 8000 + b"]" * 8000,
        b"mag=2500",
    ],
)
def test_what_is_not_json_is_400(client, body):
    assert_problem(put(client, body), 400, "bad-json")
    assert client.get(THRESHOLD).json()["generation"] == 0


def test_a_number_that_overflows_is_refused(client):
    detail = assert_problem(put(client, b'{"mag": 1e999}'), 422, "bad-threshold")
    assert "finite" in detail


def test_errors_name_the_value_the_rule_and_the_remedy(client):
    detail = assert_problem(put(client, {"lambda": 1.5}), 422, "bad-threshold")
    assert "1.5" in detail
    assert "0 <= lambda < 1" in detail
    detail = assert_problem(put(client, {"mga": 2500}), 422, "bad-threshold")
    assert "unknown field 'mga'" in detail


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_other_content_types_are_415(client, content_type):
    headers = {"if-match": "*", "content-type": content_type}
    response = client.put(THRESHOLD, content=b'{"mag": 2500}', headers=headers)
    assert_problem(response, 415, "not-json")


def test_bodies_beyond_the_limit_are_413(client):
    body = {"mag": 2500, "reason": "x" * MAX_BODY_BYTES}
    assert_problem(put(client, body), 413, "too-large")

    def chunks():
        for _ in range(40):
            yield b" " * 1024

    response = client.put(THRESHOLD, content=chunks(), headers={**JSON, "if-match": "*"})
    assert_problem(response, 413, "too-large")


def test_if_match_is_required_and_compared(client):
    assert_problem(put(client, {"mag": 2500}, None), 428, "precondition-required")
    assert_problem(client.delete(THRESHOLD), 428, "precondition-required")
    put(client, {"mag": 2500}, '"0"')
    stale = put(client, {"mag": 1000}, '"0"')
    assert_problem(stale, 412, "precondition-failed")
    assert stale.headers["etag"] == '"1"'
    for wrong in ("1", 'W/"1"', '"one"', "", '"01"'):
        assert_problem(put(client, {"mag": 1000}, wrong), 412, "precondition-failed")
    assert put(client, {"mag": 1000}, '"7", "1"').json()["generation"] == 2


def test_converged_when_every_live_front_end_has_read_the_generation(client, fake_engine):
    engine = fake_engine()
    put(client, {"mag": 2500})
    dead = engine.front(40, generation=0)
    engine.kill(dead)
    engine.front(41, generation=1)
    engine.front(42, generation=0)
    state = client.get(THRESHOLD).json()
    assert state["converged"] is False
    assert [(f["name"], f["alive"]) for f in state["front_ends"]] == [
        ("front-40", False),
        ("front-41", True),
        ("front-42", True),
    ]
    engine.acknowledge(1, 0)
    state = client.get(THRESHOLD).json()
    assert state["converged"] is True
    last = state["front_ends"][-1]
    assert (last["pid"], last["generation_read"], last["generation_stamped"]) == (42, 1, 0)
    assert 0 <= last["age_s"] < 5
    answer = put(client, {"mag": 1000})
    assert (answer.status_code, answer.json()["converged"]) == (202, False)


def test_metrics_show_pages_and_desired_generation(client, fake_engine):
    fake_engine().rank(0)
    put(client, {"mag": 2500})
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "blasst_tiles_visited_total{" in response.text
    assert "blasst_control_state_ok 1.0" in response.text


CORRUPT = [b"", b"{", b"x" * 100_000, b"[]", b'{"schema_version": 99}', b"\x00" * 64]


@pytest.mark.parametrize("content", CORRUPT, ids=range(len(CORRUPT)))
def test_a_corrupt_file_is_told_and_repaired_by_a_put(client, tmp_path, content):
    put(client, {"mag": 2500})
    put(client, {"mag": 3000})
    reader = DesiredReader(tmp_path)
    assert reader.current().generation == 2
    (tmp_path / FILE_NAME).write_bytes(content)
    assert "If-Match: *" in assert_problem(client.get(THRESHOLD), 503, "state-unreadable")
    assert_problem(client.get("/readyz"), 503, "state-unreadable")
    assert client.get("/healthz").status_code == 200
    assert "blasst_control_state_ok 0.0" in client.get("/metrics").text
    status = client.get("/v1/blasst/status").json()
    assert status["desired"] is None
    assert FILE_NAME in status["error"]
    assert reader.current().threshold.value == 3000
    assert_problem(put(client, {"mag": 2500}, '"2"'), 503, "state-unreadable")
    assert put(client, {"mag": 2500}).json()["generation"] == 3
    assert client.get("/readyz").status_code == 200
    assert reader.current().generation == 3


def test_a_lost_file_is_an_error_not_generation_0(client, tmp_path):
    put(client, {"mag": 2500})
    (tmp_path / FILE_NAME).unlink()
    assert_problem(client.get(THRESHOLD), 503, "state-unreadable")
    assert put(client, {"mag": 2500}).json()["generation"] == 2


def test_a_folder_in_place_of_the_file_is_503(client, tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    assert_problem(client.get(THRESHOLD), 503, "state-unreadable")
    assert_problem(put(client, {"mag": 2500}), 503, "state-unwritable")


def test_concurrent_puts_give_each_its_own_generation(client):
    answers = []

    def change(i):
        answers.append(put(client, {"mag": 1000 + i}).json())

    threads = [threading.Thread(target=change, args=(i,)) for i in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(a["generation"] for a in answers) == list(range(1, 101))
    last = max(answers, key=lambda a: a["generation"])
    assert client.get(THRESHOLD).json()["mag"] == last["mag"]


def test_of_racing_writers_with_one_etag_exactly_one_wins(client):
    for generation in range(10):
        codes = []

        def change(i, base=generation, codes=codes):
            body = {"mag": 1000 + i + 100 * base}
            codes.append(put(client, body, f'"{base}"').status_code)

        threads = [threading.Thread(target=change, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(codes) == [200] + [412] * 7
        assert client.get(THRESHOLD).json()["generation"] == generation + 1


def test_a_threshold_that_can_have_no_effect_is_409(client, fake_engine):
    engine = fake_engine()
    engine.rank(0, refusal="head_dim 96 is not in 64, 128")
    engine.rank(1, refusal="head_dim 96 is not in 64, 128")
    for body in ({"mag": 2500}, {"lambda": 0.05}, {"scale": 500}):
        detail = assert_problem(put(client, body, '"0"'), 409, "no-effect")
        assert "head_dim 96 is not in 64, 128" in detail
        assert "blasst doctor" in detail
        assert "off" in detail
    assert_problem(put(client, {"mag": 2500}, None), 428, "precondition-required")
    assert client.get(THRESHOLD).json()["generation"] == 0
    assert put(client, {"off": True}).json()["generation"] == 1
    assert client.delete(THRESHOLD, headers={"if-match": "*"}).status_code == 200
    operations = client.get("/openapi.json").json()["paths"][THRESHOLD]
    assert "409" in operations["put"]["responses"]
    assert "409" not in operations["delete"]["responses"]


def test_one_rank_that_can_skip_and_ranks_that_are_gone_refuse_nothing(client, fake_engine):
    engine = fake_engine()
    engine.kill(engine.rank(0, refusal="gone").path.name)
    assert put(client, {"mag": 2500}).status_code == 200
    engine.rank(1, refusal="no")
    assert put(client, {"mag": 3000}).status_code == 409
    engine.rank(2)
    assert put(client, {"mag": 3000}).status_code == 200


def test_unknown_paths_and_methods_are_problems(client):
    assert_problem(client.get("/nothing"), 404, "not-found")
    refused = client.post(THRESHOLD)
    assert_problem(refused, 405, "method-not-allowed")
    assert refused.headers["allow"] == "DELETE, GET, PUT"


def test_an_unexpected_error_shows_no_detail(client, monkeypatch):
    def broken(*args):
        raise RuntimeError("secret of the inside")

    monkeypatch.setattr("blasst.server.observe.status", broken)
    response = client.get("/v1/blasst/status")
    assert_problem(response, 500, "internal")
    assert "secret" not in response.text


def test_openapi_schema_of_the_body_agrees_with_what_is_accepted(client):
    document = client.get("/openapi.json").json()
    schema = document["components"]["schemas"]["ThresholdChange"]
    validator = jsonschema.Draft202012Validator({**document, **schema})
    for good in schema["examples"]:
        validator.validate(good)
        # No engine runs here that could say whether a preset fits.
        expected = 409 if "target_skip_rate" in good else 200
        assert put(client, good).status_code == expected, good
    for bad in BAD_VALUES:
        assert not validator.is_valid(bad), bad
    example = document["components"]["schemas"]["ThresholdState"]["examples"][0]
    assert example.keys() == client.get(THRESHOLD).json().keys()
