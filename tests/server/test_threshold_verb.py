"""`blasst threshold` against a sidecar: units, waiting, tokens, one line for each error."""

from __future__ import annotations

import http.server
import json
import socket
import threading

import pytest

from blasst.kernels.exchange.desired import FILE_NAME, read_desired
from blasst.kernels.exchange.presets import Preset, PresetFit, PresetGeometry
from blasst.kernels.threshold import SparsityCurve
from blasst.server import cli
from blasst.server.settings import Settings
from blasst.server.sidecar import Sidecar

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def make_sidecar(tmp_path):
    running = []

    def start(**settings):
        sidecar = Sidecar(Settings(tmp_path, port=0, **settings))
        sidecar.prepare(dead_pages_older_than_s=0)
        sidecar.start()
        running.append(sidecar)
        return sidecar

    yield start
    for sidecar in running:
        sidecar.stop()


@pytest.fixture
def sidecar(make_sidecar):
    return make_sidecar()


@pytest.fixture
def blasst_threshold(capsys, sidecar):
    """Run the verb in this process; (exit code, stdout, stderr)."""

    def run(*arguments, url=sidecar.url):
        try:
            code = cli.main(["threshold", *map(str, arguments), "--url", url])
        except SystemExit as e:
            code = e.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_set_then_get(blasst_threshold, tmp_path):
    code, out, _ = blasst_threshold("get")
    assert (code, out) == (0, "dense, generation 0, 0/0 front ends follow\n")
    code, out, _ = blasst_threshold(
        *("set", "--mag", 2500, "--reason", "a sweep", "--min-context", 100)
    )
    assert code == 0
    assert out == "mag 2500 (lambda 0.176777), generation 1, 0/0 front ends follow\n"
    state = read_desired(tmp_path / FILE_NAME)
    assert (state.reason, state.min_context) == ("a sweep", 100)


@pytest.mark.parametrize(
    ("options", "threshold"),
    [
        (["--skip-lambda", "0.05"], {"unit": "lambda", "value": 0.05}),
        (["--scale", "500"], {"unit": "scale", "value": 500.0}),
        (["--off"], None),
    ],
)
def test_every_unit_and_json(blasst_threshold, options, threshold):
    code, out, err = blasst_threshold("set", *options, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["threshold"] == threshold
    assert json.loads(blasst_threshold("get", "--json")[1])["threshold"] == threshold


def test_a_schedule(blasst_threshold, tmp_path):
    text = "16k=off,64k=mag:7000,rest=lambda:0.05"
    code, out, _ = blasst_threshold("set", "--schedule", text)
    assert code == 0
    told = "dense to 16384 tokens, mag 7000 to 65536 tokens, lambda 0.05 above"
    assert out.startswith(f"{told}, generation 1")
    assert str(read_desired(tmp_path / FILE_NAME).threshold) == told
    assert json.loads(blasst_threshold("get", "--json")[1])["schedule"][0]["up_to"] == 16384


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--schedule", "16k=off"],
        ["--schedule", "rest=mag:0"],
        ["--schedule", "rest=off", "--off"],
        ["--mag", "0"],
        ["--mag", "-2500"],
        ["--mag", "high"],
        ["--mag", "nan"],
        ["--mag", "1e9"],
        ["--skip-lambda", "1"],
        ["--scale", "inf"],
        ["--mag", "1", "--off"],
        ["--mag", "2500", "--wait", "-1"],
        ["--mag", "2500", "--wait", "nan"],
        ["--mag", "2500", "--min-context", "-1"],
        ["--mag", "2500", "--reason", "x" * 501],
        ["--mag", "2500", "--token-file", "/nonexistent"],
        ["--what"],
    ],
)
def test_bad_input_is_one_line_and_exit_2(blasst_threshold, options):
    code, out, err = blasst_threshold("set", *options)
    assert (code, out) == (2, "")
    assert err.startswith("blasst: error: ")
    assert err.count("\n") == 1
    assert blasst_threshold("get", "--json")[1].startswith('{"generation": 0,')


def test_wait_returns_when_the_front_end_follows(blasst_threshold, fake_engine):
    engine = fake_engine()
    engine.front(42)
    timer = threading.Timer(0.7, engine.acknowledge, (1,))
    timer.start()
    code, out, _ = blasst_threshold("set", "--mag", 2500, "--wait", 10)
    timer.join()
    assert code == 0
    assert out.endswith("generation 1, 1/1 front ends follow\n")


def test_wait_in_vain_is_exit_3(blasst_threshold, fake_engine):
    fake_engine().front(42)
    code, out, err = blasst_threshold("set", "--mag", 2500, "--wait", 0.5)
    assert code == 3
    assert out.endswith("generation 1, 0/1 front ends follow\n")
    assert err == (
        "blasst: error: generation 1 was written but not taken up within 0.5 s: "
        "0/1 front ends follow\n"
    )
    code, _, err = blasst_threshold("get", "--wait", 0.1)
    assert code == 3
    assert "generation 1 is not taken up within 0.1 s" in err


def test_a_number_without_a_unit_is_told_the_option(blasst_threshold):
    for arguments in (["2500"], ["2500", "--wait", "1"]):
        code, _, err = blasst_threshold("set", *arguments)
        assert code == 2
        assert "'2500' has no unit; give --mag 2500" in err
        assert err.count("\n") == 1
    assert "'off' has no unit; give --mag N, " in blasst_threshold("set", "off")[2]


def test_a_threshold_without_effect_is_exit_1(blasst_threshold, fake_engine):
    fake_engine().rank(0, refusal="head_dim 96")
    code, _, err = blasst_threshold("set", "--mag", 2500)
    assert code == 1
    assert "HTTP 409: " in err
    assert "(head_dim 96)" in err
    assert blasst_threshold("set", "--off")[0] == 0


def test_a_corrupt_file_is_exit_1_and_force_repairs(blasst_threshold, tmp_path):
    blasst_threshold("set", "--mag", 2500)
    (tmp_path / FILE_NAME).write_text("{")
    code, _, err = blasst_threshold("get")
    assert code == 1
    assert "HTTP 503" in err
    assert "`blasst threshold set --mag N --force`" in err
    assert blasst_threshold("set", "--mag", 2500)[0] == 1
    assert blasst_threshold("set", "--mag", 2500, "--force")[0] == 0


def test_the_token_is_needed_and_never_shown(make_sidecar, tmp_path, capsys):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "wrong").write_text("x" * 32)
    (tmp_path / "wrong").chmod(0o600)
    sidecar = make_sidecar(token_file=tmp_path / "token")
    command = ["threshold", "get", "--url", sidecar.url]
    assert cli.main(command) == 1
    missing = capsys.readouterr().err
    assert cli.main([*command, "--token-file", str(tmp_path / "wrong")]) == 1
    wrong = capsys.readouterr().err
    assert "HTTP 401" in missing
    assert "HTTP 401" in wrong
    assert "No token was sent: give --token-file FILE" in missing
    assert f"The token in {tmp_path / 'wrong'} is not accepted: --token-file must" in wrong
    assert "x" * 32 not in wrong
    assert cli.main([*command, "--token-file", str(tmp_path / "token")]) == 0


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8300", "ftp://host/", "file:///etc/passwd", "", "http://", "http://[::1"),
        *(
            "http://h:99999",
            "http://h:-1",
            "http://h:x",
            "http://h:0",
            "http://h/ x",
            "http://h/\n",
        ),
    ],
)
def test_a_bad_url_is_exit_2(blasst_threshold, url):
    code, _, err = blasst_threshold("get", url=url)
    assert code == 2
    assert "must look like" in err


def test_nobody_there_is_exit_1(blasst_threshold):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    code, _, err = blasst_threshold("get", url=f"http://127.0.0.1:{port}")
    assert code == 1
    assert "no sidecar answers" in err
    assert "start `blasst serve` or `blasst sidecar`, or name its address with --url" in err


class _Other(http.server.BaseHTTPRequestHandler):
    """Not a sidecar: answers as `reply`, and notes what it was asked with."""

    reply: tuple[int, dict[str, str], bytes]
    seen: list[str | None]

    def do_GET(self):
        self.seen.append(self.headers.get("Authorization"))
        status, headers, body = self.reply
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def other_server():
    servers = []

    def start(status, headers, body):
        handler = type("Handler", (_Other,), {"reply": (status, headers, body), "seen": []})
        server = http.server.HTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}", handler.seen

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"{}", b'{"generation": 1, "converged": true}']
)
def test_another_server_is_exit_1(blasst_threshold, other_server, body):
    url, _ = other_server(200, {}, body)
    code, _, err = blasst_threshold("get", url=url)
    assert code == 1
    assert err.count("\n") == 1


def test_a_redirect_does_not_carry_the_token_away(blasst_threshold, other_server, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    target, seen = other_server(200, {}, b"{}")
    url, _ = other_server(302, {"Location": target + "/"}, b"")
    code, _, err = blasst_threshold("get", "--token-file", tmp_path / "token", url=url)
    assert code == 1
    assert "HTTP 302" in err
    assert seen == []


def test_watch_prints_changes_until_interrupted(blasst, sidecar, capsys):
    watch = blasst("threshold", "watch", "--interval", 0.1, "--url", sidecar.url)
    watch.output("dense, generation 0")
    cli.main(["threshold", "set", "--mag", "2500", "--url", sidecar.url])
    watch.output("mag 2500 .*generation 1")
    watch.popen.send_signal(2)
    assert watch.wait() == 130
    assert watch.out.read_text().count("\n") == 2
    assert watch.err.read_text() == ""


def test_watch_shows_a_stamp_of_a_request_to_programs_only(blasst, sidecar, fake_engine, tmp_path):
    engine = fake_engine(tmp_path / "stats")
    engine.front(generation=0, stamped=0)
    watches = [
        blasst("threshold", "watch", "--interval", 0.1, "--url", sidecar.url, *json)
        for json in ([], ["--json"])
    ]
    cli.main(["threshold", "set", "--mag", "2500", "--url", sidecar.url])
    engine.acknowledge(1, 0)
    watches[0].output("generation 1, 1/1 front ends follow")
    engine.acknowledge(1, 1)
    watches[1].output('"generation_stamped": 1')
    cli.main(["threshold", "set", "--mag", "3000", "--url", sidecar.url])
    watches[0].output("mag 3000")
    for watch in watches:
        watch.popen.send_signal(2)
        watch.wait()
    lines = watches[0].out.read_text().splitlines()
    assert len(lines) == len(set(lines)), lines


def test_a_proxy_of_the_environment_is_left_out(blasst_threshold, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert blasst_threshold("get")[0] == 0


def test_a_target_skip_rate_goes_through_a_preset(blasst_threshold, fake_engine, tmp_path):
    fake_engine(tmp_path / "stats").rank(0, tiles="64x128")
    (tmp_path / "presets").mkdir()
    curve = PresetFit(0.02, 12, 0.1, 0.9, (4096,))
    geometry = PresetGeometry("cpu", 64, 128)
    preset = Preset("tiny", geometry, SparsityCurve(10.0, 4.0), curve, "essays")
    (tmp_path / "presets" / "ours.json").write_text(preset.dumps())
    target = ("set", "--target-skip-rate", 0.5)
    code, out, _ = blasst_threshold(*target)
    assert code == 0
    assert "(preset ours: target skip rate 0.5), generation 1" in out
    assert blasst_threshold(*target, "--preset", "ours")[0] == 0
    code, _, err = blasst_threshold(*target, "--preset", "theirs")
    assert (code, "no preset 'theirs'" in err) == (1, True)
    assert blasst_threshold("set", "--target-skip-rate", 0.99)[0] == 2
    assert blasst_threshold("set", "--target-skip-rate", "nan")[0] == 2
    assert blasst_threshold("set", "--mag", 1, "--preset", "ours")[0] == 2
    assert blasst_threshold(*target, "--mag", 1)[0] == 2
