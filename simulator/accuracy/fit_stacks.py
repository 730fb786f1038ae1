"""Software stacks as the fit found them: from levels in a file to a calibration of one run.

`simulator/hardware/stacks/levels.yaml` holds every fitted scalar by the level it belongs to
(a kernel class, a processor, a framework, a stack). A stack that the file does not know gets
what its framework is known by, an unknown framework what its family of models is known by,
each with the wider interval that goes with knowing less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

import flopwright
from flopwright.ops import Array
from flopwright.simulator.accuracy.fit_levels import SCATTER, LevelFit, linked
from flopwright.simulator.accuracy.fit_step import COMMS, HOSTS, KERNELS, SLOT
from flopwright.simulator.accuracy.fit_terms import TERMS, base_scalars, fit_labels
from flopwright.simulator.accuracy.stack_of_row import StackKey
from flopwright.simulator.calibration.files import default_calibration, with_stack
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.base import Spec
from flopwright.spec.cluster import GpuSpec
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml

STACKS: Final = Path(flopwright.__file__).parent / "simulator" / "hardware" / "stacks"
LEVELS: Final = STACKS / "levels.yaml"
TRAITS: Final = STACKS / "traits.yaml"
UNSEEN: Final = "unseen"
# Central 80 % of a normal distribution lie within so many standard deviations.
Z80: Final = 1.2815515655446004


class StackTraits(Spec):
    """What a framework is built like, read off its documentation and never fitted.

    Attributes:
        attention_kernel: "unfused" before fused attention.
        pad_vocab_to: a rank's part of the vocabulary is padded to a multiple of this.
    """

    attention_kernel: Literal["flash", "unfused"] = "flash"
    pad_vocab_to: int = Field(default=1, ge=1)
    source: str = ""


class StackLevels(Spec):
    """The fitted scalars.

    Attributes:
        residual_log: scatter of log(measured / predicted) inside a stack.
        terms: fitted terms by level and label, in logarithms (logits of hidden shares).
        spread_log: scatter that goes with a stack, its terms' uncertainty included, by label;
            "unseen" is a stack that the file does not know.
        constant_mfu: baseline: model FLOP/s over the peak, by "processor precision".
    """

    id: str
    created: str
    source: str
    residual_log: PositiveFloat
    terms: dict[str, dict[str, float]]
    spread_log: dict[str, NonNegativeFloat]
    constant_mfu: dict[str, PositiveFloat] = Field(default_factory=dict)

    def free_parameters(self) -> int:
        """Returns how many scalars were fitted."""
        return sum(len(labels) for labels in self.terms.values())

    def by_level(self) -> dict[str, int]:
        """Returns how many scalars were fitted, by level."""
        return {level: len(labels) for level, labels in self.terms.items()}


@cache
def shipped_levels() -> StackLevels:
    """Returns the committed levels."""
    return validate(StackLevels, read_yaml(LEVELS))


@cache
def shipped_traits() -> Mapping[str, StackTraits]:
    """Returns the traits by "framework-era", by "framework", and "other" for any other."""
    data = read_yaml(TRAITS).data
    return {str(name): StackTraits.model_validate(entry) for name, entry in data.items()}


def traits_of(stack: StackKey) -> StackTraits:
    """Returns the traits of a stack, or of its framework, or of any."""
    known = shipped_traits()
    for name in (f"{stack.framework}-{stack.era}", stack.framework, "other"):
        if name in known:
            return known[name]
    return StackTraits()


_priors: dict[str, Calibration] = {}


def _prior(gpu: GpuSpec) -> Calibration:
    """Returns the GPU's prior; reading its file once is enough for a thousand runs."""
    key = gpu.content_hash()
    if key not in _priors:
        _priors[key] = default_calibration(gpu)
    return _priors[key]


def unit_calibration(stack: StackKey, gpu: GpuSpec) -> Calibration:
    """Returns the GPU's prior with all factors 1, nothing hidden and no host: what fits scale."""
    traits = traits_of(stack)
    return _prior(gpu).model_copy(
        update={
            "factors": {},
            "kernel_factors": {},
            "hidden_share": {},
            "layer_host_s": {},
            "step_constant_s": 0.0,
            "data_parallel_latency_s": 0.0,
            "attention_kernel": traits.attention_kernel,
            "pad_vocab_to": traits.pad_vocab_to,
            "graphs": stack.graphs,
        }
    )


def stack_calibration(
    stack: StackKey,
    gpu: GpuSpec,
    recipe: str = "same",
    levels: StackLevels | None = None,
    labels: Mapping[str, str] | None = None,
) -> Calibration:
    """Returns the calibration that predicts runs of a stack on a processor.

    Args:
        recipe: `workload.precision.gemm`, whose kernels have a term of their own.
        levels: fitted scalars; None takes the committed ones.
        labels: what terms tell runs apart by; None takes fit_terms.fit_labels.
    """
    known = levels or shipped_levels()
    labels = labels or fit_labels(stack, gpu, recipe)
    raw = base_scalars()
    for term in TERMS:
        label = labels[term.by] if term.by else "all"
        value = known.terms.get(term.level, {}).get(label, 0.0)
        for slot in term.slots:
            raw[SLOT[slot]] += value
    spread = known.spread_log.get(labels["stack"], known.spread_log[UNSEEN])
    return overlaid(stack, gpu, linked(raw), spread)


def overlaid(
    stack: StackKey,
    gpu: GpuSpec,
    values: Array,
    spread_log: float,
    unit: Calibration | None = None,
) -> Calibration:
    """Returns the GPU's prior under a stack with these scalars (fit_step.SLOTS).

    Args:
        unit: what they scale; None is the stack at factors of 1.
    """

    def value(slot: str) -> float:
        return float(values[SLOT[slot]])

    hidden = {c: value(f"hide {c}") for c in (*COMMS, "dp_comm")}
    factors = {c: value(f"x {c}") for c in (*COMMS, "pp_comm", "dp_comm") if c != "dp_micro"}
    over = Calibration(
        id=stack.label(),
        created="",
        source="software stack fitted to published runs",
        kernel_factors={k: value(f"x {k}") for k in KERNELS},
        factors={**factors, "optimizer": value("x optimizer"), "offload": value("x offload")},
        hidden_share={**hidden, "dp_gather": hidden["dp_comm"]},
        layer_host_s={h: value(f"s host {h}") for h in HOSTS},
        step_constant_s=value("s constant"),
        data_parallel_latency_s=value("s dp_rank"),
        step_residual_log=spread_log,
    )
    return with_stack(unit or unit_calibration(stack, gpu), over)


def levels_of(fit: LevelFit, spread_log: Mapping[str, float], created: str) -> StackLevels:
    """Returns a fit's scalars as they are written; terms that no run decided are left out."""
    decided = fit.decided()
    terms: dict[str, dict[str, float]] = {}
    for name, value, told in zip(fit.design.names, fit.posterior.theta, decided, strict=True):
        if not told:
            continue
        level, label = name.split("|", 1)
        terms.setdefault(level, {})[label or "all"] = round(float(value), 5)
    return StackLevels(
        id="published-runs",
        created=created,
        source="published training runs",
        residual_log=SCATTER,
        terms=terms,
        spread_log={k: round(v, 4) for k, v in spread_log.items()},
    )


def interval80(seconds: float, log_std: float) -> tuple[float, float]:
    """Returns the central 80 % interval of a step time."""
    spread = math.exp(Z80 * log_std)
    return seconds / spread, seconds * spread
