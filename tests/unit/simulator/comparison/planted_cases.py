"""Simulated runs with one thing made slow (or large) on purpose, over models and plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.findings import Finding
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.comparison.run import compared
from flopwright.simulator.comparison.simulated import simulated_measurement
from flopwright.simulator.engine.perturb import Perturbation
from flopwright.spec.load import load_scenario, make_plan_file
from flopwright.spec.scenario import Scenario

PLANS: tuple[tuple[str, ParallelPlan], ...] = (
    ("kimi_k2_mini_8cpu", ParallelPlan(pp=2, dp_shard=2, micro_batch_size=2)),
    ("kimi_k2_mini_8cpu", ParallelPlan(dp_shard=4, ep=2, micro_batch_size=2, zero_stage=1)),
    ("kimi_k2_mini_8cpu", ParallelPlan(pp=4, dp_shard=2, ep=2, micro_batch_size=1)),
    ("kimi_k2_mini_8cpu", ParallelPlan(pp=2, vpp=2, dp_shard=2, schedule="zb_v")),
    ("llama31_8b", ParallelPlan(pp=2, dp_shard=8, tp=2, zero_stage=1, recompute="full")),
    ("llama31_8b", ParallelPlan(pp=4, vpp=2, dp_shard=4, schedule="interleaved_1f1b")),
    ("kimi_k2", ParallelPlan(pp=4, dp_shard=8, ep=8, zero_stage=1, recompute="full")),
)
# How far the machine is from its calibration everywhere, without any fault (1 sigma).
DRIFT = 0.02
JITTER = 0.03


@dataclass(frozen=True, kw_only=True)
class Case:
    """One planted fault; `names` says yes to the causes that name it."""

    label: str
    plan: PlanFile
    calibration: Calibration
    perturbation: Perturbation
    memory_factors: dict[str, float] = field(default_factory=dict)
    kernels: bool = False
    kind: str
    name: str = ""
    rank: int | None = None

    def run(self) -> tuple[Finding, ...]:
        """Returns what a comparison of the run says, first things first."""
        measured = simulated_measurement(
            self.plan,
            self.calibration,
            self.perturbation,
            memory_factors=self.memory_factors,
            kernels=self.kernels,
            samples=3,
        )
        return compared(base_calibration(self.plan.scenario), measured).findings

    def named_by(self, cause: Finding) -> bool:
        if self.rank is not None:
            return cause.kind == self.kind and self.rank in cause.ranks
        return cause.kind == self.kind and cause.name == self.name


@lru_cache(maxsize=8)
def scenario_of(name: str) -> Scenario:
    if name == "kimi_k2_mini_8cpu":
        mini = load_scenario("kimi_k2_mini_2cpu_fp32")
        node = mini.cluster.node.model_copy(update={"gpus": 8, "cores": 8})
        cluster = mini.cluster.model_copy(update={"node": node})
        return mini.model_copy(update={"cluster": cluster})
    if name == "llama31_8b":
        from flopwright.spec.load import load_cluster, load_model

        big = load_scenario("llama31_405b_pretrain_16384gpu_h100_bf16")
        workload = big.workload.model_copy(update={"global_batch_size": 64})
        return big.model_copy(
            update={"model": load_model("llama31_8b"), "workload": workload,
                    "cluster": load_cluster("64_h100")}
        )  # fmt: skip
    big = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    workload = big.workload.model_copy(update={"global_batch_size": 64})
    return big.model_copy(update={"workload": workload})


def base_calibration(scenario: Scenario) -> Calibration:
    return default_calibration(scenario.cluster.node.gpu)


def truth(scenario: Scenario, rng: np.random.Generator) -> Calibration:
    """Returns a machine that is a little off its calibration in every class."""
    believed = base_calibration(scenario)

    def drawn(names: tuple[str, ...], known: dict[str, float]) -> dict[str, float]:
        return {n: known.get(n, 1.0) * float(np.exp(DRIFT * rng.standard_normal())) for n in names}

    classes = ("forward", "backward", "recompute", "optimizer", "tp_comm", "ep_comm", "pp_comm",
               "dp_comm")  # fmt: skip
    kernels = ("gemm", "grouped_gemm", "attention", "attention_backward", "memory_bound", "head")
    return believed.model_copy(
        update={
            "factors": drawn(classes, believed.factors),
            "kernel_factors": {
                **believed.kernel_factors,
                **drawn(kernels, believed.kernel_factors),
            },
        }
    )


def _base(number: int) -> tuple[PlanFile, Calibration, np.random.Generator]:
    name, plan = PLANS[number % len(PLANS)]
    scenario = scenario_of(name)
    rng = np.random.default_rng(number)
    return make_plan_file(scenario, plan, f"{name} {plan.label()}"), truth(scenario, rng), rng


def op_cases(count: int) -> Iterator[Case]:
    """Kernel classes half as slow again, of which a profiler saw kernels."""
    for i in range(count):
        plan, machine, rng = _base(i)
        held = ["gemm", "attention", "attention_backward", "memory_bound"]
        if "k2" in plan.name:
            held.append("grouped_gemm")
        kernel = str(rng.choice(held))
        factors = {**machine.kernel_factors, kernel: machine.kernel_factors[kernel] * 1.5}
        yield Case(
            label=f"{plan.name}: {kernel} x 1.5",
            plan=plan,
            calibration=machine.model_copy(update={"kernel_factors": factors}),
            perturbation=Perturbation(jitter=JITTER, seed=i),
            kernels=True,
            kind="kernel",
            name=kernel,
        )


def class_cases(count: int) -> Iterator[Case]:
    """Time classes half as slow again; only whole actions were timed."""
    for i in range(count):
        plan, machine, rng = _base(i)
        name = str(rng.choice(["forward", "backward", "optimizer"]))
        factors = {**machine.factors, name: machine.factors[name] * 1.5}
        yield Case(
            label=f"{plan.name}: {name} x 1.5",
            plan=plan,
            calibration=machine.model_copy(update={"factors": factors}),
            perturbation=Perturbation(jitter=JITTER, seed=i),
            kind="time",
            name=name,
        )


def rank_cases(count: int) -> Iterator[Case]:
    """One rank half as slow again."""
    for i in range(count):
        plan, machine, rng = _base(i)
        split = plan.parallel
        engine_ranks = split.pp * split.dp
        rank = int(rng.integers(engine_ranks)) * split.tp * split.cp
        yield Case(
            label=f"{plan.name}: rank {rank} x 1.5",
            plan=plan,
            calibration=machine,
            perturbation=Perturbation(jitter=JITTER, seed=i, stragglers={rank: 1.5}),
            kind="rank",
            rank=rank,
        )


def link_cases(count: int) -> Iterator[Case]:
    """What one rank sends takes three times as long."""
    for i in range(count):
        plan, machine, rng = _base(i)
        split = plan.parallel
        rank = int(rng.integers(split.pp * split.dp)) * split.tp * split.cp
        yield Case(
            label=f"{plan.name}: links of rank {rank} x 3",
            plan=plan,
            calibration=machine,
            perturbation=Perturbation(jitter=JITTER, seed=i, slow_links={rank: 3.0}),
            kind="link",
            rank=rank,
        )


def memory_cases(count: int) -> Iterator[Case]:
    """A memory class a fifth larger than predicted."""
    for i in range(count):
        plan, machine, rng = _base(i)
        classes = ["weights", "gradients", "optimizer_state", "activations", "temporaries"]
        name = str(rng.choice(classes))
        yield Case(
            label=f"{plan.name}: {name} x 1.2",
            plan=plan,
            calibration=machine,
            perturbation=Perturbation(jitter=JITTER, seed=i),
            memory_factors={name: 1.2},
            kind="memory",
            name=name,
        )


def clean_cases(count: int) -> Iterator[Case]:
    """Nothing planted: a machine that is a little off everywhere."""
    for i in range(count):
        plan, machine, _ = _base(i)
        yield Case(
            label=f"{plan.name}: nothing",
            plan=plan,
            calibration=machine,
            perturbation=Perturbation(jitter=JITTER, seed=i),
            kernels=i % 2 == 0,
            kind="",
        )
