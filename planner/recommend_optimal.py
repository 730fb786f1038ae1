"""A compute budget's best model and data, its rate, batch and vocabulary, and the plan for it."""

from __future__ import annotations

import math
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.planner import laws
from flopwright.planner.recommend_answer import (
    Attempt,
    Means,
    Optimum,
    Planned,
    Recommendation,
    assumptions_of,
    bound_by,
    planned,
)
from flopwright.planner.recommend_rates import rates_of, vocabulary_options
from flopwright.planner.recommend_scale import counted_params, nearest_scaled
from flopwright.spec.parameters import num_params
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Workload
from flopwright.units import show_bytes, show_count, show_percent

# Losses closer than this are told apart by no one run.
FLAT_NATS: Final = 0.005
_DAY_S: Final = 86_400.0
# A budget in GPU-days is worked out again while the FLOPs it buys still move by more.
_SETTLED: Final = 0.02
_MAX_ROUNDS: Final = 4
_MAX_TOKENS: Final = 10**18


def compute_optimal(
    scenario: Scenario, law: laws.LossLaw, means: Means, *, flops: float
) -> Recommendation:
    """Returns N and D of least loss for so many FLOPs (6 N D), planned on the cluster."""
    chosen = optimal_scenario(scenario, law, flops)
    means.say(f"planning {chosen.model.name}")
    return _answer(scenario, law, flops, planned(chosen, means), (), means)


def compute_optimal_for_gpu_days(
    scenario: Scenario, law: laws.LossLaw, means: Means, *, gpu_days: float
) -> Recommendation:
    """Returns N and D of least loss for what so many GPU-days of the cluster compute.

    FLOPs = GPU-days * 6 N * tokens a second and GPU of the best plan; N depends on the FLOPs,
    so that both are worked out in turn until the FLOPs settle within 2 %.
    """
    rows: list[Attempt] = []
    chosen, flops = scenario, 0.0
    for _ in range(_MAX_ROUNDS):
        means.say(f"planning {chosen.model.name} for what a GPU-day computes")
        found = planned(chosen, means)
        rate = _flops_per_s_per_gpu(found)
        rows.append(_round(chosen, found, rate))
        if rate is None:
            return _unplannable(found, rows)
        before, flops = flops, rate * gpu_days * _DAY_S
        if before and abs(flops / before - 1) < _SETTLED:
            break
        chosen = optimal_scenario(scenario, law, flops)
    if found.scenario != chosen:
        means.say(f"planning {chosen.model.name}")
        found = planned(chosen, means)
    return _answer(scenario, law, flops, found, tuple(rows), means)


def optimal_scenario(scenario: Scenario, law: laws.LossLaw, flops: float) -> Scenario:
    """Returns the scenario with the family's model nearest to the optimal N, and D for it.

    D follows from the model that there is: 6 N D stays the budget.

    Raises:
        InputError: the budget does not pay for one step, or for more tokens than there are.
    """
    params, _ = law.optimum(flops)
    model = nearest_scaled(scenario.model, params)
    tokens = flops / (laws.FLOPS_PER_PARAM_TOKEN * counted_params(model))
    _check_budget(flops, tokens, scenario.workload)
    workload = _with_tokens(scenario.workload, round(tokens))
    return scenario.model_copy(update={"model": model, "workload": workload})


def _check_budget(flops: float, tokens: float, workload: Workload) -> None:
    least = workload.tokens_per_step
    if least <= tokens <= _MAX_TOKENS:
        return
    limit = (
        f"one step of {least:,} tokens" if tokens < least else f"{show_count(_MAX_TOKENS)} tokens"
    )
    rule = f"is for {tokens:.3g} tokens of the family's nearest model"
    raise InputError(Violation(field="compute", value=f"{flops:.3g} FLOP", rule=rule, limit=limit))


def _with_tokens(workload: Workload, tokens: int) -> Workload:
    """Returns the workload with another budget, its schedule's points in proportion."""
    factor, rate = tokens / workload.total_tokens, workload.learning_rate
    hold = rate.hold_until_tokens
    update: dict[str, int] = {"warmup_steps": math.floor(rate.warmup_steps * min(1.0, factor))}
    if hold is not None:
        update["hold_until_tokens"] = min(tokens, round(hold * factor))
    new_rate = rate.model_copy(update=update)
    return workload.model_copy(update={"total_tokens": tokens, "learning_rate": new_rate})


def _flops_per_s_per_gpu(found: Planned) -> float | None:
    """Returns the FLOP/s a GPU delivers as the laws count them, 6 N a token; None unplanned."""
    if found.best is None:
        return None
    rate = found.best.prediction.metrics.tokens_per_s_per_gpu
    return laws.FLOPS_PER_PARAM_TOKEN * counted_params(found.scenario.model) * rate


def _round(chosen: Scenario, found: Planned, rate: float | None) -> Attempt:
    params = counted_params(chosen.model)
    why = _lack(found) if rate is None else f"{rate / 1e12:.4g} TFLOP/s a GPU, by 6 N D"
    return Attempt(
        value=params,
        tried=f"{show_count(params)} weights",
        holds=rate is not None,
        why=why,
        days=None if found.run is None else found.run.days,
        usd=None if found.run is None else found.run.usd,
        missing_bytes=found.missing_bytes,
    )


def _lack(found: Planned) -> str:
    if found.result is None:
        return f"no plan is legal: {found.rules}"
    lack = found.missing_bytes
    what = f"lacks {show_bytes(lack)} a GPU" if lack else "lacks host memory"
    return f"no plan fits: the nearest {what}"


def _unplannable(found: Planned, rows: list[Attempt]) -> Recommendation:
    name = found.scenario.model.name
    return Recommendation(
        question="compute_optimal",
        found=False,
        answer=f"what a GPU-day computes is not known: {name} has no plan on this cluster",
        missing=_lack(found),
        attempts=tuple(rows),
    )


def _answer(
    scenario: Scenario,
    law: laws.LossLaw,
    flops: float,
    found: Planned,
    rows: tuple[Attempt, ...],
    means: Means,
) -> Recommendation:
    optimum = optimum_of(law, flops, found.scenario, scenario)
    active = "weights active for a token" if scenario.model.moe else "weights"
    text = (
        f"{show_count(optimum.params)} {active} on {show_count(optimum.tokens)} tokens "
        f"({optimum.tokens / optimum.params:.3g} tokens a weight) for {flops:.3g} FLOP: "
        f"loss {optimum.loss:.3f} by the law; from {show_count(optimum.params_low)} to "
        f"{show_count(optimum.params_high)} weights lose less than {FLAT_NATS:g} nats"
    )
    return Recommendation(
        question="compute_optimal",
        found=found.best is not None,
        answer=text,
        value=optimum.params,
        missing="" if found.best is not None else _lack(found),
        attempts=rows,
        scenario=found.scenario,
        plan=found.best,
        run=found.run,
        binding=bound_by(found, means),
        optimum=optimum,
        assumptions=(*_assumed(law, scenario, optimum), *assumptions_of(found)),
        sources=_sources(law, scenario, optimum),
    )


def optimum_of(law: laws.LossLaw, flops: float, chosen: Scenario, scenario: Scenario) -> Optimum:
    """Returns what the laws say of a budget.

    Args:
        chosen: the scenario of the model that is planned for it.
        scenario: the one asked about, whose vocabulary and context are the reference.
    """
    params, tokens = law.optimum(flops)
    low, high = law.flat_range(flops, FLAT_NATS)
    moe = scenario.model.moe
    return Optimum(
        law=law.name,
        flops=flops,
        params=params,
        tokens=tokens,
        loss=law.loss(params, tokens),
        params_low=low,
        params_high=high,
        nats=FLAT_NATS,
        planned_params=counted_params(chosen.model),
        planned_total_params=num_params(chosen.model),
        sparsity_flops=None if moe is None else laws.sparsity_flops(moe.sparsity),
        rates=rates_of(chosen),
        vocabulary=vocabulary_options(chosen.model, scenario.workload.seq_len),
    )


def _assumed(law: laws.LossLaw, scenario: Scenario, optimum: Optimum) -> tuple[str, ...]:
    others = [other for other in laws.LOSS_LAWS.values() if other is not law]
    texts = ["FLOPs are 6 N D: attention's products come on top (arXiv 2001.08361)"]
    off = optimum.planned_params / optimum.params - 1
    texts.append(
        f"planned: the nearest size of the family, {show_count(optimum.planned_params)} weights "
        f"({'+' if off >= 0 else '-'}{show_percent(abs(off))}), and D for it"
    )
    for other in others:
        params, tokens = other.optimum(optimum.flops)
        texts.append(
            f"the law '{other.name}' would take {show_count(params)} weights and "
            f"{show_count(tokens)} tokens"
        )
    if scenario.model.moe is not None:
        texts.append("the law was fitted to dense models: N is the weights active for a token")
        texts.append(_sparsity_text(scenario.model.moe.sparsity, optimum.sparsity_flops))
    texts.append("the planned run keeps the scenario's rate and batch: the laws' are beside it")
    return tuple(texts)


def _sparsity_text(sparsity: float, flops: float | None) -> str:
    if flops is None:
        return f"sparsity {sparsity:.3g}: the published law covers 8 to 48 only"
    return (
        f"sparsity {sparsity:.3g} needs {flops:.3g} times the FLOPs of sparsity 48 for the same "
        "loss; the loss above does not count it"
    )


def _sources(law: laws.LossLaw, scenario: Scenario, optimum: Optimum) -> tuple[str, ...]:
    sparsity = () if scenario.model.moe is None else (laws.SPARSITY_SOURCE,)
    rates = tuple(r.source for r in optimum.rates)
    return (law.source, *sparsity, *rates, laws.VOCABULARY_SOURCE)
