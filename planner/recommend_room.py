"""Whether memory holds a scenario at all, by the plans that need the least of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flopwright.errors import InputError
from flopwright.planner.ranking import comfortable
from flopwright.planner.recommend_answer import Means
from flopwright.planner.search import price
from flopwright.planner.space import Fixed, legal_candidates
from flopwright.spec.scenario import Scenario

Look = Literal["lightest", "edge", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Whether some plan of a scenario leaves the memory free that the scenario asks for.

    Attributes:
        missing_bytes: what the nearest plan lacks of it; 0 where one fits or none is legal.
        rules: what stands against every plan; "" where some are legal.
    """

    fits: bool
    missing_bytes: int = 0
    rules: str = ""


def room(scenario: Scenario, means: Means, look: Look = "lightest") -> Room:
    """Returns whether a plan fits with the headroom asked for.

    Args:
        look: "lightest" prices only full recompute, micro-batches of one sequence, 1F1B and
            everything in host memory, where the search allows them: those of a layout that
            need the least memory wherever several are alive. "edge" lets schedules and memory
            moves differ, with full recompute or none; "all" prices every plan.
    """
    chosen = scenario if look == "all" else narrowed(scenario, look)
    try:
        candidates = legal_candidates(chosen)
    except InputError as error:
        if chosen != scenario:
            return room(scenario, means, "all")
        return Room(fits=False, rules="; ".join(str(v) for v in error.violations))
    priced = price(chosen, candidates, means.calibration, means.progress)
    if comfortable(priced, chosen).any():
        return Room(fits=True)
    usable = scenario.cluster.node.gpu.hbm_bytes * (1 - scenario.search.memory_headroom)
    return Room(fits=False, missing_bytes=max(0, round(float(priced.peak_bytes.min()) - usable)))


def narrowed(scenario: Scenario, look: Look) -> Scenario:
    """Returns the scenario with a search of its lightest plans: one value an axis where it may.

    An axis whose list the scenario gives without that value keeps its list.
    """
    search, node = scenario.search, scenario.cluster.node
    offload = node.gpu.kind != "cpu" and node.host_link is not None
    wanted: dict[str, tuple[object, ...]] = {
        "recompute": ("full",),
        "micro_batch_size": (1,),
        "schedule": ("1f1b",),
        "vpp": (1,),
        "context_parallel": ("ring",),
        "dp_replicate": (1,),
        "fp8_activations": (False,),
        "activation_offload": (offload,),
        "optimizer_offload": (offload,),
    }
    if look == "edge":
        for name in ("schedule", "vpp", "activation_offload", "optimizer_offload"):
            del wanted[name]
        wanted["recompute"] = ("none", "full")
    update: dict[str, object] = {}
    for name, values in wanted.items():
        own = getattr(search, name)
        kept = tuple(v for v in values if not own or v in own)
        if kept:
            update[name] = kept
    if "recompute" in update:
        update |= {"recompute_tags": (), "recompute_layers": ()}
    return scenario.model_copy(update={"search": search.model_copy(update=update)})


def lacking(scenario: Scenario, means: Means, fixed: Fixed | None = None) -> Room:
    """Returns whether any plan fits, headroom or not, by pricing alone: nothing is replayed.

    Args:
        fixed: fields that every plan must have.
    """
    try:
        candidates = legal_candidates(scenario, fixed)
    except InputError as error:
        return Room(fits=False, rules="; ".join(str(v) for v in error.violations))
    priced = price(scenario, candidates, means.calibration, means.progress)
    if priced.fits.any():
        return Room(fits=True)
    missing = float(priced.peak_bytes.min()) - scenario.cluster.node.gpu.hbm_bytes
    return Room(fits=False, missing_bytes=max(0, round(missing)))
