"""Models whose layers cannot skip: they run dense with the reason, thresholds are refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ |= {"VLLM_BLASST_MIN_CONTEXT": "0", "VLLM_BLASST_STATS_INTERVAL_S": "0.1"}

from common import drop, engine, finish, outputs, pages, params, prompts


def attempt(folder: str, **options: Any) -> dict[str, Any]:
    """Start, answer one dense request, send one with a threshold."""
    report: dict[str, Any] = {}
    try:
        llm = engine(model=folder, load_format="dummy", **options)
    except Exception as e:
        return {"start": f"{type(e).__name__}: {e}"}
    given = prompts([200])
    report["tokens"] = len(outputs(llm, given, params(3))[0].outputs[0].token_ids)
    try:
        outputs(llm, given, params(3, blasst_mag=2500))
        report["threshold"] = "admitted"
    except ValueError as e:
        report["threshold"] = str(e)
    newest = max(pages("rank"), key=lambda p: os.path.getmtime(stats(p["name"])), default=None)
    report["page"] = newest and {
        "labels": newest["labels"],
        "vote": newest["prefill_tokens_vote"][0],
    }
    drop(llm)
    return report


def stats(name: str) -> Path:
    from blasst.plugin.settings import Settings

    folder = Settings.from_env().stats_dir
    assert folder is not None
    return folder / name


def main() -> None:
    folders = json.loads(os.environ["MODELS"])
    result = {name: attempt(folder) for name, folder in folders.items()}
    os.environ["VLLM_BLASST_STRICT"] = "1"
    result |= {f"{name} strict": attempt(folder) for name, folder in folders.items()}
    finish({"models": result})


if __name__ == "__main__":
    main()
