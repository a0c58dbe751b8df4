"""The few options of `vllm serve` that `blasst serve` must understand; all go on unchanged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from blasst.server.settings import SettingsError

BACKEND = "blasst"
_DEFAULT_PORT = 8000
_CONFIG_FILES = ("config.json", "params.json")


@dataclass(frozen=True)
class VllmOptions:
    """arguments: everything after `vllm serve`, the backend included. known_port: vLLM will listen
    on `port`, not on a Unix socket nor on a port that only its configuration file names."""

    host: str
    port: int
    known_port: bool
    arguments: list[str]

    @property
    def url(self) -> str:
        """Where this machine reaches vLLM; "" where the options do not say, or with TLS."""
        if not self.known_port or _values(self.arguments, "--ssl-certfile"):
            return ""
        everywhere = self.host in ("", "0.0.0.0", "::")
        host = "127.0.0.1" if everywhere else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def parse(extra: list[str]) -> VllmOptions:
    """MODEL and vLLM's options as given. Raises SettingsError for what cannot work."""
    if not extra or extra[0].startswith("-"):
        raise SettingsError("give MODEL first: blasst serve MODEL [options]")
    _check_model(extra[0])
    backends = _values(extra, "--attention-backend")
    for config in ("--attention-config", "-ac"):
        backends += _values(extra, f"{config}.backend")
        backends += [_backend_of(text) for text in _values(extra, config)]
    for backend in backends:
        if backend and backend.lower() != BACKEND:
            raise SettingsError(
                f"--attention-backend {backend} conflicts: blasst serve runs vLLM with "
                f"{BACKEND}; leave the option out, or use vllm serve"
            )
    own = [] if any(backends) else ["--attention-backend", BACKEND]
    ports = _values(extra, "--port")
    return VllmOptions(
        host=_last(extra, "--host", ""),
        port=_port(ports[-1] if ports else str(_DEFAULT_PORT)),
        known_port=bool(ports or not _values(extra, "--config")) and not _values(extra, "--uds"),
        arguments=[extra[0], *own, *extra[1:]],
    )


def check_port_free(vllm: VllmOptions) -> None:
    """Raises SettingsError now, and not after the model was loaded."""
    from blasst.server.sidecar import listen

    if vllm.known_port:
        listen(vllm.host, vllm.port).close()


def _check_model(model: str) -> None:
    path = Path(model).expanduser()
    # Hub names are NAME or OWNER/NAME; anything else that has a separator is meant as a path.
    looks_local = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if not path.exists():
        if looks_local:
            raise SettingsError(
                f"model {model} does not exist; give a folder that has a config.json, or a Hub "
                "name such as Qwen/Qwen3-8B"
            )
        return
    if path.is_dir() and not any((path / name).exists() for name in _CONFIG_FILES):
        raise SettingsError(f"model folder {model} has no config.json: it is not a model")


def _values(extra: list[str], name: str) -> list[str]:
    """Every value given for an option, in either form; vLLM takes _ for - too."""
    found = []
    for i, argument in enumerate(extra):
        key, equals, value = argument.partition("=")
        if key.replace("_", "-") == name:
            found.append(value if equals else extra[i + 1] if i + 1 < len(extra) else "")
    return found


def _last(extra: list[str], name: str, default: str) -> str:
    return (_values(extra, name) or [default])[-1]


def _port(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) <= 65535):
        raise SettingsError(f"--port {text!r} is outside 1..65535")
    return int(text)


def _backend_of(attention_config: str) -> str:
    try:
        return str(json.loads(attention_config).get("backend") or "")
    except (ValueError, AttributeError):
        return ""
