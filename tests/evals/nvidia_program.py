"""NVIDIA's own programs of the package nvidia-long-context-eval, run as they are.

`PACKAGE_FOLDER OUT TOKENIZER COUNT WORDS TASK:LENGTH...` makes samples; `PACKAGE_FOLDER predict
DATA OUT URL MODEL TASK...` asks a server; `PACKAGE_FOLDER evaluate OUT` scores its answers.
Stand-ins replace what is not there: NLTK (our cut, as test_official.py), scipy, tenacity, pandas.
"""

from __future__ import annotations

import importlib.util
import io
import runpy
import sys
import types
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any


def zeta(alpha: float) -> float:
    """Euler and Maclaurin: the sum of k^-alpha."""
    n = 1000
    head = sum(k**-alpha for k in range(n - 1, 0, -1))
    tail = n ** (1 - alpha) / (alpha - 1) + n**-alpha / 2 + alpha * n ** (-alpha - 1) / 12
    return head + tail


def module(name: str, **contents: Any) -> None:
    made = types.ModuleType(name)
    vars(made).update(contents)
    sys.modules[name] = made


def stand_ins(words: int) -> None:
    import wonderwords.random_word as source
    from transformers import AutoTokenizer  # before a stand-in for scipy makes it look for more

    assert AutoTokenizer

    def decorator(*args: Any, **kwargs: Any) -> Any:
        return lambda function: function

    if importlib.util.find_spec("nltk") is None:
        from blasst.evals.official.sentences import cut

        module("nltk")
        module("nltk.tokenize", sent_tokenize=cut)
    module("scipy")
    module("scipy.special", zeta=zeta)
    names = ("stop_after_attempt", "wait_fixed", "wait_random")
    module("tenacity", retry=decorator, **dict.fromkeys(names, lambda *a: 0))
    if words:
        read = source._get_words_from_text_file
        source._get_words_from_text_file = lambda name: read(name)[:words]


class Frame:
    """pandas.DataFrame, as far as the evaluation prints one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getitem__(self, name: Any) -> Frame:
        return self

    def reset_index(self, **kwargs: Any) -> Frame:
        return self

    def to_csv(self, *args: Any, **kwargs: Any) -> None: ...


def predict(package: Path, data: str, out: str, url: str, model: str, *names: str) -> None:
    """TASK.jsonl with the answers of a server that speaks OpenAI's completions."""

    def decorator(*args: Any, **kwargs: Any) -> Any:
        return lambda function: function

    waits = ("stop_after_attempt", "wait_random_exponential", "wait_exponential")
    module("tenacity", retry=decorator, **dict.fromkeys(waits, lambda *a, **k: 0))
    script = package / "long_context_eval" / "pred" / "call_api.py"
    sys.path[:0] = [str(script.parent)]
    for name in names:
        argv = [script.name, "--data_dir", data, "--save_dir", out, "--task", name]
        argv += ["--server_type", "generic_oai_server", "--generic_oai_server_mode", "completion"]
        argv += ["--generic_oai_server_url", url, "--model_name_or_path", model]
        sys.argv = [*argv, "--temperature", "0", "--threads", "1"]
        runpy.run_path(str(script), run_name="__main__")


def evaluate(package: Path, predictions: str) -> None:
    """Writes per_sample_scores.json beside the predictions."""
    found = types.SimpleNamespace(find=lambda name: name)
    module("nltk", data=found)
    module("pandas", DataFrame=Frame, concat=lambda frames: frames[0])
    script = package / "long_context_eval" / "eval" / "evaluate.py"
    sys.path[:0] = [str(package), str(script.parent)]
    sys.argv = [script.name, "--data_dir", predictions]
    runpy.run_path(str(script), run_name="__main__")


def main() -> None:
    if sys.argv[2] == "predict":
        predict(Path(sys.argv[1]), *sys.argv[3:])
        return
    if sys.argv[2] == "evaluate":
        evaluate(Path(sys.argv[1]), sys.argv[3])
        return
    package, out, tokenizer, count, words = Path(sys.argv[1]), *sys.argv[2:6]
    wanted = [spec.split(":") for spec in sys.argv[6:]]
    stand_ins(int(words))
    folder = package / "long_context_eval"
    sys.path[:0] = [str(package), str(folder / "data" / "synthetic"), str(folder / "data")]
    import yaml
    from long_context_eval.data.synthetic.constants import TASKS

    plans = yaml.safe_load((folder / "synthetic.yaml").read_text())
    for task, length in wanted:
        plan = plans[task]
        base = TASKS[plan["task"]]
        argv = [f"{plan['task']}.py", "--save_dir", f"{out}/{length}", "--save_name", task]
        argv += ["--tokenizer_type", "hf", "--tokenizer_path", tokenizer]
        argv += ["--max_seq_length", length, "--num_samples", count, "--random_seed", "42"]
        argv += ["--tokens_to_generate", str(base["tokens_to_generate"])]
        argv += ["--template", base["template"] + base["answer_prefix"]]
        for name, value in plan["args"].items():
            argv += [f"--{name}", str(value)]
        sys.argv = argv
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            runpy.run_path(str(folder / "data" / "synthetic" / argv[0]), run_name="__main__")


if __name__ == "__main__":
    main()
