"""Peers on real ranks: they train as our engine does, and hold what their stage promises."""

import dataclasses
from typing import Any

import pytest
import torch

from rayzero.config.build import build
from rayzero.config.cell import CellConfig
from rayzero.errors import EngineError
from rayzero.records import Kind, RankReport
from rayzero.train.build import build_communicator
from rayzero.train.engines import build_any_engine, build_compute_only
from tests.ranks import Pools, RankContext
from tests.train.test_cell import run as run_with_signs

FP32_LOSS, BF16_LOSS = 1e-5, 2e-3
BF16 = {"name": "bf16", "params": "bf16"}
ENGINES = [("ddp", 0), ("zero_redundancy", 1), ("fsdp2", 2), ("fsdp2", 3)]


def config_of(engine: str, stage: int, *, accumulation: int = 1, **groups: Any) -> CellConfig:
    plain: dict[str, Any] = {
        "engine": {"name": engine},
        "zero": {"stage": stage},
        "data": {"kind": "synthetic", "global_batch": 8, "micro_batch": 4 // accumulation},
        "optimizer": {"lr": 1e-3},
        "run": {"num_steps": 4, "warmup_steps": 1, "probe": False},
    }
    plain["data"]["seq_len"] = 16
    return build({**plain, **groups})


def run(ctx: RankContext, config: CellConfig) -> RankReport:
    return run_with_signs(ctx, config)[0]


def losses_of(reports: list[RankReport]) -> list[float]:
    return [sample.loss for sample in reports[0].steps]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_peers_see_the_losses_of_our_engine(ranks: Pools, accumulation: int) -> None:
    ours = losses_of(ranks(2)(run, config_of("rayzero", 2, accumulation=accumulation)))
    for engine, stage in ENGINES:
        reports = ranks(2)(run, config_of(engine, stage, accumulation=accumulation))
        assert losses_of(reports) == pytest.approx(ours, rel=FP32_LOSS), f"{engine} {stage}"
        norms = [sample.grad_norm for sample in reports[0].steps]
        assert all(norm > 0 for norm in norms), engine


def test_fsdp2_keeps_an_fp32_master_beside_bf16_parameters(ranks: Pools) -> None:
    ours = losses_of(ranks(2)(run, config_of("rayzero", 3, precision=BF16, accumulation=2)))
    for stage in (2, 3):
        reports = ranks(2)(run, config_of("fsdp2", stage, precision=BF16, accumulation=2))
        assert losses_of(reports) == pytest.approx(ours, rel=BF16_LOSS)


def test_peers_hold_what_their_stage_promises(ranks: Pools) -> None:
    def bytes_by_kind(engine: str, stage: int, **groups: Any) -> dict[str, int]:
        report = ranks(2)(run, config_of(engine, stage, **groups))[0]
        assert not report.formula.entries
        assert not report.formula_transfers
        return {e.kind.value: e.num_bytes for e in report.holdings.entries}

    assert ranks(2)(run, config_of("ddp", 0, run={"probe": True}))[0].peak_bytes is None
    num_bytes = 4 * ranks(2)(run, config_of("rayzero", 0))[0].num_params
    ddp = bytes_by_kind("ddp", 0)
    assert (ddp["parameters"], ddp["gradients"], ddp["moments"]) == (
        num_bytes,
        num_bytes,
        2 * num_bytes,
    )
    one = bytes_by_kind("zero_redundancy", 1)
    assert one["parameters"] == num_bytes
    assert one["moments"] < 1.2 * num_bytes
    three = bytes_by_kind("fsdp2", 3)
    for kind, times in (("parameters", 0.5), ("gradients", 0.5), ("moments", 1.0)):
        assert three[kind] == pytest.approx(times * num_bytes, rel=0.01), kind


def test_uneven_rows_are_drawn_where_they_belong(ranks: Pools) -> None:
    config = config_of("fsdp2", 3, data={"kind": "synthetic", "global_batch": 6, "seq_len": 16})
    whole = ranks(3)(weights_at_start, config)[0]
    ours = ranks(3)(weights_at_start, dataclasses.replace(config, engine=RAYZERO.engine))[0]
    assert whole.keys() == ours.keys()
    assert all(torch.equal(whole[name], ours[name]) for name in ours)


RAYZERO = config_of("rayzero", 3)


def weights_at_start(ctx: RankContext, config: CellConfig) -> dict[str, Any]:
    comm = build_communicator(config.grid(ctx.world), torch.device("cpu"))
    with build_any_engine(config, comm, torch.device("cpu")) as engine:
        return dict(engine.full_state_dict())


def test_compute_alone_updates_a_share_and_sends_nothing(ranks: Pools) -> None:
    for precision in ({}, BF16):
        config = config_of("ddp", 0, precision=precision, accumulation=2)
        for before, after, held in ranks(2)(compute_alone, config):
            changed = [name for name in before if not torch.equal(before[name], after[name])]
            assert changed
            for name in changed:
                halves = (before[name] != after[name]).view(-1).chunk(2)
                assert sum(bool(half.any()) for half in halves) == 1, name
            # The output layer is the token embedding again.
            num_params = sum(before[name].numel() for name in before if name != "output.weight")
            master = num_params // 2 * 4 if precision else 0
            assert held.get(Kind.MASTER, 0) == pytest.approx(master, rel=0.01)
            assert held[Kind.MOMENTS] == pytest.approx(num_params * 4, rel=0.01)


def compute_alone(
    ctx: RankContext, config: CellConfig
) -> tuple[dict[str, Any], dict[str, Any], dict[Kind, int]]:
    comm = build_communicator(config.grid(ctx.world), torch.device("cpu"))
    with build_compute_only(config, comm, torch.device("cpu")) as engine:
        tokens = torch.arange(64).view(2, 32) + ctx.rank
        before = dict(engine.full_state_dict(all_ranks=True))
        sent = engine.ledger.total_transfers
        for last in (False, True):
            engine.backward(engine(tokens, tokens), last=last)
        engine.step()
        assert engine.ledger.total_transfers == sent
        held = {entry.kind: entry.num_bytes for entry in engine.holdings().entries}
        return before, dict(engine.full_state_dict(all_ranks=True)), held


def test_a_window_other_than_the_promised_one_is_refused(ranks: Pools) -> None:
    ranks(2)(misuse, config_of("ddp", 0, accumulation=2))


def misuse(ctx: RankContext, config: CellConfig) -> None:
    comm = build_communicator(config.grid(ctx.world), torch.device("cpu"))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with build_any_engine(config, comm, torch.device("cpu")) as engine:
        with pytest.raises(EngineError, match="built for 2 micro-batches"):
            engine.backward(engine(tokens, tokens), last=True)
        with pytest.raises(EngineError, match="weight=2"):
            engine.backward(engine(tokens, tokens), last=False, weight=2.0)
        with pytest.raises(EngineError, match="0 of 2 backwards"):
            engine.step()
