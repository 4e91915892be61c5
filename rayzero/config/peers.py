"""What a peer engine can be asked for: its ZeRO stages, and what is not in its nature."""

from collections.abc import Mapping
from dataclasses import dataclass

from rayzero.config.checks import fit
from rayzero.config.engine import EngineName, OnNonfinite
from rayzero.config.parallel import ParallelConfig
from rayzero.config.precision import Dtype, PrecisionConfig
from rayzero.config.zero import OffloadConfig, Place, ZeroConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Nature:
    """stages: which ZeRO stages it is. keeps_master: weights may be narrower than their master."""

    stages: tuple[int, ...]
    keeps_master: bool


NATURES: Mapping[EngineName, Nature] = {
    EngineName.DDP: Nature(stages=(0,), keeps_master=False),
    EngineName.ZERO_REDUNDANCY: Nature(stages=(1,), keeps_master=False),
    EngineName.FSDP2: Nature(stages=(2, 3), keeps_master=True),
    EngineName.DEEPSPEED: Nature(stages=(1, 2, 3), keeps_master=True),
}


def check_peer(
    name: EngineName,
    *,
    zero: ZeroConfig,
    parallel: ParallelConfig,
    offload: OffloadConfig,
    on_nonfinite: OnNonfinite,
) -> None:
    """Raise CombinationError where the peer is no such engine; rayzero's own passes."""
    if name is EngineName.RAYZERO:
        return
    stages = NATURES[name].stages
    fit(
        zero.stage in stages,
        f"engine={name.value} is ZeRO stage {' or '.join(map(str, stages))}, found "
        f"stage={zero.stage}; set stage={stages[0]}, or engine=rayzero for every stage",
    )
    for key, found, needed in (
        ("parallel.tp", parallel.tp, 1),
        ("parallel.replicate", parallel.replicate, 1),
        ("parallel.sequence", parallel.sequence, False),
        ("offload.optimizer", offload.optimizer.value, Place.NONE.value),
        ("offload.params", offload.params.value, Place.NONE.value),
        ("zero.persistence_elements", zero.persistence_elements, 0),
    ):
        fit(
            found == needed,
            f"{key}={found} with engine={name.value}: peers run plain data parallelism; "
            f"set {key}={needed}, or engine=rayzero",
        )
    fit(
        on_nonfinite is not OnNonfinite.SKIP,
        f"engine.on_nonfinite=skip with engine={name.value}: a peer steps anyway; "
        "set engine.on_nonfinite=ignore, or engine=rayzero",
    )


def check_peer_precision(name: EngineName, precision: PrecisionConfig) -> None:
    """Raise CombinationError for dtypes the peer has not; rayzero's own engine has all.

    A peer without master weights runs with all kinds in the dtype of precision.params.
    """
    if name is EngineName.RAYZERO:
        return
    fit(
        precision.loss_scale is None and precision.params is not Dtype.FP16,
        f"precision={precision.name} with engine={name.value}: peers run here without a loss "
        "scale, which fp16 needs; use precision=bf16, or engine=rayzero",
    )
    fit(
        not precision.keep_fp32,
        f"precision.keep_fp32={precision.keep_fp32} with engine={name.value}: a peer has one "
        "dtype for all parameters; set precision.keep_fp32=[], or engine=rayzero",
    )
    if not NATURES[name].keeps_master:
        return
    kinds = {"moments": precision.moments}
    if name is EngineName.FSDP2:
        kinds["accumulate"] = precision.accumulate
    for kind, found in kinds.items():
        fit(
            found is precision.master,
            f"precision.{kind}={found.value} with engine={name.value}: it keeps {kind} in the "
            f"dtype of precision.master={precision.master.value}; make them equal, or "
            "engine=rayzero",
        )
    fit(
        name is not EngineName.DEEPSPEED or precision.master is Dtype.FP32,
        f"precision.master={precision.master.value} with engine={name.value}: its master weights "
        "are fp32; set precision.master=fp32, or engine=rayzero",
    )
