"""From what the ranks report to one row of matrix.csv; what was not measured stays None."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rayzero.config.cell import CellConfig, CellGroups
from rayzero.config.zero import OffloadConfig, Place
from rayzero.errors import DataError
from rayzero.records import CellRow, Kind, RankReport, Status, StepSample, Transfer, Where
from rayzero.theory.counts import training_flops

TERA = 1e12


def asked_row(groups: CellGroups, *, status: Status, reason: str = "", dp: int | None) -> CellRow:
    """Say what a cell asks; dp is None where the ranks cannot be laid out so."""
    return CellRow(
        cell=cell_name(groups, dp=dp),
        status=status.value,
        reason=reason,
        engine=groups.engine.name.value,
        stage=groups.zero.stage,
        offload=offload_text(groups.offload),
        tp=groups.parallel.tp,
        replicate=groups.parallel.replicate,
        precision=groups.precision.name,
        model=groups.model.name,
        global_batch=groups.data.global_batch,
        seq_len=groups.data.seq_len,
        cluster_env=" ".join(f"{key}={value}" for key, value in groups.cluster.env.items()),
    )


def planned_row(config: CellConfig, world: int, *, status: Status, reason: str = "") -> CellRow:
    """Say what a cell asks, with its layout over `world` ranks."""
    grid, batching = config.grid(world), config.batching(world)
    return replace(
        asked_row(config, status=status, reason=reason, dp=grid.dp),
        shard=grid.shard,
        micro_batch=batching.micro_batch,
        accumulation=batching.accumulation,
    )


def measured_row(
    config: CellConfig, reports: Sequence[RankReport], *, devices: str, wall_s: float
) -> CellRow:
    """Fill a row from all ranks' reports; bytes are the maximum over ranks."""
    samples = slowest_steps(reports)
    timed = [sample.step_s for sample in samples if sample.timed]
    build_s = max(report.build_s for report in reports)
    made_here = samples[reports[0].restored_steps :]
    row = replace(
        planned_row(config, len(reports), status=Status.OK),
        num_params=reports[0].num_params,
        steps=len(timed),
        loss_first=samples[0].loss,
        loss_last=samples[-1].loss,
        validation_loss=reports[0].validation_loss,
        data_fingerprint=_same_data(reports),
        devices=devices,
        wall_s=wall_s,
        overhead_s=wall_s - build_s - sum(sample.step_s for sample in made_here),
    )
    row = _with_memory(_with_speed(row, config, timed, num_ranks=len(reports)), reports)
    return row if config.engine.name.is_peer else _with_theory(row, reports)


def slowest_steps(reports: Sequence[RankReport]) -> tuple[StepSample, ...]:
    """Return the series of the first rank, each step with the time of its slowest rank."""
    return tuple(
        replace(samples[0], step_s=max(sample.step_s for sample in samples))
        for samples in zip(*(report.steps for report in reports), strict=True)
    )


def cell_name(groups: CellGroups, *, dp: int | None) -> str:
    """Name a cell like s2_tp1_dp4_bf16, with what else is not the usual."""
    words = [f"s{groups.zero.stage}", f"tp{groups.parallel.tp}"]
    words += [] if dp is None else [f"dp{dp}"]
    words.append(groups.precision.name)
    usual = CellGroups()
    if groups.parallel.replicate != usual.parallel.replicate:
        words.append(f"replicate{groups.parallel.replicate}")
    if groups.offload.optimizer is not Place.NONE:
        words.append(f"optimizer_{groups.offload.optimizer.value}")
    if groups.offload.params is not Place.NONE:
        words.append(f"params_{groups.offload.params.value}")
    if groups.engine.name is not usual.engine.name:
        words.append(groups.engine.name.value)
    if groups.model.name != usual.model.name:
        words.append(groups.model.name)
    return "_".join(words)


def offload_text(offload: OffloadConfig) -> str:
    """Say what leaves the device: none, optimizer=host, optimizer=host params=disk."""
    away = {"optimizer": offload.optimizer, "params": offload.params}
    words = [f"{what}={place.value}" for what, place in away.items() if place is not Place.NONE]
    return " ".join(words) or "none"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    needed = -(-share * len(ordered) // 1)
    return ordered[max(0, int(needed) - 1)]


def _with_speed(
    row: CellRow, config: CellConfig, timed: Sequence[float], *, num_ranks: int
) -> CellRow:
    step_s = statistics.median(timed)
    num_tokens = config.data.global_batch * config.data.seq_len
    tflops, peak = None, config.cluster.hardware.device_tflops
    if config.model.factory is None:
        flops = training_flops(config.model, seq_len=config.data.seq_len, num_tokens=num_tokens)
        tflops = flops.model / step_s / num_ranks / TERA
    return replace(
        row,
        step_s_median=step_s,
        step_s_p95=percentile(timed, 0.95),
        tokens_per_s=num_tokens / step_s,
        tflops_per_rank=tflops,
        mfu=None if tflops is None or peak is None else tflops / peak,
    )


def _with_memory(row: CellRow, reports: Sequence[RankReport]) -> CellRow:
    def held(*kinds: Kind) -> int:
        return max(report.holdings.bytes_of(*kinds) for report in reports)

    return replace(
        row,
        peak_bytes=_max_or_none([report.peak_bytes for report in reports]),
        peak_host_bytes=_max_or_none([report.peak_host_bytes for report in reports]),
        parameters_bytes=held(Kind.PARAMETERS),
        gradients_bytes=held(Kind.GRADIENTS),
        master_bytes=held(Kind.MASTER),
        moments_bytes=held(Kind.MOMENTS),
        module_buffers_bytes=held(Kind.MODULE_BUFFERS),
        activations_bytes=_max_or_none([_activations(report) for report in reports]),
    )


def _activations(report: RankReport) -> int | None:
    """Peak minus holdings on the device; on a machine without accelerator that is all of them."""
    if report.peak_bytes is None:
        return None
    return report.peak_bytes - report.holdings.bytes_of(where=Where.DEVICE)


def _with_theory(row: CellRow, reports: Sequence[RankReport]) -> CellRow:
    """Add what a peer does not show: its buffers, its traffic, and formulas for them."""
    return replace(
        row,
        communication_bytes=max(
            report.holdings.bytes_of(Kind.BUCKETS, Kind.GATHERED, Kind.STAGING)
            for report in reports
        ),
        formula_bytes=max(report.formula.bytes_of() for report in reports),
        transport=reports[0].carrier.value,
        sent_bytes=max(_sent(report.transfers) for report in reports),
        formula_sent_bytes=max(_sent(report.formula_transfers) for report in reports),
    )


def _sent(transfers: Iterable[Transfer]) -> int:
    return sum(transfer.sent_bytes for transfer in transfers)


def _same_data(reports: Sequence[RankReport]) -> str:
    seen = {report.data_fingerprint for report in reports}
    if len(seen) > 1:
        each = ", ".join(f"rank {r.rank} on {r.node}: {r.data_fingerprint}" for r in reports)
        raise DataError(
            f"data.path gives other data on some ranks ({each}); copy the same files to all nodes"
        )
    return seen.pop()


def _max_or_none(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
