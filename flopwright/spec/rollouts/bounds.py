"""Bounds beyond any real loop, within which every sum stays finite."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from flopwright.units import Bytes

BoundedBytes = Annotated[Bytes, Field(le=2**60)]
