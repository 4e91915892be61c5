"""From a cell's config to an engine: module, tensor-parallel cut, optimizer, options."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from rayzero.config.cell import CellConfig
from rayzero.config.cluster import Transport
from rayzero.config.engine import EngineName
from rayzero.config.optimizer import OptimizerConfig, OptimizerKind, Schedule
from rayzero.config.parallel import Grid
from rayzero.dist.comm import Communicator
from rayzero.dist.mesh import build_mesh
from rayzero.dist.process import current_store
from rayzero.dist.shared import SharedTransports
from rayzero.dist.transport import TransportFactory, transport_for
from rayzero.engine import OffloadOptions, PrecisionOptions, ZeroEngine, ZeroOptions
from rayzero.engine.values import Initializer
from rayzero.errors import ConfigError
from rayzero.layout.spec import TpShard
from rayzero.models.init import Initializer as Weights
from rayzero.models.transformer import Transformer
from rayzero.parallel.apply import apply
from rayzero.parallel.plans import transformer_heads, transformer_plan
from rayzero.parallel.start import draw_local
from rayzero.train.factory import build_model
from rayzero.train.tensor_plan import plan_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A module, which of its parameters are tp blocks, and how to draw it if it is on meta."""

    module: nn.Module
    tensor_parallel: dict[str, TpShard]
    initialize: Initializer | None


def build_communicator(
    grid: Grid, device: torch.device, *, transport: TransportFactory = transport_for
) -> Communicator:
    """Lay the process group's ranks out as the grid says."""
    mesh = build_mesh(device.type, replicate=grid.replicate, shard=grid.shard, tp=grid.tp)
    return Communicator(mesh, store=current_store(), transport=transport)


def chosen_transport(config: CellConfig, device: torch.device) -> TransportFactory:
    """Return what makes the transports that cluster.transport asks for."""
    asked = config.cluster.transport
    if device.type != "cpu" or asked is Transport.PAIRWISE:
        return transport_for
    return SharedTransports(
        timeout_s=config.run.cell_timeout_s, is_required=asked is Transport.SHARED
    )


def build_engine_on(
    config: CellConfig, comm: Communicator, *, initialize: Initializer | None = None
) -> ZeroEngine:
    """Build the engine; `initialize` draws our models' weights in place of their own rules."""
    if config.engine.name is not EngineName.RAYZERO:
        raise ConfigError(
            f"engine.name={config.engine.name.value} is a peer: it is measured on real ranks (run, "
            "sweep, bench), not played or rehearsed; set engine=rayzero"
        )
    model = build_module(config, comm)
    return ZeroEngine(
        model.module,
        optimizer=optimizer_factory(config.optimizer),
        param_groups=partial(decay_groups, config.optimizer.weight_decay),
        zero=zero_options(config),
        precision=precision_options(config),
        offload=offload_options(config),
        mesh=comm,
        tensor_parallel=model.tensor_parallel,
        max_grad_norm=config.optimizer.max_grad_norm,
        on_nonfinite=config.engine.on_nonfinite.value,
        initialize=initialize or model.initialize,
        seed=config.run.seed,
    )


def build_module(config: CellConfig, comm: Communicator) -> Model:
    """Build our transformer on meta, or call the user's factory, and cut it over tp."""
    if config.model.factory is not None:
        return _cut_factory(config, comm)
    with torch.device("meta"):
        module = Transformer(config.model)
    table = apply(
        module,
        transformer_plan(config.model),
        comm,
        heads=transformer_heads(config.model),
        sequence=config.parallel.sequence,
        overlap=config.zero.overlap,
    )
    initialize = partial(draw_local, Weights(config.model, config.run.seed))
    return Model(module=module, tensor_parallel=table, initialize=initialize)


def _cut_factory(config: CellConfig, comm: Communicator) -> Model:
    """Build the user's model whole, with rank 0's values on all ranks of a tp group, and cut it."""
    module = build_model(config.model)
    if comm.size("tp") == 1:
        return Model(module=module, tensor_parallel={}, initialize=None)
    plan = plan_of(config, module)
    for name, parameter in module.named_parameters():
        if not parameter.is_meta:
            comm.broadcast(parameter.detach(), axis="tp", unit=name)
    table = apply(module, plan.styles, comm, heads=plan.heads, overlap=config.zero.overlap)
    return Model(module=module, tensor_parallel=table, initialize=None)


def optimizer_factory(config: OptimizerConfig) -> Callable[..., torch.optim.Optimizer]:
    """Return what builds the torch optimizer from param groups."""
    betas = (config.beta1, config.beta2)
    if config.kind is OptimizerKind.SGD:
        return partial(torch.optim.SGD, lr=config.lr, momentum=config.momentum, fused=True)
    kind = torch.optim.AdamW if config.kind is OptimizerKind.ADAMW else torch.optim.Adam
    return partial(kind, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def decay_groups(
    weight_decay: float, named: Iterable[tuple[str, nn.Parameter]]
) -> list[dict[str, Any]]:
    """Decay matrices and not vectors: norms and biases form a second group."""
    pairs = list(named)
    return [
        {"params": [p for _, p in pairs if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for _, p in pairs if p.ndim <= 1], "weight_decay": 0.0},
    ]


def build_schedule(
    config: OptimizerConfig, optimizer: torch.optim.Optimizer, num_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the learning rate's course: a linear rise, then constant or half a cosine to zero."""

    def factor(step: int) -> float:
        rise = config.lr_warmup_steps
        if step < rise:
            return (step + 1) / rise
        if config.schedule is Schedule.CONSTANT:
            return 1.0
        done = (step - rise) / max(1, num_steps - rise)
        return float(0.5 * (1.0 + torch.cos(torch.tensor(min(1.0, done) * torch.pi))))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def zero_options(config: CellConfig) -> ZeroOptions:
    """Read the stage group."""
    zero = config.zero
    return ZeroOptions(
        stage=zero.stage,
        bucket_elements=zero.bucket_elements,
        overlap=zero.overlap,
        prefetch_elements=zero.prefetch_elements,
        persistence_elements=zero.persistence_elements,
        max_live_elements=zero.max_live_elements,
        units=zero.units,
    )


def precision_options(config: CellConfig) -> PrecisionOptions:
    """Read the precision group."""
    precision = config.precision
    return PrecisionOptions(
        params=precision.params.value,
        reduce=precision.reduce.value,
        accumulate=precision.accumulate.value,
        master=precision.master.value,
        moments=precision.moments.value,
        keep_fp32=tuple(precision.keep_fp32),
        loss_scale=precision.loss_scale,
    )


def offload_options(config: CellConfig) -> OffloadOptions:
    """Read the offload group."""
    offload = config.offload
    return OffloadOptions(
        optimizer=offload.optimizer.value,
        params=offload.params.value,
        folder=offload.folder,
        fraction=offload.fraction,
    )
