"""What a calibration predicts for a plan that has been measured, and how far off it is."""

from __future__ import annotations

from pydantic import ValidationError

from flopwright.errors import InputError, Violation
from flopwright.plan.file import PlanFile
from flopwright.report.metrics import Measurement, Prediction
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.evaluate import memory_of
from flopwright.simulator.training.predict import plan_costs, predict
from flopwright.spec.workload import ExpertLoad


def plan_of(measurement: Measurement) -> PlanFile:
    """Returns the plan that a measurement ran.

    Raises:
        InputError: the stored plan is not one that this version reads.
    """
    try:
        return PlanFile.model_validate(measurement.plan)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            Violation(
                field=f"measurements.{measurement.id}.plan.{'.'.join(map(str, first['loc']))}",
                rule=f"the measured plan cannot be read: {first['msg']}",
                nearest_fix=f"leave it out with --exclude {measurement.plan_name}, "
                "or run its plan again",
            )
        ) from error


def predict_measurement(calibration: Calibration, measurement: Measurement) -> Prediction:
    """Returns the prediction of the measured plan on its own scenario.

    Raises:
        InputError: the stored plan cannot be read, or lacks what a prediction needs; says which
            run that is and how to leave it out.
    """
    plan, name = plan_of(measurement), measurement.plan_name
    try:
        prediction, _ = predict(plan.scenario, plan.parallel, calibration, name=name)
    except InputError as error:
        raise InputError(
            [
                Violation(
                    field=f"measurements.{measurement.id}.{v.field}",
                    value=v.value,
                    rule=f"the measured plan cannot be predicted: {v.rule}",
                    limit=v.limit,
                    nearest_fix=f"leave it out with --exclude {name}, or run its plan again",
                )
                for v in error.violations
            ]
        ) from error
    return prediction


def memory_as_routed(
    calibration: Calibration, measurement: Measurement
) -> tuple[dict[str, int], ...]:
    """Returns the predicted bytes by class of each stage, given the rows that experts got.

    How tokens choose their experts is not known beforehand: `predict_measurement` takes it
    that every rank's experts get the same. Here each stage has the rows that its fullest
    rank's experts held (`Measurement.expert_rows`), which leaves what a row takes.
    """
    file = plan_of(measurement)
    plan = file.parallel
    ranks = plan.world_size // plan.pp
    rows = measurement.expert_rows or (1.0,) * plan.world_size
    if len(rows) != plan.world_size:
        raise InputError(
            Violation(
                field=f"measurements.{measurement.id}.expert_rows",
                value=str(len(rows)),
                rule=f"the plan has {plan.world_size} ranks",
                nearest_fix=f"leave it out with --exclude {measurement.plan_name}",
            )
        )
    stages = [max(rows[s * ranks : (s + 1) * ranks]) for s in range(plan.pp)]
    found = {r: _memory_at(calibration, file, r) for r in dict.fromkeys(stages)}
    return tuple(found[r][s] for s, r in enumerate(stages))


def _memory_at(calibration: Calibration, file: PlanFile, rows: float) -> list[dict[str, int]]:
    """Returns bytes by class and stage where every rank's experts get `rows` times the mean."""
    workload = file.scenario.workload
    if rows != 1.0:
        load = ExpertLoad(kind="capacity", capacity_factor=rows)
        workload = workload.model_copy(update={"expert_load": load})
    scenario = file.scenario.model_copy(update={"workload": workload})
    costs = plan_costs(scenario, file.parallel, calibration)
    classes = memory_of(scenario, costs, calibration).classes
    return [
        {c: int(values[s, 0]) for c, values in classes.items()} for s in range(file.parallel.pp)
    ]


def prior_of(measurement: Measurement) -> Calibration:
    """Returns the public prior of the processor that a measurement ran on."""
    return default_calibration(plan_of(measurement).scenario.cluster.node.gpu)
