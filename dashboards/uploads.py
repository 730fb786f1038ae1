"""Uploads are data: limited in size, parsed by the strict loaders, never a path, never run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.models.hf.config import import_config
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.load import GPU_CATALOG, catalog_names, load_gpu, scenario_from_text
from flopwright.spec.loop import LoopScenario, loop_from
from flopwright.spec.rollout import RolloutScenario, rollout_scenario_from_text
from flopwright.spec.scenario import Scenario
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import MAX_FILE_BYTES, Document, KeyPath, parse_yaml

# Fields that may name an entry of a catalog.
_REFERENCES: Final = frozenset({"model", "cluster", "gpu", "served"})


def text_of(name: str, content: bytes) -> str:
    """Returns the text of an upload.

    Raises:
        InputError: it is too large or no UTF-8 text.
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
    text = text_of(name, content)
    refused = list(_files_named(parse_yaml(text, name), ()))
    if refused:
        raise InputError(refused)
    return scenario_from_text(text, name)


def uploaded_model(name: str, content: bytes) -> dict[str, Any]:
    """Returns the model of a Hugging Face config.json as data.

    Raises:
        InputError: broken JSON, an unknown architecture, or what no model here can say.
    """
    text = text_of(name, content)
    try:
        config = json.loads(text)
    except RecursionError as error:
        raise InputError(Violation(file=name, rule="the file is nested too deeply")) from error
    except ValueError as error:
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


def uploaded_round(name: str, content: bytes) -> RolloutScenario:
    """Returns an uploaded rollout scenario.

    Raises:
        InputError: every violation of the file.
    """
    return rollout_scenario_from_text(text_of(name, content), name)


def uploaded_loop(name: str, content: bytes) -> LoopScenario:
    """Returns an uploaded loop; it may refer to the catalogs, never to a file here.

    Raises:
        InputError: every violation of the file.
    """
    document = parse_yaml(text_of(name, content), name)
    refused = list(_files_named(document, ()))
    if refused:
        raise InputError(refused)
    return loop_from(document)


def _files_named(document: Document, path: KeyPath) -> Iterator[Violation]:
    """Yields a violation for every reference of the document that would be a file."""
    data = document.data
    for part in path:
        data = data[part]
    if isinstance(data, dict):
        for key in data:
            yield from _files_named(document, (*path, key))
    elif path and path[-1] in _REFERENCES and isinstance(data, str) and is_file_name(data):
        yield Violation(
            file=document.file,
            line=document.line_of(path),
            field=".".join(map(str, path)),
            value=repr(data),
            rule="an uploaded scenario cannot refer to files",
            nearest_fix="give it in place or by catalog name",
        )


def is_file_name(text: str) -> bool:
    """Returns whether a reference would be looked for outside of a catalog."""
    return text.endswith((".yaml", ".yml")) or "/" in text or "\\" in text
