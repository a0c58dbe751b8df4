"""`blasst ruler` doctor, calibrate and preset: what a server reads, and skip rates as presets."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blasst.evals.errors import InputError
from blasst.evals.verb_measure import runners_of, say
from blasst.evals.verb_options import SEED, one_endpoint_of

if TYPE_CHECKING:
    from blasst.evals.calibrate import RatePoint
    from blasst.kernels.exchange.presets import Preset, PresetGeometry


def doctor(args: argparse.Namespace) -> int:
    """0: the server reads prompts as they are sent; 1: it does not."""
    from blasst.evals.client import Completions
    from blasst.evals.fidelity import examine, probe_of
    from blasst.evals.models import smollm2_folder
    from blasst.evals.prompts import PromptEncoder
    from blasst.evals.tasks import Draw, Haystack, tasks

    one_endpoint_of(args)
    encoder = PromptEncoder(args.model or smollm2_folder(say), args.prompt_format)
    draft = tasks()["niah_single_1"].draw(Draw("niah_single_1", 4096, 42, 0, Haystack(())))
    with contextlib.closing(Completions(args.url[0], timeout_s=args.timeout)) as client:
        model = client.model(args.served_model)
        # A prompt that the server takes, also where it is too small for the lengths.
        length = min([*args.lengths, model.max_model_len or max(args.lengths)])
        text = draft.render(max(6, length // 40))
        probe = probe_of(encoder, text.user, text.prefix, max(args.lengths))
        findings = examine(client, model, encoder, probe)
    if args.json:
        print(json.dumps([vars(finding) for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.grade:<6} {finding.check:<16} {finding.words}")
    return int(any(finding.grade == "fault" for finding in findings))


def bench_check(args: argparse.Namespace) -> int:
    """0: both programs agree within 3%; 1: they do not."""
    from blasst.evals.bench_check import compare
    from blasst.evals.client import Completions
    from blasst.evals.models import smollm2_folder
    from blasst.evals.prompts import PromptEncoder
    from blasst.evals.samples import generate
    from blasst.evals.tasks import Haystack

    one_endpoint_of(args)
    folder = args.model or smollm2_folder(say)
    encoder = PromptEncoder(folder, args.prompt_format)
    length, haystack = max(args.lengths), Haystack(())
    # Lines of random keys: two prompts have no more than the template in common.
    samples = list(
        generate(
            "niah_multikey_2", length, args.count, seed=SEED, encoder=encoder, haystack=haystack
        )
    )
    with contextlib.closing(Completions(args.url[0], timeout_s=args.timeout)) as client:
        name = client.model(args.served_model).name
        command = shlex.split(args.vllm_command)
        found = compare(client, name, folder, samples, encoder, command, args.rounds)
    if args.json:
        print(json.dumps({"ours": found.ours, "vllm": found.theirs, "ratio": found.ratio}))
    else:
        print(f"TTFT of {len(samples)} prompts, ours / vllm bench serve: {found.ratio:.4f}")
    return 0 if found.agrees else 1


def calibrate(args: argparse.Namespace) -> int:
    """Write a preset, from a server or from a sweep's results."""
    from blasst.evals import calibrate as program
    from blasst.evals.cells import collect
    from blasst.evals.store import read_results
    from blasst.kernels.exchange.presets import PresetError, PresetGeometry

    if args.target is not None and not 0 < args.target < 1:
        raise InputError(f"--target {args.target:g}: give a skip rate between 0 and 1")
    _check_writable(args.out, args.sparse_config)
    if args.results is not None:
        if args.geometry is None:
            raise InputError("--results needs --geometry, such as hopper:64x128: of that server")
        results = collect(read_results(args.results))
        server = results.plan["server"]
        points = program.points_of(results)
        try:
            geometry = PresetGeometry.parse(args.geometry)
        except PresetError as e:
            raise InputError(str(e)) from e
        if "model" not in server:
            raise InputError(f"{args.results} does not say which model it is of; measure again")
        model, data = str(server["model"]), str(args.results)
        version = str(server.get("vllm_version") or "")
    else:
        model, geometry, points, data, version = _calibrate_server(args)
    preset = program.preset_of(model, geometry, points, data, version)
    if preset.fit.error > program.LOOSE:
        say(
            f"the curve misses skip rates by up to {preset.fit.error:.1%}: lambda * L does not "
            "hold over these lengths; calibrate at those that you serve"
        )
    _write(args.out, preset.dumps())
    if args.sparse_config is not None:
        try:
            body = {"sparse_attention_config": preset.sparse_attention_config(args.target)}
        except PresetError as e:
            raise InputError(f"{args.out} is written, {args.sparse_config} is not: {e}") from e
        _write(args.sparse_config, json.dumps(body, indent=1) + "\n")
    if args.json:
        print(preset.dumps())
    else:
        for p in points:
            print(f"{p.length:>8} tokens  lambda {p.skip_lambda:<10.4g} skip rate {p.rate:.1%}")
        print(
            f"lambda * L = {preset.curve.a:.4g} * exp({preset.curve.b:.4g} * s) for "
            f"{preset.geometry}; skip rates within {preset.fit.error:.1%}: {args.out}"
        )
    return 0


def _calibrate_server(
    args: argparse.Namespace,
) -> tuple[str, PresetGeometry, list[RatePoint], str, str]:
    """(model, geometry, points, data, version of the server)."""
    from blasst.evals import calibrate as program
    from blasst.evals.runner import RunOptions
    from blasst.evals.suite import Suite, make_samples

    one_endpoint_of(args)
    suite = Suite.of(args.tasks, args.lengths, args.count, SEED)
    options = RunOptions(settle_s=args.settle, min_context=args.min_context)
    with contextlib.ExitStack() as stack:
        (runner,) = runners_of(args, _Nowhere(), options, stack)
        runner.check_length(max(args.lengths))
        samples = list(make_samples(suite, args.model, args.prompt_format, say, args.data))
        runner.check_tokenizer(samples[0])
        runner.activate(None, samples[0])
        try:
            found = program.measure(runner, samples, program.query_heads(args.model), say)
        finally:
            runner.restore()
        tasks = ", ".join(suite.tasks)
        data = f"balanced RULER {tasks}, {args.count} samples a length, seed {SEED}"
        return runner.model.name, found.geometry, list(found.points), data, runner.model.version


class _Nowhere:
    """Calibration keeps no records."""

    def __init__(self) -> None:
        self.records: list[dict[str, object]] = []

    def __contains__(self, key: str) -> bool:
        return False

    def append(self, record: dict[str, object]) -> None:
        raise AssertionError("calibration keeps no records")


def preset(args: argparse.Namespace) -> int:
    """Show a preset, or turn it into or out of a checkpoint's sparse_attention_config."""
    from blasst.kernels.exchange.presets import PresetError
    from blasst.kernels.threshold import ThresholdError

    try:
        found = _from_config(args) if args.from_config else _load(args.preset)
        threshold = None if args.target is None else found.threshold(args.target)
        if args.from_config:
            _write(args.preset, found.dumps())
        if args.to_config is not None:
            _to_config(args.to_config, found, args.target)
    except (PresetError, ThresholdError) as e:
        raise InputError(str(e)) from e
    if args.json:
        print(found.dumps() if threshold is None else json.dumps({"scale": threshold.value}))
        return 0
    print(
        f"{found.model} on {found.geometry}: lambda * L = {found.curve.a:.4g} * "
        f"exp({found.curve.b:.4g} * s), skip rates {found.fit.low:.1%} to {found.fit.high:.1%}"
    )
    if threshold is not None:
        print(f"target skip rate {args.target:g}: {threshold}")
    return 0


def _load(path: Path) -> Preset:
    from blasst.kernels.exchange.presets import loads

    return loads(_read(path))


def _from_config(args: argparse.Namespace) -> Preset:
    """A config of others does not say its kernel's geometry or range: the user must know them."""
    from blasst.kernels.exchange.presets import (
        Preset,
        PresetFit,
        PresetGeometry,
        curve_of_config,
        measured_of_config,
    )

    config = _object(args.from_config)
    curve, _ = curve_of_config(config)
    measured = measured_of_config(config)
    geometry = None if args.geometry is None else PresetGeometry.parse(args.geometry)
    if measured is None and geometry is None:
        raise InputError("--from-config needs --geometry, such as hopper:64x128")
    if measured and geometry not in (None, measured[0]):
        raise InputError(
            f"{args.from_config} was calibrated for {measured[0]}, not for --geometry {geometry}: "
            "its skip rates would be others; calibrate on that kernel"
        )
    known = PresetFit(error=0.0, points=2, low=0.01, high=0.95, lengths=(1,))
    found, fit = measured or (geometry, known)
    assert found is not None
    return Preset(
        model=args.model_name or args.from_config.resolve().parent.name,
        geometry=found,
        curve=curve,
        fit=fit,
        data=f"sparse_attention_config of {args.from_config.name}"
        + ("" if measured else ", not measured here"),
    )


def _to_config(path: Path, found: Preset, target: float | None) -> None:
    """Add or replace the section in a config.json; the rest stays as it is."""
    config = _object(path) if path.exists() else {}
    config["sparse_attention_config"] = found.sparse_attention_config(target)
    _write(path, json.dumps(config, indent=2) + "\n")


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path))
    except ValueError as e:
        raise InputError(f"{path} is no JSON: {e}") from e
    if not isinstance(found, dict):
        raise InputError(f"{path} is no JSON object; give a model's config.json")
    return found


def _check_writable(*paths: Path | None) -> None:
    """Before anything is measured for them."""
    for path in paths:
        folder = None if path is None else path.parent
        while folder is not None and not folder.exists():
            folder = folder.parent
        if folder is not None and not os.access(folder, os.W_OK):
            raise InputError(f"{path} cannot be written: {folder} is not writable")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise InputError(f"{path} cannot be read: {e}") from e


def _write(path: Path, text: str) -> None:
    """Complete or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as e:
        raise InputError(f"{path} cannot be written: {e.strerror}") from e
