"""What a recommendation says: the answer, every value tried, its plan, what binds, why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from flopwright.errors import InputError
from flopwright.planner.explain import Binding, binding_constraint
from flopwright.planner.result import RankedPlan, SearchResult
from flopwright.planner.search import Progress, search
from flopwright.planner.space import Fixed
from flopwright.planner.whole_run import WholeRun, whole_run
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario

Question = Literal[
    "fewest_gpus", "longest_context", "largest_batch", "largest_model", "compute_optimal"
]


class Attempt(Spec):
    """One value that was tried.

    Attributes:
        value: what was tried (GPUs, tokens, sequences, weights); `tried` says it in words.
        holds: whether it answers the question; `why` says why not, or what was found.
        days, usd: of the whole run, where the value was planned to the end.
        missing_bytes: memory that the nearest plan lacks of one GPU, 0 where one fits.
        narrowed: planned with some fields kept; with all free it may be faster.
    """

    value: float
    tried: str
    holds: bool
    why: str
    days: float | None = None
    usd: float | None = None
    missing_bytes: int = 0
    narrowed: bool = False


class RateAndBatch(Spec):
    """Peak learning rate and batch by one law; `inside` the range that it was fitted over."""

    law: str
    source: str
    learning_rate: float
    batch_tokens: float
    batch_sequences: float
    inside: bool


class VocabularyOption(Spec):
    """A vocabulary size against what it costs.

    Attributes:
        params: of the embedding and the head; share of all weights that touch a token.
        seq_len: tokens of the text that the scenario's context holds with its vocabulary.
        flops_per_text: relative to the scenario's vocabulary, by 6 N D.
        why: "" but for the model's own and the optimal ones.
    """

    vocab_size: int
    params: int
    share: float
    tokens_per_character: float
    seq_len: int
    flops_per_text: float
    why: str = ""


class Optimum(Spec):
    """What a loss law says of a compute budget.

    Attributes:
        params: N, active for a token where the model has experts; tokens: D.
        params_low, params_high: N that lose at most `nats` against the optimum at equal FLOPs.
        sparsity_flops: FLOPs for equal loss relative to sparsity 48; None where not known.
    """

    law: str
    flops: float
    params: float
    tokens: float
    loss: float
    params_low: float
    params_high: float
    nats: float
    planned_params: int
    planned_total_params: int
    sparsity_flops: float | None = None
    rates: tuple[RateAndBatch, ...] = ()
    vocabulary: tuple[VocabularyOption, ...] = ()


class Recommendation(Spec):
    """The answer to one question.

    Attributes:
        answer: in one sentence; value: the number asked for, None where there is none.
        missing: what the nearest value lacks and by how much; "" where something was found.
        scenario: the scenario that the plan is for.
        binding: what limits the plan.
        sources: of the laws used.
    """

    question: Question
    found: bool
    answer: str
    value: float | None = None
    missing: str = ""
    attempts: tuple[Attempt, ...] = ()
    scenario: Scenario | None = None
    plan: RankedPlan | None = None
    run: WholeRun | None = None
    binding: tuple[Binding, ...] = ()
    optimum: Optimum | None = None
    assumptions: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a recommendation is worked out with.

    Attributes:
        say: called with what is tried next; progress: with plans priced of it.
    """

    calibration: Calibration
    say: Callable[[str], None] = lambda text: None
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A scenario's best plan and its whole run; `result` is None where no plan is legal.

    Attributes:
        lacks_bytes: where nothing was searched because no plan fits: what the nearest lacks.
    """

    scenario: Scenario
    result: SearchResult | None
    run: WholeRun | None
    rules: str = ""
    lacks_bytes: int | None = None

    @property
    def best(self) -> RankedPlan | None:
        """The best plan, None where none fits or none is legal."""
        return None if self.result is None else self.result.best

    @property
    def missing_bytes(self) -> int:
        """Memory that the nearest plan lacks; 0 where one fits or none is legal."""
        if self.lacks_bytes is not None:
            return self.lacks_bytes
        if self.result is None or self.result.best is not None:
            return 0
        return min((p.missing_bytes for p in self.result.infeasible), default=0)


def planned(scenario: Scenario, means: Means, fixed: Fixed | None = None) -> Planned:
    """Returns the scenario's best plan; a scenario without a legal plan says which rules stand.

    Args:
        fixed: fields that every plan must have, for a shorter search.
    """
    try:
        result = search(scenario, means.calibration, 1, fixed=fixed, progress=means.progress)
    except InputError as error:
        rules = "; ".join(str(v) for v in error.violations)
        return Planned(scenario=scenario, result=None, run=None, rules=rules)
    best = result.best
    run = None if best is None else whole_run(scenario, best.prediction)
    return Planned(scenario=scenario, result=result, run=run)


def bound_by(found: Planned, means: Means) -> tuple[Binding, ...]:
    """Returns what limits the best plan; empty where there is none."""
    if found.result is None:
        return ()
    return binding_constraint(found.result, found.scenario, means.calibration)


def assumptions_of(found: Planned) -> tuple[str, ...]:
    """Returns what the plan's prediction and its whole run assume."""
    best, run = found.best, found.run
    if best is None or run is None:
        return ()
    return (*best.prediction.assumptions, *run.assumptions)
