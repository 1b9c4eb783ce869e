"""Adapters for experiment trackers: all attempts of a run share one tracker run, with each step once.

A tracker is selected by name and imported then; holdfast depends on none of them. Each class states how its tracker
handles steps that are repeated after a restart. Calls and failures: async_tracker.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

TAG = "holdfast.run"
"""Tag by which MLflow finds the run again."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Identity of the run in trackers."""

    run: str
    """The same for every attempt; letters, digits, `-`, `_` and `.`."""
    resumed_step: int
    """The step that this process resumed from."""
    folder: Path
    """Folder for trackers that write files; the same for every attempt."""


class Tracker(Protocol):
    """A tracker; all calls come from one thread and may block."""

    def open(self, tracked_run: TrackedRun) -> None:
        """Resume the tracker's run, or create it."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step."""
        ...

    def close(self) -> None:
        """Flush everything."""
        ...


class TensorBoard:
    """Event files in FOLDER/tensorboard/RUN; for a repeated step the new values are shown."""

    def open(self, tracked_run: TrackedRun) -> None:
        # The ignore: torch's own stubs leave it out.
        from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportPrivateImportUsage]

        folder = tracked_run.folder / "tensorboard" / tracked_run.run
        self._writer: Any = SummaryWriter(
            folder, purge_step=tracked_run.resumed_step + 1 if tracked_run.resumed_step else None
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The run with our id, in the project that WANDB_PROJECT names; or the run that the program has already started.

    For a repeated step the first values stay: W&B accepts no step below the last. Offline, each attempt writes a
    folder, and `wandb sync` merges them into one run by their id.
    """

    def open(self, tracked_run: TrackedRun) -> None:
        import wandb

        self._own = wandb.run is None
        self._run: Any = wandb.run or wandb.init(id=tracked_run.run, name=tracked_run.run, resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._own:
            self._run.finish()


class MLflow:
    """The run with our tag, in the experiment that MLFLOW_EXPERIMENT_NAME names, at MLFLOW_TRACKING_URI.

    For a repeated step the first values stay: the adapter looks up the logged steps and does not send them again.
    """

    def open(self, tracked_run: TrackedRun) -> None:
        import mlflow

        self._refused: set[str] = set()
        """Metric names that it rejects."""
        found: Any = mlflow.search_runs(
            search_all_experiments=True, filter_string=f"tags.`{TAG}` = '{tracked_run.run}'", output_format="list"
        )
        run = mlflow.start_run(
            run_id=found[0].info.run_id if found else None, run_name=tracked_run.run, tags={TAG: tracked_run.run}
        )
        known = mlflow.MlflowClient().get_metric_history(run.info.run_id, "step_s") if found else ()
        self._last: float = max((one.step for one in known), default=-math.inf)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        import mlflow

        if step <= self._last:
            return
        taken = {name: value for name, value in metrics.items() if name not in self._refused}
        try:
            mlflow.log_metrics(taken, step=step)
        except mlflow.MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE" or not self._log_one_by_one(taken, step):
                raise
            raise ValueError(f"MLflow takes no metric {', '.join(map(repr, sorted(self._refused)[:8]))}") from error

    def _log_one_by_one(self, metrics: Mapping[str, float], step: int) -> bool:
        """Log each metric alone, as MLflow rejects a whole step for one bad name; returns whether there is one."""
        import mlflow

        for name, value in metrics.items():
            try:
                mlflow.log_metric(name, value, step=step)
            except mlflow.MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                self._refused.add(name)
        return bool(self._refused)

    def close(self) -> None:
        import mlflow

        mlflow.end_run()


TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
