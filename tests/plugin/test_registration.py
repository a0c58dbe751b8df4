"""Registration in processes of their own: other plugins, other versions, forked children."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("registration is with vLLM, which is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

Run = Callable[[str], str]


@pytest.fixture(scope="module")
def sound(run_script: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return run_script("registration.py")


def test_the_alias_is_found_parsed_and_pickled(sound: dict[str, Any]) -> None:
    assert sound["alias"]
    assert sound["parsed"]
    assert sound["pickled"]
    assert sound["class"] == "BLASST"


def test_each_selection_gets_its_backend(sound: dict[str, Any]) -> None:
    assert sound["selections"] == ["CPUAttentionBackend", "CPUAttentionBackend", "BlasstBackend"]


def test_registration_is_cheap(sound: dict[str, Any]) -> None:
    # It runs in every process of vLLM; the heavy modules load where an engine needs them.
    assert sound["seconds"] < 0.5


def test_a_forked_child_takes_nothing_of_its_parent_for_its_own(sound: dict[str, Any]) -> None:
    assert sound["forked"]


def test_settings_are_known_to_vllm_only_while_it_checks_them(sound: dict[str, Any]) -> None:
    assert sound["names"] == [False, True, False]


@pytest.fixture
def run(clean_environment: Callable[[dict[str, str]], dict[str, str]]) -> Run:
    def python(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=clean_environment({"VLLM_LOGGING_LEVEL": "WARNING"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    return python


def test_another_owner_of_the_custom_backend_is_respected(run: Run) -> None:
    out = run(
        """
        from vllm.v1.attention.backends.registry import AttentionBackendEnum as E, register_backend
        register_backend(E.CUSTOM, "their.Backend")
        from blasst.plugin import register
        register()
        assert "BLASST" not in E.__members__
        assert E.CUSTOM.get_path() == "their.Backend"
        """
    )
    assert "another plugin owns the CUSTOM attention backend (their.Backend)" in out


def test_an_unsupported_vllm_keeps_working_without_us(run: Run) -> None:
    run(
        """
        import vllm
        vllm.__version__ = "0.40.0"
        from blasst.plugin import register
        register()
        from vllm.platforms import current_platform
        stock = type(current_platform).__dict__["get_attn_backend_cls"].__func__
        assert not hasattr(stock, "_blasst_wrapped")
        """
    )
