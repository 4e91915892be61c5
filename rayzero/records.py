"""Records that travel up the house: bytes held, transfers made, what a rank and a cell report."""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import NamedTuple, SupportsFloat


class Kind(Enum):
    """What held bytes are for. Every byte an engine holds has one of these names."""

    __hash__ = object.__hash__  # By identity: Enum hashes the name in Python, each time.

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    MASTER = "master"
    MOMENTS = "moments"
    BUCKETS = "buckets"
    GATHERED = "gathered"
    STAGING = "staging"
    MODULE_BUFFERS = "module_buffers"
    COUNTERS = "counters"


class Where(Enum):
    """The memory that holds bytes. On a machine without accelerator the host is the device."""

    __hash__ = object.__hash__  # By identity: Enum hashes the name in Python, each time.

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of one kind in one place; padding_bytes is an 'of which'."""

    kind: Kind
    where: Where = Where.DEVICE
    num_bytes: int
    padding_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What one rank holds at one moment; kinds that hold nothing are left out."""

    entries: tuple[Held, ...]

    def bytes_of(self, *kinds: Kind, where: Where | None = None) -> int:
        """Sum the bytes of these kinds (all kinds if none is named), in one place or in all."""
        return sum(
            e.num_bytes
            for e in self.entries
            if (not kinds or e.kind in kinds) and where in (None, e.where)
        )


class Uses(NamedTuple):
    """How often a unit is gathered for one forward and for its backward."""

    forward: int = 1
    backward: int = 1


class Carrier(Enum):
    """How the tensors of an axis travel.

    native: torch's own collectives (NCCL, or the fake group of a dry run). pairwise: each pair of
    ranks exchanges over gloo. shared: ranks of one host read each other's memory.
    """

    NATIVE = "native"
    PAIRWISE = "pairwise"
    SHARED = "shared"


class Phase(Enum):
    """The part of a step a transfer belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    EVAL = "eval"
    CONTROL = "control"
    SETUP = "setup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective as one rank sees it: elements of the whole buffer, bytes it sent itself."""

    op: str
    axis: str
    phase: Phase
    unit: str
    elements: int
    dtype: str
    sent_bytes: int


class Status(Enum):
    """How a cell ended; the text goes to `reason`."""

    OK = "ok"
    IMPOSSIBLE = "impossible"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    WORKER_LOST = "worker_lost"
    PARITY_FAILED = "parity_failed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One optimizer step: the global batch's mean loss, and the slowest rank's time."""

    step: int
    loss: float
    step_s: float
    grad_norm: float
    timed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank says after a cell."""

    rank: int
    node: str
    device: str
    num_params: int
    steps: tuple[StepSample, ...]
    holdings: Holdings
    formula: Holdings
    transfers: tuple[Transfer, ...]
    """Every transfer of one step in steady state; empty where none was played."""
    formula_transfers: tuple[Transfer, ...]
    peak_bytes: int | None
    """Peak of device memory (on CPU: of tensor storages) in one step; None where not measured."""
    peak_host_bytes: int | None
    """Peak resident set of the process during the cell."""
    validation_loss: float | None
    data_fingerprint: str
    build_s: float
    weights_checksum: str
    """Of the weights this rank holds whole after the last step (stages 0-2); else empty."""
    carrier: Carrier = Carrier.NATIVE
    """How gradients travelled between data ranks."""
    restored_steps: int = 0
    """Of `steps`, the first so many come from a checkpoint and took no time in this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """One row of matrix.csv; None is 'not measured' and becomes an empty cell."""

    cell: str
    status: str
    reason: str = ""
    engine: str = ""
    stage: int | None = None
    offload: str = ""
    replicate: int | None = None
    shard: int | None = None
    tp: int | None = None
    precision: str = ""
    model: str = ""
    num_params: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    transport: str = ""
    steps: int | None = None
    step_s_median: float | None = None
    step_s_p95: float | None = None
    tokens_per_s: float | None = None
    tflops_per_rank: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    peak_host_bytes: int | None = None
    parameters_bytes: int | None = None
    gradients_bytes: int | None = None
    master_bytes: int | None = None
    moments_bytes: int | None = None
    communication_bytes: int | None = None
    module_buffers_bytes: int | None = None
    activations_bytes: int | None = None
    formula_bytes: int | None = None
    sent_bytes: int | None = None
    formula_sent_bytes: int | None = None
    predicted_step_s: float | None = None
    predicted_peak_bytes: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    parity: str = ""
    parity_error: float | None = None
    validation_loss: float | None = None
    data_fingerprint: str = ""
    devices: str = ""
    cluster_env: str = ""
    wall_s: float | None = None
    overhead_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """A cell's row with the series and reports behind it, as JSON beside matrix.csv."""

    row: CellRow
    fingerprint: str
    """Hash of config, package sources, torch version and hardware: equal means 'already run'."""
    config: dict[str, object]
    samples: tuple[StepSample, ...] = ()
    reports: tuple[RankReport, ...] = ()
    started_unix_s: float = 0.0
    log: str = ""
    """Traceback or other text of a cell that did not end ok."""


MATRIX_COLUMNS = tuple(f.name for f in fields(CellRow))


class StepReport:
    """What engine.step() did. Reading the norm or the factor may wait for the device."""

    __slots__ = ("_clip_factor", "_grad_norm", "applied", "loss_scale", "num_backwards")

    def __init__(
        self,
        *,
        applied: bool,
        grad_norm: SupportsFloat,
        clip_factor: SupportsFloat,
        loss_scale: float = 1.0,
        num_backwards: int,
    ) -> None:
        self.applied = applied
        self.loss_scale = loss_scale
        self.num_backwards = num_backwards
        self._grad_norm = grad_norm
        self._clip_factor = clip_factor

    @property
    def grad_norm(self) -> float:
        """Global L2 norm of the averaged gradient, before clipping."""
        return float(self._grad_norm)

    @property
    def clip_factor(self) -> float:
        """What the gradient was multiplied with: min(1, max_grad_norm / grad_norm)."""
        return float(self._clip_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A sign of life from rank 0 while a cell runs."""

    step: int
    num_steps: int
    loss: float
    tokens_per_s: float
    extra: dict[str, float] = field(default_factory=dict)


class Alteration(Enum):
    """What an experiment changes about communication."""

    NONE = "none"
    SLOW = "slow"
    """Each transfer takes a latency more."""
    UNPUBLISHED = "unpublished"
    """Updated parameters are not gathered after the optimizer's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a rank of an experiment saw in the last of its steps."""

    rank: int
    num_params: int
    batch_checksum: int
    weights_checksum: str
    """Of the weights this rank holds whole after the last step (stages 0-2); else empty."""
    gradient_elements: int
    """Elements of gradients that this rank's backward computed."""
    state_bytes_sent: int
    """Bytes of master copies and moments that were handed to a transport."""
    collective_elements: dict[str, int]
    """Elements of whole buffers in torch's own collectives, by op (a peer's traffic)."""
    exposed_s: float
    """Seconds of an added latency that the rank waited for."""
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Live bytes on the device at the highest moment of a visit: a unit's part of a phase."""

    phase: Phase
    unit: str
    """The block or layer at work; empty between units and in the step."""
    bytes_by_kind: dict[str, int]
    """Bytes of what the engine holds, by the value of its Kind, where they are not 0."""
    activations_bytes: int
    """All other tensors: activations, and gradients and copies on their way."""

    @property
    def total_bytes(self) -> int:
        """All live bytes."""
        return sum(self.bytes_by_kind.values()) + self.activations_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunReport:
    """What a rank of a world that need not exist holds and sends, by engine and by formula."""

    rank: int
    world: int
    num_params: int
    after_init: Holdings
    after_backward: Holdings
    after_step: Holdings
    formula_after_init: Holdings
    formula_after_backward: Holdings
    formula_after_step: Holdings
    transfers: tuple[Transfer, ...]
    """Every transfer of one step in steady state; empty where none was played."""
    formula_transfers: tuple[Transfer, ...]
    timeline: tuple[MemoryPoint, ...]
    """One steady step, visit by visit; empty where it was not traced."""
    wall_s: float

    @property
    def peak(self) -> MemoryPoint | None:
        """Return the highest point of the step, the first of equals."""
        return max(self.timeline, key=lambda point: point.total_bytes, default=None)
