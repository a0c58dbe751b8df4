"""What `blasst serve` understands of the options of vLLM, and the folder that follows from them."""

from __future__ import annotations

from blasst.server.settings import default_state_dir
from blasst.server.verbs import vllm_options


def test_the_state_folder_follows_the_served_port(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir(8001) == tmp_path / "blasst" / "8001"
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_state_dir(8001) == tmp_path / ".local/state/blasst/8001"


def test_what_is_understood_of_vllms_options(model):
    parsed = vllm_options.parse([str(model), "--host=0.0.0.0", "--port", "9", "--port=10"])
    assert (parsed.host, parsed.port, parsed.known_port) == ("0.0.0.0", 10, True)
    parsed = vllm_options.parse(["org/name", "--attention-backend", "BLASST"])
    assert parsed.arguments == ["org/name", "--attention-backend", "BLASST"]
    assert parsed.port == 8000
    assert not vllm_options.parse(["org/name", "--uds", "/run/x"]).known_port
    assert not vllm_options.parse(["org/name", "--config", "x.yaml"]).known_port
    assert vllm_options.parse(["org/name", "--config", "x.yaml", "--port", "9"]).known_port


def test_the_address_of_vllm_follows_from_its_options(model):
    def url(*options):
        return vllm_options.parse([str(model), *options]).url

    assert url() == "http://127.0.0.1:8000"
    assert url("--host", "0.0.0.0", "--port", "9") == "http://127.0.0.1:9"
    assert url("--host", "::1") == "http://[::1]:8000"
    assert url("--uds", "/run/x") == url("--config", "x.yaml") == ""
    assert url("--ssl-certfile", "x") == ""
