"""End the runs that a killed driver left open."""

from mlflow.entities import ViewType

from rayzero.tracking.provenance import driver_tags, is_dead_driver
from rayzero.tracking.store import Store
from rayzero.tracking.tracker import End

PAGE = 500


def recover(store: Store) -> list[str]:
    """Mark running runs KILLED whose driver, on this host, is gone; return their ids."""
    host = driver_tags()["host"]
    with store.writing() as client:
        experiments = [
            e.experiment_id for e in client.search_experiments(view_type=ViewType.ACTIVE_ONLY)
        ]
        running = client.search_runs(
            experiments,
            filter_string=f"attributes.status = 'RUNNING' and tags.host = '{host}'",
            max_results=PAGE,
        )
        dead = [run.info.run_id for run in running if is_dead_driver(run.data.tags)]
        for run_id in dead:
            client.set_tag(run_id, "reason", "the driver ended without closing this run")
            client.set_terminated(run_id, End.KILLED.value)
    return dead
