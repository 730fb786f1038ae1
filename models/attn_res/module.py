"""Attention residuals (arXiv 2607.24653, equations 8 to 10): a mixture over depth, and a norm.

Sources of a site are the embedding, the sums of the finished blocks and the running sum of
the block that the site is in.
"""

from __future__ import annotations

from torch import Tensor, nn

from flopwright.kernels.attn_res.op import attn_res
from flopwright.models.norm.module import RmsNorm
from flopwright.models.projection.module import Projection
from flopwright.models.saving import region


def mixed_and_normed(
    sources: tuple[Tensor, ...], query: Projection, norm: RmsNorm, behind: nn.Module
) -> Tensor:
    """Returns behind(sum_i a_i v_i) of a site; both are of recompute group "norm".

    Args:
        sources: v_i, each [B, S', hidden]; query: one row; norm: of the sources.
        behind: the norm of the sub-layer that reads the mixture.
    """

    def run(*parts: Tensor) -> Tensor:
        mixed = attn_res(list(parts), query.weight, norm.weight, norm.eps)
        out: Tensor = behind(mixed)
        return out

    return region("norm", run, *sources)
