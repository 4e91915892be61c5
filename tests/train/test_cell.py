"""One rank's cell on real ranks: losses agree, and bytes held and sent equal theory exactly."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rayzero.config.build import build
from rayzero.config.cell import CellConfig
from rayzero.dist.process import Seat
from rayzero.errors import DataError
from rayzero.records import Progress, RankReport
from rayzero.train.cell import run_rank
from tests.ranks import Pools, RankContext


@dataclasses.dataclass
class PoolMember:
    """A seat on a rank of the pool, and the signs of life it left."""

    seat: Seat
    signs: list[Progress]

    def progress(self, sign: Progress) -> None:
        self.signs.append(sign)


def seat_of(ctx: RankContext) -> Seat:
    return Seat(
        rank=ctx.rank, world=ctx.world, node="here", device="cpu", store_host="", store_port=0
    )


def run(ctx: RankContext, config: CellConfig) -> tuple[RankReport, list[Progress]]:
    member = PoolMember(seat=seat_of(ctx), signs=[])
    return run_rank(member, config), member.signs


def config_of(**groups: dict[str, Any]) -> CellConfig:
    plain: dict[str, Any] = {
        "data": {"kind": "synthetic", "global_batch": 12, "seq_len": 16},
        "run": {"num_steps": 2, "warmup_steps": 1, "probe": False},
    }
    for group, keys in groups.items():
        plain[group] = {**plain.get(group, {}), **keys}
    return build(plain)


def check_theory(reports: list[RankReport]) -> None:
    for report in reports:
        held = {(e.kind, e.where): e for e in report.holdings.entries}
        formula = {(e.kind, e.where): e for e in report.formula.entries}
        assert held == formula, f"rank {report.rank}"
        assert Counter(report.transfers) == Counter(report.formula_transfers), f"rank {report.rank}"


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("world", "tp"), [(2, 1), (3, 1), (4, 1), (2, 2), (4, 2)])
def test_bytes_held_and_sent_equal_theory_exactly(
    ranks: Pools, world: int, tp: int, accumulation: int
) -> None:
    losses = {}
    for stage in range(4):
        config = config_of(
            zero={"stage": stage, "bucket_elements": 20_000},
            parallel={"tp": tp},
            data={"micro_batch": 12 // (world // tp) // accumulation},
        )
        reports = [report for report, _ in ranks(world)(run, config)]
        check_theory(reports)
        losses[stage] = [s.loss for s in reports[0].steps]
        if stage < 3:
            assert len({r.weights_checksum for r in reports}) == tp
    for stage in range(4):
        assert losses[stage] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize(
    ("stage", "tp", "sequence", "model"),
    [
        (0, 2, True, {"checkpointing": "full", "fused_qkv": True, "label_smoothing": 0.1}),
        (1, 4, True, {"flavour": "llama", "checkpointing": "full", "dropout": 0.1}),
        (2, 2, True, {"flavour": "llama", "checkpointing": "selective", "vocab_size": 255}),
        (3, 2, False, {"checkpointing": "full", "dropout": 0.1, "vocab_size": 255}),
        (3, 4, True, {"num_kv_heads": 2, "vocab_size": 258, "tied_output": False}),
    ],
)
def test_theory_holds_with_every_way_to_cut(
    ranks: Pools, stage: int, tp: int, sequence: bool, model: dict[str, Any]
) -> None:
    config = config_of(
        zero={"stage": stage, "bucket_elements": 20_000},
        model=model,
        parallel={"tp": tp, "sequence": sequence},
        data={"micro_batch": tp if stage > 1 else 3 * tp},
        run={"probe": stage < 2},
        optimizer={"max_grad_norm": 0.5},
    )
    reports = [report for report, _ in ranks(4)(run, config)]
    check_theory(reports)
    norms = [s.grad_norm for s in reports[0].steps]
    assert all([s.grad_norm for s in r.steps] == norms for r in reports)
    if stage < 3:
        assert len({r.weights_checksum for r in reports}) == tp
    if stage < 2:
        assert all(r.peak_bytes and r.peak_bytes > r.holdings.bytes_of() for r in reports)


@pytest.mark.parametrize("precision", ["bf16", "paper"])
@pytest.mark.parametrize("flavour", ["gpt2", "llama"])
def test_theory_holds_in_mixed_precision(ranks: Pools, precision: str, flavour: str) -> None:
    narrow = "bf16" if precision == "paper" else "fp32"
    for stage in range(4):
        config = config_of(
            zero={"stage": stage, "overlap": stage % 2 == 0},
            model={"flavour": flavour, "tied_output": flavour == "gpt2", "checkpointing": "full"},
            precision={
                "name": precision,
                "params": "bf16",
                "reduce": narrow,
                "accumulate": narrow,
            },
            parallel={"tp": 2},
        )
        check_theory([report for report, _ in ranks(4)(run, config)])


@pytest.mark.parametrize("tp", [1, 2])
def test_hybrid_sharding_equals_theory_and_full_sharding(ranks: Pools, tp: int) -> None:
    reference = None
    for stage in range(4):
        config = config_of(
            zero={"stage": stage, "bucket_elements": 20_000},
            parallel={"replicate": 2, "tp": tp},
            data={"micro_batch": 1},
        )
        reports = [report for report, _ in ranks(4)(run, config)]
        check_theory(reports)
        losses = [s.loss for s in reports[0].steps]
        reference = reference or losses
        assert losses == pytest.approx(reference, rel=1e-6)


@pytest.mark.parametrize("elements", [64, 256, 10**6])
def test_theory_holds_with_persistent_parameters(ranks: Pools, elements: int) -> None:
    config = config_of(zero={"stage": 3, "persistence_elements": elements}, parallel={"tp": 2})
    check_theory([report for report, _ in ranks(4)(run, config)])


class DataByRank:
    """A user's mistake: each rank of the world reads sequences of its own."""

    fingerprint = "the same everywhere"

    def batch(self, step: int, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
        tokens = torch.randint(256, (len(positions), 17), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    validation = None


def data_by_rank() -> DataByRank:
    return DataByRank()


def refused(ctx: RankContext, config: CellConfig) -> str:
    with pytest.raises(DataError) as caught:
        run(ctx, config)
    return str(caught.value)


def test_other_sequences_inside_a_tp_group_are_refused(ranks: Pools) -> None:
    """T11."""
    config = config_of(
        data={"kind": "factory", "factory": f"{__name__}:data_by_rank"}, parallel={"tp": 2}
    )
    for message in ranks(4)(refused, config):
        assert "tensor-parallel group got different sequences" in message


def test_a_rank_leaves_signs_of_life_and_finds_its_peak(ranks: Pools) -> None:
    config = config_of(run={"probe": True, "validate": True}, zero={"stage": 3})
    for report, signs in ranks(2)(run, config):
        assert [s.step for s in signs] == [1, 2, 3]
        assert report.peak_bytes is not None
        assert report.peak_bytes > report.holdings.bytes_of()
        assert report.validation_loss == pytest.approx(5.55, abs=0.3)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_theory_holds_with_offload(ranks: Pools, tmp_path: Path, place: str) -> None:
    for stage in range(4):
        for fraction in (1.0, 0.5):
            config = config_of(
                zero={"stage": stage, "bucket_elements": 20_000},
                offload={"optimizer": place, "folder": str(tmp_path), "fraction": fraction},
                parallel={"tp": 2},
            )
            check_theory([report for report, _ in ranks(4)(run, config)])


@pytest.mark.parametrize("place", ["host", "disk"])
def test_theory_holds_with_parameters_away(ranks: Pools, tmp_path: Path, place: str) -> None:
    for optimizer, params in (("none", "fp32"), (place, "fp32"), (place, "bf16")):
        config = config_of(
            zero={"stage": 3, "persistence_elements": 64},
            offload={"optimizer": optimizer, "params": place, "folder": str(tmp_path)},
            precision={"params": params},
        )
        check_theory([report for report, _ in ranks(2)(run, config)])
    assert not list(tmp_path.iterdir())


def test_a_step_of_several_micro_batches_peaks_where_one_does(ranks: Pools) -> None:
    for stage in (0, 3):
        peaks: dict[int, list[int]] = {}
        for global_batch in (4, 12):
            config = config_of(
                run={"probe": True},
                zero={"stage": stage, "overlap": False},
                data={"micro_batch": 2, "global_batch": global_batch},
            )
            reports = [report for report, _ in ranks(2)(run, config)]
            check_theory(reports)
            peaks[global_batch] = [report.peak_bytes or 0 for report in reports]
        # The other two micro-batches: inputs and targets of 2 x 16 tokens, and a loss.
        further = 2 * (2 * (2 * 16 * 8) + 4)
        assert peaks[12] == [peak + further for peak in peaks[4]]
