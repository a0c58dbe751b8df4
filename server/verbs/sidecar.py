"""`blasst sidecar`: the control and evidence API alone, for a vLLM started elsewhere."""

from __future__ import annotations

import argparse
import math
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

from blasst.server.cli import fail
from blasst.server.settings import SettingsError, default_state_dir
from blasst.server.verbs.common import (
    DEFAULT_STATE_DIR,
    add_sidecar_options,
    sidecar_settings,
    state_folder,
)

if TYPE_CHECKING:
    from blasst.server.sidecar import Sidecar

_VLLM_PORT = 8000
_EPILOG = """Start vLLM with VLLM_BLASST_STATE_DIR set to the same folder.

exit codes: 0 stopped by a signal, 1 the server failed, 2 bad input: port taken, state folder
unusable or in use by another sidecar, token missing
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve /v1/blasst/threshold, /metrics and the status page for one folder."
    parser.epilog = _EPILOG
    add_sidecar_options(parser, "")
    parser.add_argument(
        "--state-dir",
        type=state_folder,
        metavar="DIR",
        help="folder shared with vLLM: desired.json and stats/ (default "
        f"{DEFAULT_STATE_DIR}/{_VLLM_PORT}, as of blasst serve)",
    )


def run(args: argparse.Namespace) -> int:
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    sidecar: Sidecar | None = None
    try:
        state_dir = args.state_dir or default_state_dir(_VLLM_PORT)
        settings = sidecar_settings(
            args, "", state_dir, args.engine_url or f"http://127.0.0.1:{_VLLM_PORT}"
        )
        from blasst.server.sidecar import Sidecar

        sidecar = Sidecar(settings)
        # The engine may run: to remove pages, added up or not yet, would let its counters fall.
        sidecar.prepare(dead_pages_older_than_s=math.inf)
        sidecar.start()
        print(f"blasst sidecar: {sidecar.url} state {settings.state_dir}", flush=True)
        while sidecar.running and not stopped.wait(0.5):
            pass
    except SettingsError as e:
        return fail(e, 2)
    finally:
        if sidecar is not None:
            sidecar.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if stopped.is_set() else fail("the sidecar's server stopped by itself", 1)
