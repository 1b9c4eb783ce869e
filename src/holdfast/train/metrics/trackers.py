"""Owns what each tracker of experiments is told: one run there for all attempts of a run here, and each step once.

A tracker is asked for by name and imported then; holdfast needs none of them. Each has its own way with steps that are
done again after a restart, which is said in its class. Refuses to own when it is called, and what happens when it
fails (async_tracker.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

TAG = "holdfast.run"
"""By which MLflow finds the run again."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Which run it is that is told of."""

    run: str
    """The same for every attempt; letters, digits, `-`, `_` and `.`."""
    resumed_step: int
    """The step that this process went on from."""
    folder: Path
    """Where a tracker that writes files may do so; the same for every attempt."""


class Tracker(Protocol):
    """One of them; all calls come from one thread, and may take their time."""

    def open(self, tracked_run: TrackedRun) -> None:
        """Go on with the run, or begin it."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell it of a step."""
        ...

    def close(self) -> None:
        """See to it that all is where it belongs."""
        ...


class TensorBoard:
    """Event files in FOLDER/tensorboard/RUN; of a step that is done again the new figures are shown."""

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
    """The run with our id, in the project that WANDB_PROJECT names; or the one the program has begun itself.

    Of a step that is done again the first figures stay: W&B takes no step below the last. Offline each attempt writes
    a folder, and `wandb sync` makes them one run by their id.
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
    """The run that has our tag, in the experiment that MLFLOW_EXPERIMENT_NAME names, at MLFLOW_TRACKING_URI.

    Of a step that is done again the first figures stay: what the run has is looked up, and not sent again.
    """

    def open(self, tracked_run: TrackedRun) -> None:
        import mlflow

        self._refused: set[str] = set()
        """Names of metrics that it does not take."""
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
        """MLflow refuses all metrics of a step for the name of one; whether there is such a name."""
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
