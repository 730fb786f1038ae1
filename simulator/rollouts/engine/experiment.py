"""What the engine model says of a published measurement of an engine."""

from __future__ import annotations

from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.hardware.nodes.types import cluster_of
from flopwright.simulator.rollouts.engine.catalog import load_served
from flopwright.simulator.rollouts.engine.offline import (
    Terms,
    decode_rate,
    offline_run,
    prefill_rate,
)
from flopwright.simulator.rollouts.engine.price import Served
from flopwright.simulator.rollouts.engine.software import engine_software
from flopwright.spec.rollouts.engine_experiment import (
    DecodeCase,
    EngineExperiment,
    OfflineCase,
)
from flopwright.spec.rollouts.engine_served import ServedModel

# Rates of eight GPUs, as serving reports state them.
_NODE = 8


def served_of(experiment: EngineExperiment, calibration: Calibration | None = None) -> Served:
    """Returns the engine of an experiment on its GPUs, ready to be priced.

    Raises:
        InputError: a model, node type or engine that there is not.
    """
    model = experiment.model
    if not isinstance(model, ServedModel):
        model = load_served(model, experiment.release, experiment.kv_dtype, experiment.formats)
    elif experiment.kv_dtype is not None:
        model = model.model_copy(update={"kv_dtype": experiment.kv_dtype})
    engine = experiment.software
    return Served(
        model=model,
        cluster=cluster_of(experiment.node_type, experiment.shape.gpus),
        shape=experiment.shape,
        software=engine_software(engine) if isinstance(engine, str) else engine,
        calibration=calibration,
    )


def engine_metrics(
    experiment: EngineExperiment,
    calibration: Calibration | None = None,
    scale: Terms = (1.0, 1.0, 1.0),
) -> dict[str, float]:
    """Returns the metrics of the experiment's case: tokens a second, of one GPU, of eight, of all.

    offline: "output_tps", "output_tps_per_gpu", "running", "seconds". decode: "decode_tps",
    "decode_tps_per_gpu", "decode_tps_per_node8", "decode_step_s". prefill: "prefill_tps",
    "prefill_tps_per_gpu", "prefill_tps_per_node8".

    Args:
        scale: offline: factors on the three terms of a step.

    Raises:
        InputError: what is asked for cannot be run (memory, names).
    """
    on, case = served_of(experiment, calibration), experiment.load
    if isinstance(case, OfflineCase):
        run = offline_run(on, case.prompt_tokens, case.output_tokens, case.requests, scale)
        return {
            "output_tps": run.output_tokens_per_s,
            "output_tps_per_gpu": run.per_gpu,
            "running": run.mean_running * on.shape.dp,
            "seconds": run.seconds,
        }
    if isinstance(case, DecodeCase):
        each = decode_rate(on, case.attempts, case.context_tokens, case.speculation)
        gained = case.speculation.tokens_per_step if case.speculation else 1.0
        step_s = case.attempts * gained / (each * on.shape.tp)
        return {**_rates("decode_tps", each, on.shape.gpus), "decode_step_s": step_s}
    each = prefill_rate(on, case.prompt_tokens, case.tokens_per_pass)
    return _rates("prefill_tps", each, on.shape.gpus)


def _rates(name: str, per_gpu: float, gpus: int) -> dict[str, float]:
    return {
        name: per_gpu * gpus,
        f"{name}_per_gpu": per_gpu,
        f"{name}_per_node8": per_gpu * _NODE,
    }
