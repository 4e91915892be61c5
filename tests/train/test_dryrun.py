"""The dry run: byte for byte the formula's and the real ranks', at any size."""

import dataclasses
import resource
from collections import Counter
from typing import Any

import pytest
import torch

from rayzero.config.build import build
from rayzero.config.cell import CellConfig
from rayzero.config.dryrun import DryRunConfig
from rayzero.engine import zero2
from rayzero.engine.flats import Flat
from rayzero.engine.partition import find_units
from rayzero.engine.zero3 import Zero3
from rayzero.errors import CombinationError, ConfigError
from rayzero.records import DryRunReport, Holdings, Kind, MemoryPoint, Phase, RankReport, Where
from rayzero.theory.memory import holdings_of
from rayzero.theory.question import question_of
from rayzero.train.build import build_communicator, build_engine_on
from rayzero.train.cell import make_trainer
from rayzero.train.data import load_data
from rayzero.train.dryrun import dry_run
from rayzero.train.module_watch import ModuleWatch
from rayzero.train.probe import peak_bytes
from rayzero.train.timeline import trace_step
from tests.ranks import Pools, RankContext
from tests.train.test_cell import config_of, run

PAPER = {"name": "paper", "params": "bf16", "reduce": "bf16", "accumulate": "bf16"}
SIZES = {
    "7.5B": {"num_layers": 36, "hidden": 4096, "num_heads": 32, "vocab_size": 51200},
    "13B": {
        "flavour": "llama",
        "num_layers": 40,
        "hidden": 5120,
        "num_heads": 40,
        "ffn_hidden": 13824,
        "vocab_size": 32000,
        "tied_output": False,
    },
    "128B": {"num_layers": 159, "hidden": 8192, "num_heads": 64, "vocab_size": 51200},
    "1T": {"num_layers": 128, "hidden": 25600, "num_heads": 160, "vocab_size": 51200},
}
Timeline = tuple[MemoryPoint, ...]
KindBytes = dict[tuple[Kind, Where], tuple[int, int]]


def played(config: CellConfig, *, world: int, rank: int, trace: bool) -> DryRunReport:
    asked = DryRunConfig(world=world, rank=rank, trace=trace)
    return dry_run(dataclasses.replace(config, dryrun=asked))


def by_kind(holdings: Holdings, *without: Kind) -> KindBytes:
    return {
        (e.kind, e.where): (e.num_bytes, e.padding_bytes)
        for e in holdings.entries
        if e.kind not in without
    }


def check_formula(report: DryRunReport) -> None:
    assert by_kind(report.after_init) == by_kind(report.formula_after_init)
    assert by_kind(report.after_backward) == by_kind(report.formula_after_backward)
    assert by_kind(report.after_step) == by_kind(report.formula_after_step)
    assert Counter(report.transfers) == Counter(report.formula_transfers)


def check_ranks(dry: DryRunReport, real: RankReport, config: CellConfig) -> None:
    """Hold a dry run against the same rank run for real: all but the scratch is equal."""
    assert by_kind(dry.after_step, Kind.BUCKETS) == by_kind(real.holdings, Kind.BUCKETS)
    with_scratch = question_of(config, world=dry.world, rank=dry.rank, carrier=real.carrier)
    scratch = holdings_of(with_scratch).bytes_of(Kind.BUCKETS) - dry.formula_after_step.bytes_of(
        Kind.BUCKETS
    )
    assert dry.after_step.bytes_of(Kind.BUCKETS) + scratch == real.holdings.bytes_of(Kind.BUCKETS)
    assert Counter(dry.transfers) == Counter(real.transfers)


@pytest.mark.parametrize(
    ("world", "tp", "offload"),
    [
        (2, 1, "none"),
        (3, 1, "none"),
        (4, 1, "none"),
        (2, 2, "none"),
        (4, 2, "none"),
        (2, 1, "host"),
        (4, 2, "host"),
    ],
)
def test_dry_run_formula_and_real_ranks_are_equal_to_the_byte(
    ranks: Pools, world: int, tp: int, offload: str
) -> None:
    for stage in range(4):
        config = config_of(
            zero={"stage": stage, "bucket_elements": 20_000},
            parallel={"tp": tp, "sequence": offload == "host"},
            model={"dropout": 0.1, "checkpointing": "full"} if offload == "host" else {},
            data={"micro_batch": 6 // (world // tp)},
            offload={"optimizer": offload},
            run={"num_steps": 1},
        )
        reports = [report for report, _ in ranks(world)(run, config)]
        for real in (reports[0], reports[-1]):
            dry = played(config, world=world, rank=real.rank, trace=False)
            check_formula(dry)
            check_ranks(dry, real, config)


@pytest.mark.parametrize(
    ("model", "world", "stage", "tp"),
    [
        ("7.5B", 64, 3, 1),
        pytest.param("13B", 8, 2, 1, marks=pytest.mark.slow),
        pytest.param("13B", 8, 1, 8, marks=pytest.mark.slow),
        pytest.param("128B", 256, 3, 1, marks=pytest.mark.slow),
    ],
)
def test_dry_run_equals_the_formula_at_the_papers_sizes(
    model: str, world: int, stage: int, tp: int
) -> None:
    report = played(at_size(model, world, stage, tp), world=world, rank=world - 1, trace=False)
    check_formula(report)


@pytest.mark.slow
def test_a_trillion_parameters_on_1024_ranks_take_seconds_and_no_memory() -> None:
    report = played(at_size("1T", 1024, 3, 1), world=1024, rank=1023, trace=False)
    check_formula(report)
    assert report.num_params > 10**12
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1 << 20


def at_size(model: str, world: int, stage: int, tp: int) -> CellConfig:
    return config_of(
        model=SIZES[model],
        zero={"stage": stage, "bucket_elements": 5 * 10**8},
        parallel={"tp": tp},
        precision=PAPER,
        data={"global_batch": world // tp, "seq_len": 128},
    )


def traced(ctx: RankContext, config: CellConfig) -> tuple[Timeline, int]:
    """Trace a steady step of a real rank, and measure the next step's peak as a cell does."""
    device = torch.device("cpu")
    comm = build_communicator(config.grid(ctx.world), device)
    with build_engine_on(config, comm) as engine:
        data = load_data(config.data, vocab_size=config.model.vocab_size)
        trainer = make_trainer(config, engine, data, ctx.world, device)
        watch = ModuleWatch(engine.module, find_units(engine.module, config.zero.units))
        trainer.step()
        timeline = trace_step(engine, watch, trainer.step)
        watch.close()
        return timeline, peak_bytes(device, engine.held_tensors(), trainer.step)


def activations(timeline: Timeline) -> list[tuple[Phase, str, int]]:
    """Tell where forward and backward came by and what was alive there beside what is held.

    Not the step: there CPU ranks widen gradients for the norm, which CUDA and dry runs do not.
    """
    return [
        (point.phase, point.unit, point.activations_bytes)
        for point in timeline
        if point.phase in (Phase.FORWARD, Phase.BACKWARD)
    ]


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("flavour", ["gpt2", "llama"])
def test_activations_and_their_peak_are_those_of_a_real_rank(
    ranks: Pools, flavour: str, checkpointing: str
) -> None:
    for stage in range(4):
        config = config_of(
            model={"flavour": flavour, "checkpointing": checkpointing},
            zero={"stage": stage, "overlap": False},
            data={"global_batch": 8, "seq_len": 64},
        )
        timeline, measured_bytes = ranks(2)(traced, config)[1]
        dry = played(config, world=2, rank=1, trace=True)
        assert activations(dry.timeline) == activations(timeline)
        real = max(timeline, key=lambda point: point.total_bytes)
        assert dry.peak is not None
        assert (dry.peak.phase, dry.peak.unit) == (real.phase, real.unit)
        # Between real ranks the transport takes scratch, which theory counts as buckets.
        scratch = real.bytes_by_kind["buckets"] - dry.peak.bytes_by_kind.get("buckets", 0)
        assert dry.peak.total_bytes + scratch == measured_bytes


def test_the_peak_names_its_phase_and_unit_and_the_timeline_visits_all() -> None:
    config = config_of(zero={"stage": 3}, model={"num_layers": 3}, data={"seq_len": 256})
    report = played(config, world=4, rank=2, trace=True)
    assert report.peak is not None
    assert report.peak.phase in (Phase.FORWARD, Phase.BACKWARD)
    visited = [(p.phase, p.unit) for p in report.timeline if p.unit.startswith("blocks")]
    forward = [(Phase.FORWARD, f"blocks.{i}") for i in (0, 1, 2)]
    backward = [(Phase.BACKWARD, f"blocks.{i}") for i in (2, 1, 0)]
    assert visited == forward + backward
    assert Phase.STEP in {point.phase for point in report.timeline}


def test_bytes_on_the_host_are_not_in_the_devices_timeline() -> None:
    peaks = {}
    for place in ("none", "host"):
        config = config_of(zero={"stage": 2}, offload={"optimizer": place})
        report = played(config, world=4, rank=0, trace=True)
        check_formula(report)
        assert report.peak is not None
        peaks[place] = report.peak.bytes_by_kind
    assert "moments" in peaks["none"]
    assert "moments" not in peaks["host"]


def test_states_on_disk_are_counted_without_a_file(tmp_path: Any) -> None:
    folder = tmp_path / "states"
    for params in ("none", "disk"):
        offload = {"optimizer": "disk", "params": params, "folder": str(folder)}
        report = played(config_of(zero={"stage": 3}, offload=offload), world=4, rank=0, trace=False)
        check_formula(report)
        assert report.after_step.bytes_of(Kind.MOMENTS, where=Where.DISK)
        parameters = report.after_step.bytes_of(Kind.PARAMETERS, where=Where.DISK)
        assert (parameters > 0) == (params == "disk")
    assert not folder.exists()


def test_a_stage_that_drops_a_gather_changes_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(zero={"stage": 2})
    whole = played(config, world=4, rank=0, trace=False)
    check_formula(whole)

    def forgetful(parts: Any) -> None:
        last = dataclasses.replace(parts, trained=parts.trained[:-1])
        gather(last)

    gather = zero2.all_gather_updated
    monkeypatch.setattr(zero2, "all_gather_updated", forgetful)
    broken = played(config, world=4, rank=0, trace=False)
    lost = Counter(whole.transfers) - Counter(broken.transfers)
    assert [(t.op, t.phase) for t in lost] == [("all_gather", Phase.STEP)]


def test_a_stage_that_keeps_units_whole_changes_the_dry_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(zero={"stage": 3})
    before = played(config, world=4, rank=0, trace=True).peak
    monkeypatch.setattr(Flat, "free", lambda self: None)
    monkeypatch.setattr(Zero3, "end_backward", lambda self: None)
    after = played(config, world=4, rank=0, trace=True).peak
    assert before is not None
    assert after is not None
    assert after.bytes_by_kind["gathered"] > before.bytes_by_kind.get("gathered", 0)


def test_a_users_model_of_any_size_is_run_without_memory() -> None:
    config = user_config("Plain", width=30_000)
    for stage in range(4):
        staged = dataclasses.replace(config, zero=dataclasses.replace(config.zero, stage=stage))
        report = played(staged, world=8, rank=7, trace=True)
        check_formula(report)
        assert report.num_params > 900_000_000


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("Peeking", r"asks a tensor for its value .*_local_scalar_dense.*; keep \.item\(\)"),
        ("Foreign", r"no kernel for sizes alone \(rayzero_tests\.twice.*register_fake"),
        ("Outside", r"reads a tensor's memory \(.*numpy"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_by_its_modules_name(
    model: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"through module 'hidden\.1': it .*{reason}"):
        played(user_config(model, width=8), world=2, rank=0, trace=True)


def user_config(name: str, *, width: int) -> CellConfig:
    factory = f"tests.train.user_models:{name}"
    return config_of(
        model={"factory": factory, "factory_args": {"width": width}}, data={"global_batch": 8}
    )


def test_impossible_degrees_and_ranks_are_refused() -> None:
    with pytest.raises(CombinationError, match=r"parallel\.tp=4 does not divide the 6 ranks"):
        played(config_of(parallel={"tp": 4}), world=6, rank=0, trace=False)
    with pytest.raises(ConfigError, match=r"dryrun\.rank=8 is outside dryrun\.world=8"):
        build({"dryrun": {"world": 8, "rank": 8}})
