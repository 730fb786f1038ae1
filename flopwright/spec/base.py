"""The base of every record that is written in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    model_serializer,
)


class BrokenRulesError(ValueError):
    """Every rule between a record's fields that it breaks; a validator raises it once.

    Attributes:
        texts: one a rule.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__("; ".join(texts))
        self.texts = tuple(texts)


class Spec(BaseModel):
    """A frozen record: unknown keys are refused, names in files carry no unit suffix.

    A field such as `hbm_bytes` is written `hbm: 80 GiB` in a file: in the file the unit
    stands in the value, in the program it stands in the name.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_by_alias=True,
        validate_by_name=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
    )

    def to_data(self) -> dict[str, Any]:
        """Returns the record as plain data (quantities as text), as it stands in a file."""
        data: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return data

    def content_hash(self) -> str:
        """Returns the first 16 hex digits of the sha256 of the record's canonical JSON."""
        text = json.dumps(self.to_data(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Grown(Spec):
    """A record that gained fields: at their defaults they are left out of files and hashes.

    So a file written before a field existed keeps its content hash. A null that stands for
    something else than the default (no rotary embedding) is written.
    """

    later_fields: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in self.later_fields and value == field.default:
                data.pop(name, None)
            elif value is None and field.default is not None:
                data[name] = None
        return data
