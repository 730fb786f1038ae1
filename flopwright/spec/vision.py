"""A model's vision tower: what it takes in place of text, priced and not trained."""

from __future__ import annotations

from pydantic import PositiveInt

from flopwright.spec.attention import Size
from flopwright.spec.base import Spec


class VisionTower(Spec):
    """A transformer over patches of images, and the projector into the text model's width.

    Attributes:
        qkv_size: width of all heads' queries, keys or values together.
        position_table: learned positions are a table of so many rows and columns of patches;
            those of frames are fixed and have no weights.
        merge: neighbouring patches, in each direction, that become one token of the text model.
    """

    num_layers: PositiveInt
    hidden_size: Size
    num_heads: Size
    qkv_size: Size
    intermediate_size: Size
    patch_size: PositiveInt = 14
    channels: PositiveInt = 3
    position_table: PositiveInt = 64
    merge: PositiveInt = 2

    @property
    def merged_size(self) -> int:
        """Width of a token's patches side by side."""
        return self.merge**2 * self.hidden_size

    @property
    def patch_values(self) -> int:
        """Numbers of one patch."""
        return self.channels * self.patch_size**2
