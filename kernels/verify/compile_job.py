"""Runs in a process of its own: builds one Recipe (JSON) and exports its launcher.

python -m blasst.kernels.verify.compile_job RECIPE OBJECT_FILE
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

PROCESSORS = {"sm_90a": 132, "sm_100a": 148}
L2_BYTES = {"sm_90a": 50 << 20, "sm_100a": 126 << 20}


def no_gpu(arch: str, processors: int | None) -> Any:
    """Answers what schedulers ask of a GPU while they are traced."""

    class HardwareInfo:
        def __init__(self, device_id: int = 0) -> None:
            self.device_id = device_id

        def get_device_multiprocessor_count(self) -> int:
            return processors or PROCESSORS[arch]

        def get_max_active_clusters(self, cluster_size: int, stream: Any = None) -> int:
            return (processors or PROCESSORS[arch]) // cluster_size

        def get_l2_cache_size_in_bytes(self) -> int:
            return L2_BYTES[arch]

    return HardwareInfo


def main(recipe: dict[str, Any], object_file: str) -> None:
    warnings.simplefilter("ignore")
    import cutlass.utils

    options = json.loads(recipe["options"])
    cutlass.utils.HardwareInfo = no_gpu(recipe["arch"], options.get("processors"))
    for package, folder in recipe["overlay"]:
        importlib.import_module(package).__path__ = [folder]
    name, function = recipe["builder"].split(":")
    module = importlib.import_module(name)
    compiled = getattr(module, function)(options)
    compiled.export_to_c(object_file_path=object_file, function_name="kernel")
    if hasattr(module, "regions"):
        # (name, first byte, bytes) of places in shared memory
        Path(object_file).with_suffix(".json").write_text(json.dumps(module.regions(options)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
