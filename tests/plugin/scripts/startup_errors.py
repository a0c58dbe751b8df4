"""Bad settings, one after the other: the message of each refused start. No engine ever runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from common import engine, finish

BASE = dict(os.environ)
FOLDER = Path(os.environ["WORK_FOLDER"])


def refused(backend: str = "blasst", model: str | None = None, **env: str) -> str:
    os.environ.clear()
    os.environ.update(BASE | env)
    try:
        engine(backend, load_format="dummy", **({} if model is None else {"model": model}))
    except ValueError as e:
        return f"{type(e).__name__}: {e}"
    return "started"


def small_heads(**env: str) -> str:
    """A model of head_dim 32, which no kernel takes."""
    return refused(model=os.environ["SMALL_HEADS"], **env)


def desired(mag: float) -> str:
    from blasst.kernels.exchange.desired import DesiredState, write_desired
    from blasst.kernels.threshold import SkipThreshold

    folder = FOLDER / "state"
    folder.mkdir()
    write_desired(folder, DesiredState(1, SkipThreshold("mag", mag)))
    return str(folder)


def main() -> None:
    file = FOLDER / "file"
    file.write_text("")
    import vllm

    result = {
        "two units": refused(VLLM_BLASST_MAG="2500", VLLM_BLASST_LAMBDA="0.1"),
        "text": refused(VLLM_BLASST_MAG="much"),
        "nan": refused(VLLM_BLASST_LAMBDA="nan"),
        "huge": refused(VLLM_BLASST_MAG="1e9"),
        "min context": refused(VLLM_BLASST_MIN_CONTEXT="-5"),
        "impl": refused(VLLM_BLASST_IMPL="cuda"),
        "impl cannot": refused(VLLM_BLASST_IMPL="hopper", VLLM_BLASST_STRICT="1"),
        "impl cannot, not strict": refused(VLLM_BLASST_IMPL="hopper"),
        "model cannot, environment": small_heads(VLLM_BLASST_MAG="2500"),
        "model cannot, desired file": small_heads(VLLM_BLASST_STATE_DIR=desired(1500)),
        "strict": refused(VLLM_BLASST_STRICT="yes"),
        "unknown": refused(VLLM_BLASST_MAGG="1"),
        "state missing": refused(VLLM_BLASST_STATE_DIR=str(FOLDER / "none")),
        "state is a file": refused(VLLM_BLASST_STATE_DIR=str(file)),
        "state in proc": refused(VLLM_BLASST_STATE_DIR="/proc/self"),
        "rust": refused(VLLM_USE_RUST_FRONTEND="1"),
    }
    vllm.__version__ = "0.34.1"
    result["version"] = refused()
    vllm.__version__ = "0.25.9"
    result["old version"] = refused()
    result["other backend"] = refused("CPU_ATTN", VLLM_BLASST_MAG="much")
    finish({"refused": result})


if __name__ == "__main__":
    main()
