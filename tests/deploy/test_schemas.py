"""Compose against the schema of its specification, and the objects that kustomize makes."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from blasst.deploy.drills.processes import Service, free_port

SCHEMA = "check_jsonschema/builtin_schemas/vendor/compose-spec.json"


@pytest.fixture(scope="module")
def compose_spec():
    """The copy that check-jsonschema carries; of that package nothing else is needed."""
    path = importlib.metadata.distribution("check-jsonschema").locate_file(SCHEMA)
    with open(str(path)) as f:
        return jsonschema.Draft202012Validator(json.load(f))


@pytest.mark.parametrize("name", ["compose", "canary"])
def test_compose_is_valid(compose_spec, load, name):
    (compose,) = load(f"compose/{name}.yaml")
    assert [error.message for error in compose_spec.iter_errors(compose)] == []


@pytest.mark.parametrize("misspelt", ["comand", "read_onli"])
def test_a_misspelt_key_of_compose_is_found(compose_spec, load, misspelt):
    """The check can fail."""
    compose = copy.deepcopy(load("compose/compose.yaml")[0])
    compose["services"]["engine"][misspelt] = []
    assert list(compose_spec.iter_errors(compose))


@pytest.fixture
def kustomize(deploy):
    """The objects that `kubectl apply -k` would send for a folder below deploy/kubernetes."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here (its `kustomize` builds the objects)")

    def build(folder):
        command = [kubectl, "kustomize", deploy / "kubernetes" / folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return [d for d in yaml.safe_load_all(done.stdout) if d is not None]

    return build


def test_kustomize_makes_the_objects_of_the_base(kustomize, load):
    made = kustomize("base")
    (kustomization,) = load("kubernetes/base/kustomization.yaml")
    files = kustomization["resources"]
    given = [d for name in files for d in load(f"kubernetes/base/{name}")]

    def names(objects):
        return sorted((d["kind"], d["metadata"]["name"]) for d in objects)

    assert names(made) == names(given)
    for found in made:
        assert found["metadata"]["labels"]["app.kubernetes.io/name"] == "blasst", found["kind"]


def test_the_canary_of_the_overlay_starts(kustomize, deploy, tmp_path):
    """Its objects are valid, and the sidecar takes plan, prompts and key from where they mount."""
    objects = kustomize("examples/canary")
    (deployment,) = (d for d in objects if d["kind"] == "Deployment")
    kubernetes_validate.validate(deployment, "1.37.0", strict=True)
    spec = deployment["spec"]["template"]["spec"]
    (config,) = (d for d in objects if d["metadata"]["name"].startswith("blasst-canary-"))
    volumes = {v["name"]: v for v in spec["volumes"]}
    assert volumes["canary"]["configMap"]["name"] == config["metadata"]["name"]
    etc = tmp_path / "etc"
    secrets = {"tokens/write": "w" * 32, "tokens/read": "r" * 32, "api-key/key": "k" * 32}
    threshold = (d for d in objects if d["metadata"]["name"] == "blasst-threshold")
    files = secrets | {f"threshold/{k}": v for k, v in next(threshold)["data"].items()}
    for name, text in {**files, **{f"canary/{k}": v for k, v in config["data"].items()}}.items():
        (etc / name).parent.mkdir(parents=True, exist_ok=True)
        (etc / name).write_text(text)
        (etc / name).chmod(0o600)
    words = [w.replace("/etc/blasst", str(etc)) for w in spec["initContainers"][0]["args"]]
    words = [w for w in words if not w.startswith("--host")]
    port = free_port()
    command = [Path(sys.executable).with_name("blasst"), "sidecar", "--port", port, *words]
    command += ["--state-dir", tmp_path / "state"]
    probe = f"http://127.0.0.1:{port}/readyz"
    sidecar = Service("sidecar", list(map(str, command)), {}, probe, tmp_path / "log")
    try:
        sidecar.wait_ready(60)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert b"blasst_canary_breached" in answer.read()
    finally:
        sidecar.stop()


def test_ray_worker_groups_have_the_bounds_that_kuberay_requires(load):
    (ray,) = load("kubernetes/examples/rayservice.yaml")
    for group in ray["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
