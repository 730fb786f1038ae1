"""The export bundle: every file of a plan's launch, as bytes, with a manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Final

import flopwright
from flopwright.plan.file import PlanFile, PredictedStep
from flopwright.planner.export.check import check_json, measure_script
from flopwright.planner.export.deepspeed_json import deepspeed_json
from flopwright.planner.export.env import env_script
from flopwright.planner.export.fallbacks import fallback_header, fallbacks_json
from flopwright.planner.export.readme import readme
from flopwright.planner.export.sbatch import sbatch_script
from flopwright.planner.export.target import TARGET_VERSIONS
from flopwright.planner.export.text import TargetFile
from flopwright.planner.export.torchrun import torchrun_script
from flopwright.planner.export.trace import predicted_trace
from flopwright.planner.fallback import Fallback
from flopwright.report.metrics import Prediction
from flopwright.report.trace import Trace
from flopwright.spec.load import dump_yaml

EXECUTABLE: Final = frozenset({"torchrun.sh", "measure.sh"})
MANIFEST_VERSION: Final = 1


def with_prediction(plan: PlanFile, prediction: Prediction) -> PlanFile:
    """Returns the plan file carrying the prediction's summary (hashes do not cover it)."""
    interval = prediction.step_time_interval
    step = PredictedStep(
        step_time_s=f"{prediction.metrics.step_time_s!r} s",
        low_s=f"{interval.low!r} s",
        high_s=f"{interval.high!r} s",
        peak_memory_bytes=f"{prediction.metrics.peak_memory_bytes} B",
        provenance=prediction.provenance,
        calibration_id=prediction.calibration_id,
    )
    return plan.model_copy(update={"predicted": step})


def bundle(
    plan: PlanFile,
    prediction: Prediction,
    trace: Trace,
    *,
    refused: Sequence[str] = (),
    extra: Sequence[TargetFile] = (),
    fallbacks: Sequence[Fallback] = (),
) -> dict[str, bytes]:
    """Returns the bundle's files by name; the same inputs give the same bytes.

    Args:
        plan: the plan file; its summary of the prediction is renewed.
        prediction: of this plan; the expectations and bounds come from it.
        trace: the simulated step.
        refused: what this version's executor does not run of the plan, in words.
        extra: files of further targets (registry.py).
        fallbacks: plans for fewer nodes (planner/fallback.py).
    """
    plan = with_prediction(plan, prediction)
    texts = {
        "README.md": readme(plan, prediction, refused, fallbacks),
        "plan.yaml": dump_yaml(plan, header=f"flopwright {flopwright.__version__}: run me"),
        "torchrun.sh": torchrun_script(plan),
        "sbatch.sh": sbatch_script(plan, prediction),
        "ENV.sh": env_script(plan),
        "deepspeed.json": deepspeed_json(plan),
        "check.json": check_json(plan, prediction),
        "measure.sh": measure_script(plan),
        "fallbacks.json": fallbacks_json(plan, prediction, fallbacks),
    }
    texts |= {f.file: dump_yaml(f.plan, header=fallback_header(f)) for f in fallbacks}
    texts |= {file.name: file.text for file in extra}
    files = {name: text.encode() for name, text in texts.items()}
    files["predicted.trace.json.gz"] = predicted_trace(plan, trace)
    omitted = {file.name: list(file.omitted) for file in extra if file.omitted}
    files["manifest.json"] = _manifest(plan, prediction, files, omitted)
    return files


def _manifest(
    plan: PlanFile,
    prediction: Prediction,
    files: dict[str, bytes],
    omitted: dict[str, list[str]],
) -> bytes:
    data = {
        "schema_version": MANIFEST_VERSION,
        "tool_version": flopwright.__version__,
        "plan_name": plan.name,
        "model_hash": plan.model_hash,
        "scenario_hash": plan.scenario_hash,
        "calibration_id": prediction.calibration_id,
        "provenance": prediction.provenance,
        "targets": TARGET_VERSIONS,
        "not_expressed": omitted,
        "sha256": {name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)},
    }
    return (json.dumps(data, indent=2) + "\n").encode()
