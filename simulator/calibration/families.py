"""Time classes whose factors are alike: what slows one slows the others."""

from __future__ import annotations

from typing import Final

# Idle has no factor: it follows from the others.
FAMILIES: Final = {
    "forward": "compute",
    "backward": "compute",
    "recompute": "compute",
    "optimizer": "compute",
    "tp_comm": "communication",
    "cp_comm": "communication",
    "ep_comm": "communication",
    "pp_comm": "communication",
    "dp_comm": "communication",
    "offload": "communication",
}
