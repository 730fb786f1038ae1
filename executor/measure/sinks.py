"""Where a run's figures go besides its JSONL files, if asked: TensorBoard, W&B, MLflow.

Each is imported when it is asked for and writes into the run's folder; nothing is sent
anywhere (W&B offline, MLflow in files). Rank 0 alone has sinks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol


class Sink(Protocol):
    """Takes the figures of steps."""

    def scalars(self, plan: str, step: int, values: Mapping[str, float]) -> None:
        """Takes one step's figures by name."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


class TensorBoard:
    """Event files, a folder a plan: `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, out_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = out_dir / "tensorboard"
        self._make: Callable[[str], Any] = SummaryWriter
        self._writers: dict[str, Any] = {}

    def scalars(self, plan: str, step: int, values: Mapping[str, float]) -> None:
        """Takes one step's figures."""
        if plan not in self._writers:
            self._writers[plan] = self._make(str(self._folder / plan))
        for name, value in values.items():
            self._writers[plan].add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left."""
        for writer in self._writers.values():
            writer.close()


class WeightsAndBiases:
    """One offline run with figures named PLAN/FIGURE: `wandb sync RUN/wandb/offline-run-*`."""

    def __init__(self, out_dir: Path) -> None:
        wandb: Any = import_module("wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(
            project="flopwright", name=out_dir.name, dir=str(out_dir), mode=mode
        )
        self._known: set[str] = set()

    def scalars(self, plan: str, step: int, values: Mapping[str, float]) -> None:
        """Takes one step's figures."""
        if plan not in self._known:  # plans take turns: each has steps of its own
            self._known.add(plan)
            self._run.define_metric(f"{plan}/*", step_metric=f"{plan}/step")
        self._run.log({f"{plan}/{n}": v for n, v in values.items()} | {f"{plan}/step": step})

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()


class MlFlow:
    """A file store with a run a plan: `mlflow ui --backend-store-uri RUN/mlflow`."""

    def __init__(self, out_dir: Path) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        store = (out_dir / "mlflow").resolve().as_uri()
        self._client: Any = import_module("mlflow").MlflowClient(tracking_uri=store)
        self._experiment = self._client.create_experiment(out_dir.name or "flopwright")
        self._runs: dict[str, str] = {}

    def scalars(self, plan: str, step: int, values: Mapping[str, float]) -> None:
        """Takes one step's figures."""
        if plan not in self._runs:
            run = self._client.create_run(self._experiment, run_name=plan)
            self._runs[plan] = run.info.run_id
        for name, value in values.items():
            self._client.log_metric(self._runs[plan], name, value, step=step)

    def close(self) -> None:
        """Marks the runs as finished."""
        for run in self._runs.values():
            self._client.set_terminated(run)


_SINKS: Final[dict[str, Callable[[Path], Sink]]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MlFlow,
}


def open_sinks(names: Iterable[str], out_dir: Path) -> tuple[Sink, ...]:
    """Returns the sinks asked for; their packages were looked for before the run started."""
    return tuple(_SINKS[name](out_dir) for name in names)
