"""The trials of the claims on the pool of gloo ranks: the same work as through Ray, sooner."""

from dataclasses import replace

from rayzero.config.build import build
from rayzero.config.cell import CellConfig
from rayzero.records import Alteration, Carrier, Observation, RankReport
from rayzero.run import rehearse
from rayzero.studies.claims.lab import AT_13B, Lab
from rayzero.studies.claims.trial import SMALL, plan
from rayzero.theory.memory import cell_holdings
from rayzero.train.cell import run_rank
from rayzero.train.observe import observe_rank
from tests.ranks import Pools, RankContext
from tests.train.test_cell import PoolMember, seat_of

BASE = build({"data": {"kind": "synthetic"}})


def do_trial(
    ctx: RankContext, config: CellConfig, alteration: Alteration | None
) -> RankReport | Observation:
    """Do one rank's part of a trial."""
    member = PoolMember(seat=seat_of(ctx), signs=[])
    if alteration is not None:
        return observe_rank(member, config, alteration)
    return run_rank(member, config)


def filled_lab(ranks: Pools) -> Lab:
    """Run every trial of the plan; for the dry run of 13B, which takes long, put in theory's bytes.

    That a dry run holds what theory says is tests/train/test_dryrun.py's to show.
    """
    lab = Lab()
    for trial in plan():
        results = ranks(trial.world)(do_trial, trial.config(BASE), trial.alteration)
        kept = lab.measured if trial.alteration is None else lab.observed
        kept[trial] = results
    held = cell_holdings(AT_13B.config(BASE), AT_13B.world, rank=0, carrier=Carrier.NATIVE)
    small = replace(AT_13B.config(BASE), model=SMALL)
    lab.dry[AT_13B] = replace(rehearse(small), after_step=held)
    return lab
