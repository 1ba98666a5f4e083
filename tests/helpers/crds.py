"""Validation against the projects' own CustomResourceDefinitions, where they are beside this checkout."""

from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[3] / "shared" / "crds"


def validate(document, definition_file):
    """Checks an object as strict field validation does; skips the test where the definition is not at hand."""
    path = FOLDER / definition_file
    if not path.exists():
        pytest.skip(f"{definition_file} is not beside this checkout")
    import jsonschema

    definition = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]
    group, version = document["apiVersion"].split("/")
    assert (group, document["kind"]) == (definition["group"], definition["names"]["kind"])
    schema = next(v for v in definition["versions"] if v["name"] == version)["schema"]["openAPIV3Schema"]
    # The API server has checked the definition itself: with a RayJob's, that alone would take half a minute.
    jsonschema.Draft202012Validator(forbid_unknown(schema)).validate(document)


def forbid_unknown(schema):
    """The schema as strict field validation reads it: a key that it does not name is an error."""
    if not isinstance(schema, dict):
        return schema
    strict = {key: forbid_unknown(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        strict["properties"] = {name: forbid_unknown(part) for name, part in schema["properties"].items()}
        strict.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
    return strict
