"""check.json and measure.sh: bounds for a run's first steps, taken from its prediction."""

from __future__ import annotations

import json
import math
from typing import Final

from flopwright.plan.file import PlanFile
from flopwright.planner.export.target import header, slug
from flopwright.planner.export.torchrun import RUN_FOLDER
from flopwright.report.check import EXIT_UNREADABLE, CheckBounds
from flopwright.report.metrics import Prediction

# A run this much slower than the interval's upper end costs at least half as much again.
_STOP_OVER_HIGH: Final = 1.5
# Share of a GPU's memory above which the allocator's next request may fail.
_MEMORY_STOP_SHARE: Final = 0.98
# Nats above ln(vocabulary): logits of a fresh model have some variance.
_LOSS_MARGIN: Final = 0.5

# Python's own exit code for a missing module is 1, which would read as "look".
_NEEDS_FLOPWRIGHT: Final = (
    "if ! \"$python\" -c 'import flopwright.report.check' 2>/dev/null; then\n"
    '  echo "measure.sh: $python cannot import flopwright: activate the environment it is '
    'installed in, or set PYTHON to its interpreter" >&2\n'
    f"  exit {EXIT_UNREADABLE}\n"
    "fi\n"
)


def check_bounds(plan: PlanFile, prediction: Prediction) -> CheckBounds:
    """Returns the bounds a run of the plan is judged by after its first 20 steps."""
    interval, metrics = prediction.step_time_interval, prediction.metrics
    hbm_bytes = plan.scenario.cluster.node.gpu.hbm_bytes
    return CheckBounds(
        plan_name=slug(plan.name),
        after_steps=min(20, plan.scenario.workload.num_steps),
        discard_steps=min(3, plan.scenario.workload.num_steps - 1),
        step_time_low_s=interval.low,
        step_time_expected_s=metrics.step_time_s,
        step_time_high_s=interval.high,
        interval_probability=interval.probability,
        step_time_stop_s=_STOP_OVER_HIGH * interval.high,
        peak_memory_bytes=metrics.peak_memory_bytes,
        memory_stop_bytes=int(_MEMORY_STOP_SHARE * hbm_bytes),
        loss_stop=math.log(plan.scenario.model.vocab_size) + _LOSS_MARGIN,
        calibration_id=prediction.calibration_id,
    )


def check_json(plan: PlanFile, prediction: Prediction) -> str:
    """Returns check.json."""
    return json.dumps(check_bounds(plan, prediction).to_data(), indent=2) + "\n"


def measure_script(plan: PlanFile) -> str:
    """Returns measure.sh: compares the run with check.json and says continue, look or stop."""
    return (
        "#!/usr/bin/env bash\n"
        + header(plan, "torchrun")
        + "# Compares a run with check.json. Exit: 0 continue, 1 look, 2 stop, 64 unreadable.\n"
        + "#   ./measure.sh                  the run this bundle started\n"
        + "#   ./measure.sh RUN_OR_FILE      a run's folder, its steps.jsonl or its measurement\n"
        + "set -euo pipefail\n"
        + 'here="$(cd "$(dirname "$0")" && pwd)"\n'
        + 'python="${PYTHON:-python3}"\n'
        + _NEEDS_FLOPWRIGHT
        + f'exec "$python" -m flopwright.report.check "${{1:-$here/{RUN_FOLDER}}}" '
        + '"$here/check.json"\n'
    )
