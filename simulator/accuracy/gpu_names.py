"""Which processor a table's spelling means, and what its nodes are like."""

from __future__ import annotations

import re
from typing import Final

# (pattern on the spelling as `_squeezed` writes it; catalog name).
# The first match counts, so that a longer name stands before the shorter one inside it.
_NAMES: Final[tuple[tuple[str, str], ...]] = (
    (r"tpu", "tpu"),
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"b300", "b300"),
    (r"b200", "b200"),
    (r"gh200", "gh200"),
    (r"h200", "h200_sxm"),
    (r"gracehopper", "gh200"),
    (r"h100.*96g", "h100_96gb_hbm2e"),
    (r"h100.*hbm2e", "h100_96gb_hbm2e"),
    (r"h100.*(pcie|nvl)", "h100_pcie"),
    (r"h100", "h100_sxm"),
    (r"h800", "h800_sxm"),
    (r"h20(?!\d)", "h20"),
    (r"a800.*40g", "a100_sxm_40gb"),
    (r"a800", "a800_sxm_80gb"),
    (r"a100.*pcie", "a100_pcie"),
    (r"a100.*(?<!\d)40g|asr.?v4", "a100_sxm_40gb"),
    (r"p4de|amsr.?a100|a2ultragpu", "a100_sxm_80gb"),
    (r"p4d|a2(high|mega)gpu|nda100", "a100_sxm_40gb"),
    (r"p5en|a3ultragpu", "h200_sxm"),
    (r"(^|aws|x)p5(?!\d)|a3(high|mega)gpu|ndh100", "h100_sxm"),
    (r"p6b200|a4highgpu", "b200"),
    (r"a100", "a100_sxm_80gb"),
    (r"mi355x?", "mi355x"),
    (r"mi325x?", "mi325x"),
    (r"mi300x?(?!a)", "mi300x"),
    (r"l40s", "l40s"),
    (r"(rtx)?4090", "rtx_4090"),
    (r"(rtx)?a6000", "a6000"),
)
OUT_OF_SCOPE: Final = (
    r"tpu", r"^t4", r"teslat4", r"v100", r"p100", r"cpu", r"xeon", r"epyc", r"trainium", r"trn\d",
    r"gaudi", r"ascend", r"910b", r"cerebras", r"ipu", r"mi2[15]0", r"k80",
)  # fmt: skip
AMD: Final = frozenset({"mi300x", "mi325x", "mi355x"})


def canonical_gpu(spelling: str) -> str | None:
    """Returns the catalog name of the processor that a spelling means.

    None if none is known, or if it names several.
    """
    if is_out_of_scope(spelling):
        return None
    parts = re.split(r"/|\+|,|&|\bor\b|\band\b", spelling)
    several = {name for name in map(_name_of, parts) if name is not None}
    return several.pop() if len(several) == 1 else None


def _name_of(spelling: str) -> str | None:
    text = _squeezed(spelling)
    return next((name for pattern, name in _NAMES if re.search(pattern, text)), None)


def is_out_of_scope(spelling: str) -> bool:
    """Returns whether a spelling means a processor that published runs are not judged on."""
    text = _squeezed(spelling)
    return any(re.search(pattern, text) for pattern in OUT_OF_SCOPE)


def _squeezed(spelling: str) -> str:
    """Returns a spelling without separators, but for "|" between two numbers."""
    apart = re.sub(r"(?<=\d)[\s_\-]+(?=\d)", "|", spelling.lower())
    return re.sub(r"[\s_\-]", "", apart)
