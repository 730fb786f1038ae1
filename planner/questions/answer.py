"""What an answer is: words, data, and the plans that were priced to give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field

from flopwright.errors import Violation
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario


class Replan(Spec):
    """One plan, priced for an answer.

    Attributes:
        change: what differs from the plan in question, in words; "as planned" for itself.
        step_time_s: replayed; None where the plan breaks a rule.
        tokens_per_s_per_gpu: None likewise.
        peak_memory_bytes: of the fullest GPU; memory_bytes: its classes; stage: where it is.
        host_memory_bytes: what one node holds of it.
        fits: whether GPU and host memory hold it, without headroom.
        violations: rules of shape that it breaks.
    """

    change: str
    plan: ParallelPlan
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_memory_bytes: int = 0
    memory_bytes: dict[str, int] = Field(default_factory=dict)
    stage: int = 0
    host_memory_bytes: int = 0
    fits: bool = False
    violations: tuple[Violation, ...] = ()

    @property
    def priced_s(self) -> float:
        """The step's seconds of a plan that breaks no rule."""
        assert self.step_time_s is not None, self.violations
        return self.step_time_s

    @property
    def usable(self) -> bool:
        """Whether it is legal and fits."""
        return self.fits and not self.violations


class Answer(Spec):
    """The answer to one question.

    Attributes:
        question: its name in QUESTIONS.
        text: one or two sentences.
        data: the numbers of the text and more, SI units in the names.
        replans: every plan that was priced, the plan in question first.
    """

    question: str
    text: str
    data: dict[str, Any]
    replans: tuple[Replan, ...] = ()


Answering = Callable[[Scenario, ParallelPlan, Calibration], Answer]
