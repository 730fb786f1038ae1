"""What calibrate and compare take from the store, and the calibrations that go with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flopwright.errors import InputError, Violation, did_you_mean

if TYPE_CHECKING:
    from flopwright.report.metrics import Measurement
    from flopwright.simulator.calibration.model import Calibration


def chosen_measurements(
    url: str | None,
    *,
    plan: str | None = None,
    only_stack: str | None = None,
    exclude: Iterable[str] = (),
) -> list[Measurement]:
    """Returns the store's measurements that pass the filters, oldest first.

    Raises:
        InputError: there is no store, none is left, or a name to leave out is not there.
    """
    from flopwright.store import open_store

    store = open_store(url, create=False)
    every = store.measurements()
    if not every:
        raise InputError(
            Violation(
                field="store",
                value=store.url,
                rule="holds no measurement yet",
                nearest_fix="run a plan first: flopwright run PLAN",
            )
        )
    names = {m.plan_name for m in every}
    left_out = set(exclude)
    unknown = sorted((left_out | ({plan} if plan else set())) - names)
    if unknown:
        raise InputError(
            [
                Violation(
                    field="plan name",
                    value=repr(name),
                    rule="no measurement of that name is in the store",
                    nearest_fix=did_you_mean(name, names),
                )
                for name in unknown
            ]
        )
    found = [
        m
        for m in every
        if m.plan_name not in left_out
        and (plan is None or m.plan_name == plan)
        and (only_stack is None or m.fingerprint.stack_id() == only_stack)
    ]
    if not found:
        stacks = ", ".join(sorted({m.fingerprint.stack_id() for m in every}))
        raise InputError(
            Violation(
                field="store",
                value=store.url,
                rule="no measurement passes the filters",
                nearest_fix=f"its stacks: {stacks}; its plans: {', '.join(sorted(names))}",
            )
        )
    return found


def warn_of_broken_calibrations() -> None:
    """Names on stderr the own calibrations that cannot be read, which are then passed over."""
    import typer

    from flopwright.simulator.calibration.files import own_folder, read_calibration

    for path in sorted(own_folder().glob("*.yaml")):
        try:
            read_calibration(path)
        except InputError as error:
            typer.echo(f"warning: a calibration is passed over: {error.violations[0]}", err=True)


def base_for(measurements: Sequence[Measurement], name: str | None) -> Calibration:
    """Returns the curves to start from: named, or by what is nearest to the runs' stack.

    The stack's newest probe; else one of the same hardware under other software; else the
    public prior.
    """
    from flopwright.report.drift import hardware_id
    from flopwright.simulator.calibration.files import load_calibration, own_calibrations
    from flopwright.simulator.calibration.repredict import prior_of

    if name is not None:
        return load_calibration(name)
    warn_of_broken_calibrations()
    where = measurements[0].fingerprint
    stack, hardware = where.stack_id(), hardware_id(where)
    probes = [c for c in own_calibrations() if not c.measurements]
    exact = (c for c in probes if c.stack_id == stack)
    near = (c for c in probes if c.hardware_id == hardware)
    return next(exact, None) or next(near, None) or prior_of(measurements[0])
