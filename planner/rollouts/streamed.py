"""An asynchronous loop under a staleness bound, as RoundMetrics of one step of its trainer.

Engines stream groups into a buffer; a prompt is only started while the batch it belongs to is at
most `staleness_bound` versions ahead (AReaL's admission, arXiv 2505.24298).
"""

from __future__ import annotations

from flopwright.errors import InputError, Violation
from flopwright.planner.rollouts.bounds import prefill_table, step_table, update_s, work_of
from flopwright.planner.rollouts.choices import Choice
from flopwright.report.metrics import RoundMetrics
from flopwright.simulator.rollouts.layouts import IterationReport, iteration
from flopwright.spec.rollout import DeterministicLengths, LognormalLengths, RolloutScenario
from flopwright.spec.rollouts.engine import EngineModel
from flopwright.spec.rollouts.layout import (
    Batch,
    Fleet,
    FullyAsync,
    GroupLengths,
    LayoutInput,
    PhaseTimes,
)

# A law without a cap is cut where next to nothing is longer.
_CAP_OVER_MEAN = 200.0


def streamed_violations(scenario: RolloutScenario) -> list[Violation]:
    """Returns what an asynchronous loop cannot be simulated with."""
    found = []
    if not isinstance(scenario.lengths, LognormalLengths | DeterministicLengths):
        found.append(
            Violation(
                field="rollout.lengths",
                value=scenario.lengths.kind,
                rule="an asynchronous loop is simulated with lognormal or equal lengths",
                nearest_fix="lengths of kind lognormal, or another layout",
            )
        )
    if scenario.agent is not None:
        found.append(
            Violation(
                field="rollout.agent",
                rule="an asynchronous loop is simulated without tools",
                nearest_fix="another layout: colocated, disaggregated or one_step_off",
            )
        )
    return found


def streamed(
    scenario: RolloutScenario, choice: Choice, seed: int
) -> tuple[RoundMetrics, float, float]:
    """Returns (the mean step, attempts a second, mean versions behind when trained on).

    Raises:
        InputError: the round cannot be streamed, or a context outgrows the cache.
    """
    broken = streamed_violations(scenario)
    if broken:
        raise InputError(broken)
    attempts = scenario.prompts * scenario.samples_per_prompt
    work = work_of(scenario)
    trained_s = update_s(scenario, work, attempts)
    found = iteration(
        LayoutInput(
            batch=Batch(
                prompts=scenario.prompts,
                samples=scenario.samples_per_prompt,
                prompt_tokens=scenario.prompt_tokens,
                lengths=_lengths(scenario, work.tokens),
            ),
            fleet=Fleet(engine=_engine(scenario), instances=scenario.instances),
            times=PhaseTimes.model_construct(
                update_s=trained_s,
                log_prob_s=0.0,
                sync_s=scenario.weight_sync.seconds,
                switch_s=0.0,
            ),
            layout=FullyAsync(staleness=choice.staleness_bound),
            seed=seed,
        )
    )
    return _metrics(found, attempts), attempts / found.step_s, found.staleness


def _lengths(scenario: RolloutScenario, mean: float) -> GroupLengths:
    lengths = scenario.lengths
    if isinstance(lengths, DeterministicLengths):
        return GroupLengths(mean=lengths.tokens, sigma=0.0, cap=lengths.tokens)
    assert isinstance(lengths, LognormalLengths)
    cap = lengths.cap or round(_CAP_OVER_MEAN * lengths.mean)
    return GroupLengths(
        mean=max(1, round(mean)),
        sigma=lengths.sigma,
        cap=cap,
        group_share=scenario.group_correlation,
    )


def _engine(scenario: RolloutScenario) -> EngineModel:
    if scenario.engine is not None:
        return scenario.engine
    return EngineModel(
        decode=step_table(scenario),
        prefill=prefill_table(scenario),
        kv_capacity_tokens=scenario.kv_capacity_tokens,
        kv_bytes_per_token=scenario.kv_bytes_per_token,
        max_running=scenario.slots_per_instance,
        gpus=scenario.gpus_per_instance,
    )


def _metrics(found: IterationReport, attempts: int) -> RoundMetrics:
    time_s = {
        "generation": found.time_s["generation"],
        "update": found.time_s["update"] + found.time_s["log_prob"],
        "weight_sync": found.time_s["sync"],
    }
    return RoundMetrics(
        round_time_s=sum(time_s.values()),
        time_s=time_s,
        tail_s=found.tail_s,
        gpu_idle_share=0.0,
        tokens_per_s=found.response_tokens / found.step_s,
        completed=attempts,
        generated_tokens=round(found.response_tokens),
        kv_peak_tokens=round(found.peak_tokens),
        preemptions=found.preempted,
    )
