"""/openapi.json and docs/api.md say all that the sidecar answers."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema

from blasst.server import models


def test_openapi_is_3_1_and_complete(client):
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1.")
    operations = [
        (path, method, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    assert len(operations) == 9
    for path, method, operation in operations:
        assert operation["summary"], (path, method)
        for status, response in operation["responses"].items():
            assert response["description"], (path, method, status)
            if int(status) >= 400:
                content = response["content"]["application/problem+json"]
                assert content["schema"]["$ref"].endswith("/Problem")
        assert operation["description"], (path, method)
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema.get("description") or name == "Problem", name
    refs = set()

    def walk(node):
        if isinstance(node, dict):
            if "$ref" in node:
                refs.add(node["$ref"])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    for ref in refs:
        assert ref.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def test_every_field_says_what_it_is_and_every_answer_has_a_whole_example(client):
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    mute = [
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field, value in schema["properties"].items()
        if not value.get("description")
    ]
    assert mute == []
    for path, item in document["paths"].items():
        for method, operation in item.items():
            ((kind, content),) = operation["responses"]["200"]["content"].items()
            if kind == "text/plain":
                assert content["example"].startswith("# HELP")
                continue
            name = content["schema"]["$ref"].rpartition("/")[2]
            (example,) = schemas[name]["examples"]
            jsonschema.Draft202012Validator({**document, **schemas[name]}).validate(example)
            model = getattr(models, name)
            assert model.model_validate(example).model_dump(by_alias=True) == example, name
            assert method == "get" or path == "/v1/blasst/threshold"


def test_the_documentation_names_every_path_problem_and_metric(client, fake_engine):
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    for path in client.get("/openapi.json").json()["paths"]:
        assert f"`{path}`" in text
    source = Path(__file__).parents[2] / "server"
    kinds = set()
    for file in source.rglob("*.py"):
        kinds |= set(re.findall(r'Problem\(\s*4\d\d,\s*"([a-z-]+)"', file.read_text()))
        kinds |= set(re.findall(r'Problem\(\s*50\d,\s*"([a-z-]+)"', file.read_text()))
    assert len(kinds) > 8
    assert [kind for kind in kinds - {"internal"} if f"`{kind}`" not in text] == []
    engine = fake_engine()
    engine.rank(0)
    engine.front(42)
    engine.requests(0.05, 3000, [0.1])
    names = set(re.findall(r"^# TYPE (\w+)", client.get("/metrics").text, re.M))
    assert [name for name in names if f"`{name}" not in text] == []
