"""Options that several verbs of the server share."""

from __future__ import annotations

import argparse
from pathlib import Path

from blasst.kernels.exchange.schedule import Schedule, Threshold
from blasst.kernels.threshold import SkipThreshold, Unit
from blasst.server.settings import DEFAULT_HOST, DEFAULT_PORT, Settings

DEFAULT_STATE_DIR = "$XDG_STATE_HOME (~/.local/state if unset)/blasst"
_UNIT_OPTIONS: tuple[tuple[Unit, str, str, str], ...] = (
    ("mag", "--mag", "M", "threshold as MAG: lambda = 2^(-M/1000); a higher MAG skips less"),
    ("lambda", "--skip-lambda", "X", "threshold as lambda, natural base, 0 <= X < 1"),
    ("scale", "--scale", "S", "threshold as lambda times the prompt's length in tokens"),
)


def add_threshold_options(
    parser: argparse.ArgumentParser, *, off: bool = False, required: bool = False
) -> argparse._MutuallyExclusiveGroup:
    """--mag, --skip-lambda, --scale, --schedule, and --off where dense can be asked for; their
    group."""
    group = parser.add_mutually_exclusive_group(required=required)
    for _, option, metavar, text in _UNIT_OPTIONS:
        # Text here, a number in `threshold_of`: its errors name the rule and the remedy.
        group.add_argument(option, metavar=metavar, help=text)
    group.add_argument(
        "--schedule",
        metavar="STEPS",
        help="a threshold for each class of prompt length: TOKENS=off or TOKENS=UNIT:VALUE, UNIT "
        "mag, lambda or scale, the last TOKENS being `rest`, such as "
        "16k=off,64k=mag:7000,rest=mag:4500",
    )
    if off:
        group.add_argument("--off", action="store_true", help="dense attention, skip nothing")
    return group


def threshold_of(args: argparse.Namespace) -> Threshold | None:
    """The threshold given, None if none was. Raises ThresholdError."""
    if args.schedule is not None:
        return Schedule.parse(args.schedule)
    for unit, option, _, _ in _UNIT_OPTIONS:
        value = getattr(args, option[2:].replace("-", "_"))
        if value is not None:
            return SkipThreshold.parse(unit, value)
    return None


def state_folder(text: str) -> Path:
    """Value of --state-dir: empty (of an unset shell variable) would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a folder, or leave the option out")
    return Path(text)


def add_sidecar_options(parser: argparse.ArgumentParser, prefix: str) -> None:
    """All that `sidecar_settings` reads; prefix "" or "sidecar-"."""
    _add_address(parser, prefix)
    _add_duties(parser)


def _add_address(parser: argparse.ArgumentParser, prefix: str) -> None:
    """Where the sidecar listens and who may write."""
    parser.add_argument(
        f"--{prefix}host",
        default=DEFAULT_HOST,
        metavar="HOST",
        help="address of the sidecar (default %(default)s; beyond loopback --token-file is needed)",
    )
    parser.add_argument(
        f"--{prefix}port",
        default=DEFAULT_PORT,
        type=int,
        metavar="PORT",
        help="port of the sidecar (default %(default)s; 0: any free one, printed at start)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file whose one line is the bearer token that /v1/* then needs; read again when it "
        "changes, and nobody else may be able to read it",
    )
    parser.add_argument(
        "--read-token-file",
        type=Path,
        metavar="FILE",
        help="a second token that may only read",
    )
    parser.add_argument(
        f"--{prefix}uds",
        type=Path,
        metavar="PATH",
        help="listen on this Unix socket (mode 0600) instead of a port",
    )
    for name, text in (("cert", "certificate chain"), ("key", "private key of --tls-cert")):
        parser.add_argument(
            f"--tls-{name}", type=Path, metavar="FILE", help=f"{text}, PEM: serve https"
        )


def _add_duties(parser: argparse.ArgumentParser) -> None:
    """What it does besides keeping the threshold."""
    parser.add_argument(
        "--presets",
        type=Path,
        metavar="DIR",
        help="folder of calibration presets (default: presets/ in the state folder)",
    )
    parser.add_argument(
        "--follow",
        type=Path,
        metavar="FILE",
        help='file such as {"mag": 2500} (a mounted ConfigMap) whose threshold is set at the start '
        "and whenever it changes",
    )
    parser.add_argument(
        "--canary",
        type=Path,
        metavar="FILE",
        help="plan (TOML) of the canary, which probes the deployment and raises its MAG when "
        "answers differ too much from dense ones; see docs/canary.md",
    )
    parser.add_argument(
        "--vllm-metrics",
        action="store_true",
        help="show vLLM's own /metrics on the sidecar's page, too",
    )
    parser.add_argument(
        "--engine-url",
        default="",
        metavar="URL",
        help="vLLM's address for these two (default: http://127.0.0.1 and its port)",
    )
    parser.add_argument(
        "--otlp-endpoint",
        default="",
        metavar="URL",
        help="send OpenTelemetry traces of the sidecar's calls to this OTLP/HTTP collector, such "
        "as http://127.0.0.1:4318 (needs blasst[traces])",
    )


def sidecar_settings(
    args: argparse.Namespace, prefix: str, state_dir: Path, engine_url: str
) -> Settings:
    """Of the options above. engine_url: vLLM's address, "" where nothing says it. Raises
    SettingsError."""
    return Settings(
        state_dir,
        getattr(args, f"{prefix}host"),
        getattr(args, f"{prefix}port"),
        args.token_file,
        args.read_token_file,
        getattr(args, f"{prefix}uds"),
        args.tls_cert,
        args.tls_key,
        args.presets,
        args.follow,
        args.canary,
        engine_url,
        args.vllm_metrics,
        args.otlp_endpoint,
    )
