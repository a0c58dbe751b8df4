"""The comparison with a recording, without the GPU that would record it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from blasst.kernels.verify import calibrate
from blasst.kernels.verify.errors import VerifyError
from blasst.kernels.verify.subject import Workbench
from blasst.kernels.verify.subjects import hopper


def test_compare_measures_in_the_last_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    monkeypatch.setattr(calibrate, "PROBLEMS", {"vote": calibrate.PROBLEMS["vote"]})
    config, shape = calibrate.PROBLEMS["vote"]
    case = hopper.case(config, shape)
    assert Workbench(hopper.subject(config)).run(case, seed=9).ok
    kept = {f"vote/{name}": calibrate._numbers(t) for name, t in case.outputs.items()}
    kept["vote/inputs"] = np.array(calibrate._digest(case))
    np.savez(tmp_path / "same.npz", **kept)
    agreements = calibrate.compare(tmp_path / "same.npz")
    assert [(a.different, a.largest) for a in agreements] == [(0.0, 0.0)] * 3
    assert calibrate.main(["compare", str(tmp_path / "same.npz")]) == 0
    kept["vote/out"] = kept["vote/out"].copy()
    value = torch.tensor(kept["vote/out"][0, 0, 0]).bfloat16()
    bits = value.view(torch.int16) + 3
    kept["vote/out"][0, 0, 0] = float(bits.view(torch.bfloat16))
    np.savez(tmp_path / "off.npz", **kept)
    (out,) = [a for a in calibrate.compare(tmp_path / "off.npz") if a.output == "out"]
    assert 1.5 <= out.largest <= 6.0
    assert calibrate.main(["compare", str(tmp_path / "off.npz")]) == 1
    kept["vote/inputs"] = np.array("other")
    np.savez(tmp_path / "other.npz", **kept)
    with pytest.raises(VerifyError, match="other inputs"):
        calibrate.compare(tmp_path / "other.npz")
