"""`blasst serve MODEL`: vLLM with the blasst backend and its sidecar, as one command."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blasst.kernels.exchange.desired import DENSE, MIN_CONTEXT_MAX, DesiredStateError
from blasst.kernels.exchange.schedule import Threshold
from blasst.kernels.threshold import ThresholdError
from blasst.server.cli import fail
from blasst.server.settings import Settings, SettingsError, default_state_dir
from blasst.server.verbs import vllm_options
from blasst.server.verbs.common import (
    DEFAULT_STATE_DIR,
    add_sidecar_options,
    add_threshold_options,
    sidecar_settings,
    state_folder,
    threshold_of,
)
from blasst.server.verbs.vllm_options import VllmOptions

if TYPE_CHECKING:
    from blasst.server.control import ControlService
    from blasst.server.sidecar import Sidecar

ACCEPTS_UNKNOWN = True
IMPLS = ("auto", "blackwell", "hopper", "triton", "cpu", "cpu-torch", "reference")
Child = tuple[list[str], dict[str, str], float]
"""What a Supervisor needs: command, environment, seconds to stop in."""


@dataclass(frozen=True)
class Given:
    """What the command line says about the threshold. min_context: whether it was given."""

    threshold: Threshold | None
    min_context: bool


_EPILOG = """MODEL and every option that is not listed here go to `vllm serve` as they are.

examples:
  blasst serve Qwen/Qwen3-8B --mag 2500 --max-model-len 131072
  blasst serve ./model --port 8001 --sidecar-port 8301

exit codes: 2 bad input, found before anything was started: port taken, model folder missing, state
folder unusable, a conflicting option; otherwise that of vLLM (128 + N if signal N ended it), and 1
where vLLM ended by itself with 0 or the sidecar did
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "blasst serve MODEL [options] [options of vllm serve]"
    parser.description = (
        "Start vLLM with --attention-backend blasst, and the sidecar that sets its threshold."
    )
    parser.epilog = _EPILOG
    add_threshold_options(parser)
    add_sidecar_options(parser, "sidecar-")
    parser.add_argument(
        "--state-dir",
        type=state_folder,
        metavar="DIR",
        help=f"folder for desired.json and stats/ (default {DEFAULT_STATE_DIR}/PORT, 0700)",
    )
    parser.add_argument(
        "--min-context",
        type=int,
        metavar="N",
        help="prompts shorter than N tokens run dense (default: the plugin's, 8192)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="refuse to start where a layer would fall back"
    )
    parser.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="let requests of different thresholds share cached prefixes",
    )
    parser.add_argument(
        "--impl", choices=IMPLS, help="kernels to use; other than auto refuses what it cannot run"
    )
    parser.add_argument(
        "--stop-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="after a stop signal vLLM is killed when so much time is up (default %(default)s)",
    )
    parser.add_argument(
        "--vllm-command",
        default="",
        metavar="CMD",
        help="command to run instead of the `vllm` beside this Python",
    )


def run(args: argparse.Namespace) -> int:
    try:
        threshold = threshold_of(args)
        vllm = vllm_options.parse(args.extra)
        command = [*_vllm_command(args.vllm_command), "serve", *vllm.arguments]
        settings = _settings(args, vllm)
        child: Child = (command, _environment(args, settings), args.stop_timeout)
    except (ThresholdError, SettingsError) as e:
        return fail(e, 2)
    given = Given(threshold, args.min_context is not None)
    return _serve(settings, given, vllm, child)


def _serve(settings: Settings, given: Given, vllm: VllmOptions, child: Child) -> int:
    from blasst.server.problems import Problem
    from blasst.server.sidecar import Sidecar

    sidecar = Sidecar(settings)
    try:
        # The ports first: a start that is refused leaves no empty folder behind.
        vllm_options.check_port_free(vllm)
        sidecar.prepare(dead_pages_older_than_s=0)
        in_force = _set_given(sidecar.control, given, settings.canary is not None)
        return _supervise(sidecar, child, in_force)
    except (SettingsError, Problem) as e:
        return fail(e, 2)
    finally:
        sidecar.stop()


def _set_given(control: ControlService, given: Given, keep_raised: bool) -> str:
    """Options given rule over what an earlier run left, but for what the canary made of them; says
    what is in force then."""
    from blasst.server.canary import raised_over
    from blasst.server.control import Wish

    try:
        old = control.read()
    except DesiredStateError as e:
        if given.threshold is None:
            return f"unknown: {e} (blasst threshold set --mag N --force)"
        old = DENSE
    new = old
    if keep_raised and given.threshold and raised_over(old, given.threshold, None):
        return f"{old.threshold or 'dense'}, generation {old.generation}: the canary raised it"
    # The file rules over the environment, in which --min-context travels: clear it there.
    if given.threshold is not None or (given.min_context and old.min_context is not None):
        wish = Wish(given.threshold or old.threshold, reason="blasst serve", by="blasst serve")
        new = control.set(wish, "*")
    if not new.generation:
        return ""
    kept = ", as an earlier run left it" if given.threshold is None and new == old else ""
    return f"{new.threshold or 'dense'}, generation {new.generation}{kept}"


def _supervise(sidecar: Sidecar, start: Child, in_force: str) -> int:
    from blasst.server.supervisor import Supervisor

    try:
        child = Supervisor(*start)
    except OSError as e:
        return fail(f"{start[0][0]} cannot be started: {e.strerror}", 2)
    try:
        sidecar.start()
        print(f"blasst serve: sidecar {sidecar.url} state {sidecar.settings.state_dir}", flush=True)
        if in_force:
            print(f"blasst serve: threshold {in_force}", flush=True)
        code = child.wait(needed=lambda: sidecar.running)
        lost = not sidecar.running
    finally:
        child.end()
    if lost:
        return fail("the sidecar stopped by itself, so vLLM was stopped too; start both again", 1)
    if child.stopping:
        return code
    # vLLM exits with 0 when its engine was killed: whoever restarts us must not take that for good.
    return fail(f"vLLM ended by itself with exit code {code}", code or 1)


def _settings(args: argparse.Namespace, vllm: VllmOptions) -> Settings:
    if not (math.isfinite(args.stop_timeout) and args.stop_timeout >= 0):
        raise SettingsError(f"--stop-timeout {args.stop_timeout} must be at least 0 seconds")
    if vllm.known_port and args.sidecar_port == vllm.port:
        raise SettingsError(
            f"--port and --sidecar-port are both {vllm.port} and collide; give vLLM or the sidecar "
            "another"
        )
    state_dir = args.state_dir or default_state_dir(vllm.port)
    return sidecar_settings(args, "sidecar_", state_dir, args.engine_url or vllm.url)


def _vllm_command(given: str) -> list[str]:
    try:
        words = shlex.split(given)
    except ValueError as e:
        raise SettingsError(f"--vllm-command {given!r} is no command: {e}") from None
    command = words or [str(Path(sys.executable).with_name("vllm"))]
    if not words and not Path(command[0]).exists():
        raise SettingsError(
            f"no vLLM beside {sys.executable}: pip install 'blasst[cpu]' or 'blasst[cuda]'"
        )
    if shutil.which(command[0]) is None:
        raise SettingsError(
            f"{command[0]} cannot be started: No such file, or not executable; "
            "correct --vllm-command"
        )
    return command


def _environment(args: argparse.Namespace, settings: Settings) -> dict[str, str]:
    """The environment of vLLM: ours, plus the settings of the plugin that were given."""
    env = dict(os.environ)
    plugins = env.get("VLLM_PLUGINS")
    if plugins is not None and "blasst" not in plugins.split(","):
        raise SettingsError(
            f"VLLM_PLUGINS={plugins!r} keeps the blasst plugin out; add blasst to it or unset it"
        )
    if args.min_context is not None and not 0 <= args.min_context <= MIN_CONTEXT_MAX:
        raise SettingsError(
            f"--min-context {args.min_context} is outside 0..{MIN_CONTEXT_MAX} prompt tokens"
        )
    given = {
        "VLLM_BLASST_STATE_DIR": settings.state_dir.resolve(),
        "VLLM_BLASST_MIN_CONTEXT": args.min_context,
        "VLLM_BLASST_STRICT": 1 if args.strict else None,
        "VLLM_BLASST_SHARE_PREFIX_CACHE": 1 if args.share_prefix_cache else None,
        "VLLM_BLASST_IMPL": args.impl,
    }
    env.update({name: str(value) for name, value in given.items() if value is not None})
    # The working directory may be a checkout whose folder kernels/ hides the package of that name.
    env["PYTHONSAFEPATH"] = "1"
    return env
