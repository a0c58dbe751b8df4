"""Registration in a process without an engine: what it adds, costs and leaves alone."""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common import finish


def main() -> None:
    from vllm.platforms import current_platform as platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Enum

    start = time.perf_counter()
    from blasst.plugin import register

    register()
    seconds = time.perf_counter() - start
    register()
    from vllm.config.attention import AttentionConfig

    plain = SimpleNamespace(use_mla=False, use_sparse=False, kv_cache_dtype="auto")
    ours = Enum["BLASST"]
    finish(
        {
            "seconds": seconds,
            "alias": ours is Enum.CUSTOM,
            "pickled": pickle.loads(pickle.dumps(ours)) is Enum.CUSTOM,
            "parsed": AttentionConfig(backend="blasst").backend is Enum.CUSTOM,
            "class": ours.get_class().get_name(),
            "selections": [
                platform.get_attn_backend_cls(chosen, plain).rsplit(".", 1)[1]
                for chosen in (None, Enum.CPU_ATTN, ours)
            ],
            "forked": forked(Enum, register),
            "names": names_known(),
        }
    )


def forked(enum: Any, register: Any) -> bool:
    """In a forked child: no front end of its own yet, and registration holds."""
    from blasst.plugin import front_hooks
    from blasst.plugin.front_end import FrontEnd
    from blasst.plugin.settings import Settings

    front = FrontEnd(Settings(), "tiny", "0.32.0", None)
    front_hooks._current = (os.getpid(), front)
    assert front_hooks.current() is front
    child = os.fork()
    if child == 0:
        register()
        fine = front_hooks.current() is None and enum["BLASST"] is enum.CUSTOM
        os._exit(0 if fine else 1)
    status = os.waitpid(child, 0)[1]
    front.close()
    return status == 0


def names_known() -> list[bool]:
    """Before, while and after vLLM checks its environment variables."""
    from vllm import envs

    from blasst.plugin.settings import NAMES
    from blasst.plugin.startup import known_to_vllm

    def known() -> bool:
        return any(name in envs.environment_variables for name in NAMES)

    seen = [known()]
    with known_to_vllm():
        seen.append(all(name in envs.environment_variables for name in NAMES))
    return [*seen, known()]


if __name__ == "__main__":
    main()
