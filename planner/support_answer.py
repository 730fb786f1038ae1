"""What `flopwright support` says: curves, stacks, targets, the executor, and published runs."""

from __future__ import annotations

from typing import Literal

from flopwright.planner.support_plan import Runs, Target
from flopwright.spec.base import Spec

Verdict = Literal["tested", "covered", "assumed"]


class Curve(Spec):
    """One efficiency curve of a GPU.

    Attributes:
        points: measured points behind it; held_out_median of |fitted / measured - 1| on shapes
            kept out of the fit, None where there are none.
    """

    kind: str
    dtype: str
    phase: str
    points: int
    held_out_median: float | None = None


class Gpu(Spec):
    """How a GPU is priced.

    Attributes:
        source: where its curves come from.
        own: whether they were measured on it; else they are another GPU's or assumed.
        missing: kernel classes that the model needs and no curve is about.
        factor80: the step time's 80 % interval is this factor either way.
    """

    name: str
    calibration: str
    source: str
    own: bool
    factor80: float
    curves: tuple[Curve, ...] = ()
    missing: tuple[str, ...] = ()


class Stack(Spec):
    """A software stack whose overheads are fitted to public runs; spread80 as factor80."""

    name: str
    spread80: float


class Tested(Spec):
    """A published run that predictions were compared with, and where it can be read."""

    id: str
    model: str
    gpu: str
    gpus: int
    framework: str
    url: str


class Count(Spec):
    """How many of the published runs share a name."""

    name: str
    runs: int


class Support(Spec):
    """The answer; parts that were not asked about are empty.

    Attributes:
        verdict: "tested": published runs share all that was asked; "covered": none does, but
            the GPU has measured curves of its own and the framework a fitted stack for the
            model's kind; else "assumed".
        by_part: published runs that share each part alone.
        tested: those that share all of it.
        models, gpus, frameworks: what there is, with runs of each.
    """

    verdict: Verdict
    answer: str
    model: str | None = None
    gpu: Gpu | None = None
    framework: str | None = None
    stacks: tuple[Stack, ...] = ()
    targets: tuple[Target, ...] = ()
    executor: Runs | None = None
    by_part: tuple[Count, ...] = ()
    tested: tuple[Tested, ...] = ()
    models: tuple[Count, ...] = ()
    gpus: tuple[Count, ...] = ()
    frameworks: tuple[Count, ...] = ()
