"""Containers, Compose and Kubernetes: checked against real schemas, and their commands executed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from blasst.server.change import parse_change

BASE = "kubernetes/base"
EXAMPLES = ("kubernetes/examples/leaderworkerset.yaml", "kubernetes/examples/rayservice.yaml")
CUSTOM = {"ServiceMonitor", "PrometheusRule", "Kustomization", "LeaderWorkerSet", "RayService"}
DOCKERFILES = ("sidecar", "engine-cpu", "engine-gpu")


@pytest.fixture
def resources(load):
    """Every object that `kubectl apply -k` would send."""
    (kustomization,) = load(f"{BASE}/kustomization.yaml")
    return [d for name in kustomization["resources"] for d in load(f"{BASE}/{name}")]


@pytest.fixture
def pods(resources, load):
    """(name, pod spec) of the base and of the examples."""
    found = [
        (r["kind"], r["spec"]["template"]["spec"])
        for r in resources
        if "template" in r.get("spec", {})
    ]
    (lws,), (ray,) = (load(name) for name in EXAMPLES)
    template = lws["spec"]["leaderWorkerTemplate"]
    found += [(f"lws {k}", template[k]["spec"]) for k in ("leaderTemplate", "workerTemplate")]
    cluster = ray["spec"]["rayClusterConfig"]
    found += [
        ("ray head", cluster["headGroupSpec"]["template"]["spec"]),
        ("ray worker", cluster["workerGroupSpecs"][0]["template"]["spec"]),
    ]
    return found


def containers(spec):
    return [*spec.get("initContainers", ()), *spec["containers"]]


def test_every_file_of_the_base_is_listed(deploy, load):
    (kustomization,) = load(f"{BASE}/kustomization.yaml")
    there = {p.name for p in (deploy / BASE).iterdir()} - {"kustomization.yaml"}
    assert there == set(kustomization["resources"])


@pytest.mark.parametrize("version", ["1.29.0", "1.37.0"])
def test_resources_are_valid_in_the_oldest_and_newest_kubernetes(resources, version):
    checked = [r["kind"] for r in resources if r["kind"] not in CUSTOM]
    for resource in resources:
        if resource["kind"] not in CUSTOM:
            kubernetes_validate.validate(resource, version, strict=True)
    assert sorted(set(checked)) == [
        "ConfigMap",
        "Deployment",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
    ]


def test_a_misspelt_field_is_found(resources):
    """The check can fail."""
    (deployment,) = (r for r in resources if r["kind"] == "Deployment")
    broken = json.loads(json.dumps(deployment))
    broken["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.37.0", strict=True)


def test_pods_of_the_examples_are_valid(pods):
    for name, spec in pods:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        try:
            kubernetes_validate.validate(pod, "1.37.0", strict=True)
        except kubernetes_validate.ValidationError as e:
            pytest.fail(f"{name}: {e}")


def test_selectors_ports_and_volumes_meet(resources):
    (deployment,) = (r for r in resources if r["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    ports = {p["name"] for c in containers(template["spec"]) for p in c["ports"]}
    services = [r for r in resources if r["kind"] == "Service"]
    served = {p["name"] for s in services for p in s["spec"]["ports"]}
    assert {p["targetPort"] for s in services for p in s["spec"]["ports"]} == ports
    (monitor,) = (r for r in resources if r["kind"] == "ServiceMonitor")
    assert {e["port"] for e in monitor["spec"]["endpoints"]} == served
    for resource in resources:
        spec = resource.get("spec", {})
        if resource["kind"] == "Service":
            assert spec["selector"].items() <= labels
            assert monitor["spec"]["selector"]["matchLabels"].items() <= (
                resource["metadata"]["labels"].items()
            )
        for selector in (spec.get("selector"), spec.get("podSelector")):
            if selector and "matchLabels" in selector and resource["kind"] != "ServiceMonitor":
                assert selector["matchLabels"].items() <= labels, resource["kind"]


def test_volumes_exist_and_nothing_is_mounted_by_sub_path(pods):
    for name, spec in pods:
        volumes = {v["name"] for v in spec.get("volumes", ())}
        mounted = {m["name"] for c in containers(spec) for m in c.get("volumeMounts", ())}
        assert mounted == volumes, name
        for mount in (m for c in containers(spec) for m in c.get("volumeMounts", ())):
            # A file that is mounted alone is never refreshed (kubernetes#50345).
            assert not {"subPath", "subPathExpr"} & mount.keys(), name


def test_pods_have_no_rights_that_they_do_not_need(pods):
    for name, spec in pods:
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] == context["fsGroup"] == 10001, name
    for container in containers(pods[0][1]):
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
    assert pods[0][1]["automountServiceAccountToken"] is False


def test_sidecars_are_native_and_share_the_engines_folder(pods):
    seen = 0
    for name, spec in pods:
        for sidecar in spec.get("initContainers", ()):
            seen += 1
            assert sidecar["restartPolicy"] == "Always", name
            state = {m["mountPath"] for m in sidecar["volumeMounts"] if m["name"] == "state"}
            engine = spec["containers"][0]
            env = {e["name"]: e.get("value") for e in engine["env"]}
            assert {env["VLLM_BLASST_STATE_DIR"]} == state, name
            assert "--token-file=/etc/blasst/tokens/write" in sidecar["args"]
    assert seen == 4


def test_environments_are_ours_by_name_and_never_of_development(pods, deploy, load):
    names = set()
    for _, spec in pods:
        for container in containers(spec):
            given = {e["name"]: e.get("value") for e in container["env"]}
            assert given["PYTHONSAFEPATH"] == "1", container["name"]
            names |= given.keys()
    compose = load("compose/compose.yaml")[0]
    for name in ("engine", "sidecar"):
        given = compose["services"][name]["environment"]
        assert given["PYTHONSAFEPATH"] == "1"
        names |= given.keys()
    # Ray hands on only names that begin with VLLM_.
    assert [n for n in names if "BLASST" in n and not n.startswith("VLLM_BLASST_")] == []
    known = set(
        re.findall(r"`(VLLM_BLASST_\w+)`", (deploy.parent / "docs/settings.md").read_text())
    )
    assert {n for n in names if n.startswith("VLLM_BLASST_")} <= known
    for path in deploy.rglob("*"):
        if path.is_file() and path.suffix != ".py":
            text = path.read_text(errors="replace")
            assert "DEV_MODE" not in text, path
            assert "INSECURE" not in text, path
            assert not re.search(r"^\s*\S*password: *\"?(?!\$\{)\w", text, re.I | re.M), path


def test_the_configmap_holds_a_threshold_that_is_accepted(resources):
    (config,) = (r for r in resources if r["kind"] == "ConfigMap")
    ((name, text),) = config["data"].items()
    change, threshold = parse_change(text.encode(), "application/json")
    assert threshold is not None
    assert change.reason
    (deployment,) = (r for r in resources if r["kind"] == "Deployment")
    sidecar = deployment["spec"]["template"]["spec"]["initContainers"][0]
    assert f"--follow=/etc/blasst/threshold/{name}" in sidecar["args"]


def test_secrets_of_compose_are_all_required(deploy, load):
    text = (deploy / "compose/compose.yaml").read_text()
    for name in re.findall(r"\$\{(\w+)", text):
        if any(word in name for word in ("TOKEN", "KEY", "PASSWORD", "SECRET", "USER")):
            uses = re.findall(rf"\$\{{{name}([^}}]*)\}}", text)
            assert all(use.startswith(":?") for use in uses), name
    assert (
        len(re.findall(r"\$\{(?:VLLM_API_KEY|GRAFANA_PASSWORD|BLASST\w*TOKEN_FILE):\?", text)) == 4
    )
    compose = load("compose/compose.yaml")[0]
    # Docker mounts a tmpfs noexec, where a compiled kernel could not be loaded.
    assert compose["services"]["engine"]["tmpfs"] == ["/tmp:exec"]
    for name, service in compose["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} is open to the network"
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith(".."):
                assert (deploy / "compose" / source).exists(), volume


@pytest.mark.parametrize("image", DOCKERFILES)
def test_dockerfiles_pass_hadolint(program, deploy, image):
    path = deploy / "images" / f"{image}.Dockerfile"
    done = subprocess.run([program("hadolint"), path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("image", DOCKERFILES)
def test_images_run_as_nobody_special_and_copy_what_exists(deploy, image):
    text = (deploy / "images" / f"{image}.Dockerfile").read_text()
    last = text.split("FROM ")[-1]
    assert "USER 10001:10001" in last
    assert "PYTHONSAFEPATH=1" in last
    for path in re.findall(r"\bdeploy/[\w./-]+\.(?:txt|sh)", text):
        assert (deploy.parent / path).exists(), path


def sidecar_commands(entry, pods, load):
    compose = load("compose/compose.yaml")[0]["services"]["sidecar"]
    yield "compose", [*entry("sidecar"), *compose["command"]]
    for name, spec in pods:
        for container in spec.get("initContainers", ()):
            yield name, [*entry("sidecar"), *container["args"]]


def test_the_very_sidecar_commands_start_and_answer(entry, pods, load, tmp_path, resources):
    """Paths of the container become folders here; everything else is as written."""
    (config,) = (r for r in resources if r["kind"] == "ConfigMap")
    roots = {"/state": "state", "/etc/blasst": "etc", "/run/secrets": "secrets"}
    for folder in ("etc/tokens", "etc/threshold", "secrets"):
        (tmp_path / folder).mkdir(parents=True)
    for number, name in enumerate(
        ("etc/tokens/write", "etc/tokens/read", "secrets/write_token", "secrets/read_token")
    ):
        (tmp_path / name).write_text(f"{number}" * 32)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "etc/threshold/threshold.json").write_text(config["data"]["threshold.json"])
    seen = set()
    for where, command in sidecar_commands(entry, pods, load):
        if tuple(command) in seen:
            continue
        seen.add(tuple(command))
        here = [
            re.sub(
                rf"(^|=)({'|'.join(map(re.escape, roots))})",
                lambda m: f"{m[1]}{tmp_path / roots[m[2]]}",
                word,
            )
            for word in command
        ]
        run_sidecar(where, here, tmp_path)
    assert len(seen) >= 3
    state = json.loads((tmp_path / "state/desired.json").read_text())
    assert state["threshold"] == {"unit": "mag", "value": 4500.0}
    assert state["updated_by"] == "file threshold.json"


def run_sidecar(where: str, command: list[str], folder: Path) -> None:
    out, err = folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [Path(sys.executable).with_name(command[0]), *command[1:], "--port", "0"],
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    try:
        deadline = time.monotonic() + 30
        while not (match := re.search(r"http://0\.0\.0\.0:(\d+)", out.read_text())):
            assert process.poll() is None, f"{where}: {err.read_text()}"
            assert time.monotonic() < deadline, where
            time.sleep(0.05)
        for path in ("readyz", "metrics"):
            url = f"http://127.0.0.1:{match[1]}/{path}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.status == 200, where
    finally:
        process.terminate()
        process.wait(10)


def test_the_engines_command_names_options_of_vllm(entry, load, pods):
    """Checked by name against vLLM's own source; starting one is the end-to-end test's."""
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.origin).parent
    files = [folder / "engine" / "arg_utils.py", *(folder / "entrypoints").rglob("cli_args.py")]
    source = "".join(path.read_text() for path in files)
    commands = [
        *entry("engine-cpu"),
        *entry("engine-gpu"),
        *load("compose/compose.yaml")[0]["services"]["engine"]["command"],
        *(
            w
            for _, p in pods
            for c in p["containers"]
            for a in c.get("args", ())
            for w in a.split()
        ),
    ]
    options = {w.partition("=")[0] for w in commands if w.startswith("--")}
    ours = {"--head", "--port", "--address", "--block"}
    assert len(options - ours) >= 5
    for option in options - ours:
        field = option[2:].replace("-", "_")
        assert option in source or re.search(rf"\b{field}\b", source), option


def test_engines_start_with_their_model_and_the_backend(entry, load, pods):
    """vLLM refuses a command whose first word is not the model."""
    assert entry("engine-cpu") == entry("engine-gpu") == ["vllm", "serve"]
    (deployed,) = (c["args"] for c in pods[0][1]["containers"])
    for words in (load("compose/compose.yaml")[0]["services"]["engine"]["command"], deployed):
        text = " ".join(words).replace("=", " ")
        assert text.startswith("/model --attention-backend blasst "), text


def test_documents_parse_without_duplicate_keys(deploy):
    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader, node, deep=False):
        plain = [key.value for key, _ in node.value if key.value != "<<"]
        assert len(plain) == len(set(plain)), f"a key twice in {node.start_mark}"
        loader.flatten_mapping(node)
        return yaml.SafeLoader.construct_mapping(loader, node, deep)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    files = [p for p in deploy.rglob("*") if p.suffix in (".yaml", ".yml")]
    assert len(files) >= 14
    for path in files:
        list(yaml.load_all(path.read_text(), Strict))
