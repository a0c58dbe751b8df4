"""Compose against the schema of its specification, and the objects that kustomize makes."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import shutil
import subprocess

import jsonschema
import pytest
import yaml

SCHEMA = "check_jsonschema/builtin_schemas/vendor/compose-spec.json"


@pytest.fixture(scope="module")
def compose_spec():
    """The copy that check-jsonschema carries; of that package nothing else is needed."""
    path = importlib.metadata.distribution("check-jsonschema").locate_file(SCHEMA)
    with open(str(path)) as f:
        return jsonschema.Draft202012Validator(json.load(f))


def test_compose_is_valid(compose_spec, load):
    (compose,) = load("compose/compose.yaml")
    assert [error.message for error in compose_spec.iter_errors(compose)] == []


@pytest.mark.parametrize("misspelt", ["comand", "read_onli"])
def test_a_misspelt_key_of_compose_is_found(compose_spec, load, misspelt):
    """The check can fail."""
    compose = copy.deepcopy(load("compose/compose.yaml")[0])
    compose["services"]["engine"][misspelt] = []
    assert list(compose_spec.iter_errors(compose))


def test_kustomize_makes_the_objects_of_the_base(deploy, load):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here (its `kustomize` builds the base)")
    base = deploy / "kubernetes" / "base"
    done = subprocess.run([kubectl, "kustomize", base], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    made = [d for d in yaml.safe_load_all(done.stdout) if d is not None]
    (kustomization,) = load("kubernetes/base/kustomization.yaml")
    files = kustomization["resources"]
    given = [d for name in files for d in load(f"kubernetes/base/{name}")]

    def names(objects):
        return sorted((d["kind"], d["metadata"]["name"]) for d in objects)

    assert names(made) == names(given)
    for found in made:
        assert found["metadata"]["labels"]["app.kubernetes.io/name"] == "blasst", found["kind"]


def test_ray_worker_groups_have_the_bounds_that_kuberay_requires(load):
    (ray,) = load("kubernetes/examples/rayservice.yaml")
    for group in ray["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
