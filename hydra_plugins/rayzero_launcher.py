"""Hydra's launcher plugin: run the jobs of a sweep one after the other; no job ends the sweep."""

import traceback
from collections.abc import Sequence
from typing import Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from rayzero.sweep.choices import quote_choice

ConfigStore.instance().store(
    group="hydra/launcher",
    name="rayzero",
    node={"_target_": "hydra_plugins.rayzero_launcher.RayzeroLauncher"},
)


class NumberedChoices:
    """Hydra's config loader, for sweepers that write `stage=2`. See [Note: numbered options]."""

    def __init__(self, loader: ConfigLoader) -> None:
        self._loader = loader

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """Compose one job's config."""
        return self._loader.load_sweep_config(master_config, [*map(quote_choice, sweep_overrides)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class RayzeroLauncher(Launcher):
    """Run jobs in this process, in order; a job that raises counts as an infinite objective."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what Hydra hands over; the sweeper composes through the same context."""
        loader = NumberedChoices(hydra_context.config_loader)
        hydra_context.config_loader = cast(ConfigLoader, loader)
        self._context = hydra_context
        self._task = task_function
        self._config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Compose all jobs, so that bad input ends here; then run them."""
        configs = [
            self._compose(list(overrides), initial_job_idx + index)
            for index, overrides in enumerate(job_overrides)
        ]
        expect = getattr(self._task, "expect", None)
        if expect is not None:
            expect(self._config, configs)
        return [self._run(config) for config in configs]

    def _compose(self, overrides: list[str], index: int) -> DictConfig:
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        with open_dict(config):
            config.hydra.job.id = str(index)
            config.hydra.job.num = index
        return config

    def _run(self, config: DictConfig) -> JobReturn:
        # Hydra resolves ${hydra:...} through singletons that run_job changes.
        state = Singleton.get_state()
        try:
            job = run_job(
                task_function=self._task,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
                hydra_context=self._context,
            )
        finally:
            Singleton.set_state(state)
        if job.status is JobStatus.FAILED:
            traceback.print_exception(job._return_value)
            job.return_value, job.status = float("inf"), JobStatus.COMPLETED
        return job
