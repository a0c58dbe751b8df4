"""The deployment that is drilled: one sidecar and one vLLM on one state folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blasst.deploy.drills import processes, recorder

START_S = 400.0
"""How long a process may take to come up, on a busy machine."""

_ENGINE_OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-num-batched-tokens", "4096")
_ENGINE_ENV = {
    "VLLM_BLASST_MIN_CONTEXT": "64",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "PYTHONSAFEPATH": "1",
}


class Deployment:
    """The two services on one state folder, and the recorder's lines."""

    def __init__(self, model: Path, folder: Path, options: Sequence[str]) -> None:
        """folder: empty. options: of `vllm serve`. Raises TimeoutError without a sidecar."""
        self.state, self.records = folder / "state", folder / "records"
        self.state.mkdir(mode=0o700)
        self.control_port, self.port = processes.free_port(), processes.free_port()
        self.sidecar = processes.sidecar(self.state, self.control_port, folder / "sidecar.log")
        try:
            self.sidecar.wait_ready(START_S)
            env = {**_ENGINE_ENV, "VLLM_BLASST_STATE_DIR": str(self.state)}
            env |= recorder.environment(self.records, folder / "site")
            options = (*_ENGINE_OPTIONS, *options)
            log = folder / "engine.log"
            self.engine = processes.engine(model, self.port, env, log, options)
        except BaseException:
            self.sidecar.stop()
            raise

    def faults(self) -> list[str]:
        """Processes that ended although nobody killed them."""
        unasked = self.engine.ended_unasked + self.sidecar.ended_unasked
        return [f"processes ended {unasked} times that nobody killed"] if unasked else []

    def stop(self) -> None:
        """End both services, the engine first."""
        self.engine.stop()
        self.sidecar.stop()
