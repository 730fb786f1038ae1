"""The layers of a transformer: with the usual residual stream, or with attention residuals."""

from __future__ import annotations

from torch import Tensor, nn

from flopwright.models.attn_res.module import mixed_and_normed
from flopwright.models.cache import LayerCache, StateCache
from flopwright.models.documents import Documents, Start
from flopwright.models.moe.module import MixtureOfExperts
from flopwright.models.norm.module import RmsNorm, added_and_normed
from flopwright.models.projection.module import Projection
from flopwright.models.saving import region


class Layer(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self, attention: nn.Module, mlp: nn.Module, norms: tuple[nn.Module, nn.Module]
    ) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = norms[0], attention
        self.post_attention_layernorm, self.mlp = norms[1], mlp

    def forward(
        self, x: Tensor, cache: LayerCache | StateCache | None = None, start: Start = 0
    ) -> Tensor:
        """Returns hidden states like x [batch, seq, hidden].

        Args:
            cache: what attention keeps of the positions before `start`; x's are added.
            start: position of the first state in x, or the documents of its rows.
        """
        attended = self._attended(region("norm", self.input_layernorm, x), cache, start)
        x, normed = added_and_normed(x, attended, self.post_attention_layernorm)
        return x + self._fed_forward(normed)

    def _attended(self, x: Tensor, cache: LayerCache | StateCache | None, start: Start) -> Tensor:
        """Returns attention of x [batch, seq, hidden]; rows of documents are laid end to end."""
        if isinstance(start, Documents):
            out: Tensor = self.self_attn(x.flatten(0, 1).unsqueeze(0), None, start)
            return out.view(x.shape)
        plain: Tensor = self.self_attn(x, cache, start)
        return plain

    def _fed_forward(self, normed: Tensor) -> Tensor:
        block = "moe" if isinstance(self.mlp, MixtureOfExperts) else "mlp"
        out: Tensor = region(block, self.mlp, normed)
        return out


class MixedLayer(Layer):
    """A block that reads mixtures over depth; its states are running sums.

    Attributes:
        begins: whether a new running sum begins here; what came in is then a finished one.
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        norms: tuple[nn.Module, nn.Module],
        sites: tuple[tuple[RmsNorm, Projection], tuple[RmsNorm, Projection]],
        begins: bool,
    ) -> None:
        super().__init__(attention, mlp, norms)
        self.self_attention_res_norm, self.self_attention_res_proj = sites[0]
        self.mlp_res_norm, self.mlp_res_proj = sites[1]
        self.begins = begins

    def forward(
        self,
        x: Tensor,
        cache: LayerCache | StateCache | None = None,
        start: Start = 0,
        *finished: Tensor,
    ) -> Tensor:
        """Returns the running sum behind this layer.

        Args:
            x: the running sum, or embeddings; cache, start: as in `Layer`.
            finished: the embeddings and the sums of the blocks before x's, like x.
        """
        read = mixed_and_normed(
            (*finished, x), self.self_attention_res_proj, self.self_attention_res_norm,
            self.input_layernorm,
        )  # fmt: skip
        attended = self._attended(read, cache, start)
        if self.begins:
            finished, total = (*finished, x), attended
        else:
            total = x + attended
        read = mixed_and_normed(
            (*finished, total), self.mlp_res_proj, self.mlp_res_norm,
            self.post_attention_layernorm,
        )  # fmt: skip
        out: Tensor = total + self._fed_forward(read)
        return out
