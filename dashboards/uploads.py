"""Uploads are data: limited in size, parsed by the strict loaders, never a path, never run."""

from __future__ import annotations

import json
from typing import Any

from flopwright.errors import InputError, Violation
from flopwright.models.hf.config import import_config
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.load import GPU_CATALOG, catalog_names, load_gpu, scenario_from_text
from flopwright.spec.scenario import Scenario
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import MAX_FILE_BYTES, parse_yaml


def text_of(name: str, content: bytes) -> str:
    """Returns the text of an upload.

    Raises:
        InputError: it is too large, or no UTF-8 text.
    """
    if len(content) > MAX_FILE_BYTES:
        raise InputError(
            Violation(file=name, rule="the file is too large", limit=f"{MAX_FILE_BYTES} bytes")
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(Violation(file=name, rule="the file is not UTF-8 text")) from error


def uploaded_scenario(name: str, content: bytes) -> Scenario:
    """Returns an uploaded scenario; it may refer to the catalogs, never to a file here.

    Raises:
        InputError: every violation of the file.
    """
    return scenario_from_text(text_of(name, content), name)


def uploaded_model(name: str, content: bytes) -> dict[str, Any]:
    """Returns the model of a Hugging Face config.json as data.

    Raises:
        InputError: broken JSON, an unknown architecture, or what no model here can say.
    """
    text = text_of(name, content)
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(Violation(file=name, rule=f"the file is not JSON: {error}")) from error
    if not isinstance(config, dict):
        raise InputError(Violation(file=name, rule="a config.json is an object"))
    return import_config(config).spec.to_data()


def uploaded_cluster(name: str, content: bytes) -> dict[str, Any]:
    """Returns a cluster file as data; its GPU may be a name of the catalog.

    Raises:
        InputError: every violation of the file.
    """
    document = parse_yaml(text_of(name, content), name)
    node = document.data.get("node") if isinstance(document.data, dict) else None
    gpu = node.get("gpu") if isinstance(node, dict) else None
    if isinstance(node, dict) and isinstance(gpu, str):
        if gpu not in catalog_names(GPU_CATALOG):
            raise InputError(
                Violation(
                    file=name,
                    line=document.line_of(("node", "gpu")),
                    field="node.gpu",
                    value=repr(gpu),
                    rule="an uploaded cluster names a GPU of the catalog, or gives it in place",
                    nearest_fix=", ".join(catalog_names(GPU_CATALOG)[:5]) + ", ...",
                )
            )
        node["gpu"] = load_gpu(gpu).to_data()
    return validate(ClusterSpec, document).to_data()
