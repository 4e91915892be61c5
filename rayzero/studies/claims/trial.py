"""What is run on real ranks to decide claims: cells of a small GPT, shared between claims."""

from dataclasses import dataclass, replace

from rayzero.config.cell import CellConfig
from rayzero.config.engine import EngineConfig, EngineName
from rayzero.config.model import Checkpointing, ModelConfig
from rayzero.config.parallel import ParallelConfig
from rayzero.config.run import RunConfig
from rayzero.config.zero import OffloadConfig, Place, ZeroConfig
from rayzero.records import Alteration
from rayzero.studies.asked import PRECISIONS

SMALL = ModelConfig(
    name="claims",
    num_layers=4,
    hidden=64,
    num_heads=4,
    vocab_size=256,
    max_seq_len=256,
    tied_output=False,
)
"""No tied output: its table would be gathered twice a pass, and 3 Psi would be a little more."""


IN_OTHER_WORDS = ("alteration", "units")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A cell in few words. alteration: watched instead of measured, see train/observe.py."""

    world: int
    stage: int
    precision: str = "paper"
    tp: int = 1
    micro_steps: int = 1
    micro_batch: int = 1
    seq_len: int = 32
    checkpointing: str = "none"
    offload: str = "none"
    bucket_elements: int | None = None
    persistence_elements: int = 0
    prefetch_elements: int | None = None
    units: tuple[str, ...] | None = None
    overlap: bool = True
    probe: bool = False
    engine: str = "rayzero"
    alteration: Alteration | None = None

    def config(self, base: CellConfig) -> CellConfig:
        """Return the cell, with the base's cluster, seed and folders."""
        data_ranks = self.world // self.tp
        return replace(
            base,
            model=replace(SMALL, checkpointing=Checkpointing(self.checkpointing)),
            precision=PRECISIONS[self.precision],
            zero=ZeroConfig(
                stage=self.stage,
                bucket_elements=self.bucket_elements,
                persistence_elements=self.persistence_elements,
                prefetch_elements=self.prefetch_elements,
                units=None if self.units is None else list(self.units),
                overlap=self.overlap,
            ),
            offload=OffloadConfig(optimizer=Place(self.offload)),
            parallel=ParallelConfig(tp=self.tp),
            engine=EngineConfig(name=EngineName(self.engine)),
            data=replace(
                base.data,
                global_batch=data_ranks * self.micro_steps * self.micro_batch,
                micro_batch=self.micro_batch,
                seq_len=self.seq_len,
            ),
            cluster=replace(base.cluster, ranks_per_node=self.world),
            run=RunConfig(num_steps=1, warmup_steps=1, probe=self.probe, output=base.run.output),
        )

    def __str__(self) -> str:
        defaults = Trial(world=self.world, stage=self.stage)
        others = [
            f"{name}={getattr(self, name)}"
            for name in self.__slots__
            if getattr(self, name) != getattr(defaults, name) and name not in IN_OTHER_WORDS
        ]
        if self.units is not None:
            others.append(f"{len(self.units) or 'no'} modules named as units")
        watched = [] if self.alteration is None else [f"watched ({self.alteration.value})"]
        return ", ".join([f"{self.world} ranks", f"stage {self.stage}", *others, *watched])


STAGES = (0, 1, 2, 3)
WORLDS = (2, 4, 8)
GAS = (2, 4, 8)
SMALL_BUCKET, WHOLE_BUCKET = 1 << 13, 1 << 24
LINEARS = ("q", "k", "v", "o")


def states(world: int, stage: int, precision: str = "paper") -> Trial:
    """E1, E2: what a rank holds and sends, one micro-step."""
    return Trial(world=world, stage=stage, precision=precision)


def accumulated(stage: int, micro_steps: int) -> Trial:
    """E5: several micro-steps."""
    return Trial(world=2, stage=stage, micro_steps=micro_steps)


def split(tp: int, checkpointing: str = "none") -> Trial:
    """E6: tensor parallelism alone, on as many sequences as data parallelism would see."""
    return Trial(world=tp, stage=0, tp=tp, micro_batch=tp, checkpointing=checkpointing)


def at_tokens(seq_len: int, micro_batch: int) -> tuple[Trial, Trial]:
    """E7: ZeRO-3 and tensor parallelism on the same two ranks and the same tokens."""
    zero = Trial(world=2, stage=3, seq_len=seq_len, micro_batch=micro_batch)
    return zero, replace(zero, stage=0, tp=2, micro_batch=2 * micro_batch)


def persistent(elements: int) -> Trial:
    """E9: parameters up to this size stay whole."""
    return Trial(world=2, stage=3, persistence_elements=elements)


def bucketed(elements: int) -> Trial:
    """E2, E10: stage 2 with buckets of this size, and its peak."""
    return Trial(world=2, stage=2, bucket_elements=elements, probe=True)


def in_units(units: tuple[str, ...] | None) -> Trial:
    """E2, E10: stage 3 with these modules gathered as one (None: block by block), and its peak."""
    return Trial(world=2, stage=3, units=units, probe=True)


def linears() -> tuple[str, ...]:
    """Name every linear layer of the blocks."""
    attention = [f"attention.{name}" for name in LINEARS]
    names = [*attention, "feed_forward.up", "feed_forward.down"]
    return tuple(f"blocks.{i}.{name}" for i in range(SMALL.num_layers) for name in names)


def delayed(stage: int, *, ahead: bool) -> Trial:
    """E11: a link with a latency, with and without communication ahead of its use."""
    return Trial(
        world=2,
        stage=stage,
        precision="fp32",
        bucket_elements=SMALL_BUCKET,
        overlap=ahead,
        prefetch_elements=WHOLE_BUCKET if ahead else 0,
        alteration=Alteration.SLOW,
    )


def offloaded(place: str) -> Trial:
    """E12: optimizer states with the device, or on the host."""
    return Trial(world=2, stage=2, offload=place)


def watched(stage: int, alteration: Alteration = Alteration.NONE) -> Trial:
    """E4: what each of four ranks computes, and with what weights it ends."""
    return Trial(world=4, stage=stage, alteration=alteration)


FSDP2 = Trial(world=2, stage=3, precision="fp32", engine="fsdp2", alteration=Alteration.NONE)
FEW_TOKENS, MANY_TOKENS = at_tokens(32, 1), at_tokens(128, 4)
SMALLEST_KEPT, LARGEST_KEPT = 64, 4096
"""E9: thresholds; a norm has 64 elements, an attention matrix 4096, the token table 16384."""


def plan() -> tuple[Trial, ...]:
    """List all trials, each once, those of as many ranks together."""
    trials = [states(world, stage) for world in WORLDS for stage in STAGES]
    trials += [states(4, stage, "fp32") for stage in STAGES]
    trials += [accumulated(stage, g) for stage in (2, 3) for g in GAS] + [accumulated(1, max(GAS))]
    trials += [split(2), split(4), split(2, "full")]
    trials += [*FEW_TOKENS, *MANY_TOKENS]
    trials += [persistent(SMALLEST_KEPT), persistent(LARGEST_KEPT)]
    trials += [bucketed(SMALL_BUCKET), bucketed(WHOLE_BUCKET)]
    trials += [in_units(()), in_units(None), in_units(linears())]
    trials += [delayed(stage, ahead=ahead) for stage in (2, 3) for ahead in (False, True)]
    trials += [offloaded("host"), FSDP2]
    trials += [watched(1), watched(2), watched(3), watched(2, Alteration.UNPUBLISHED)]
    return tuple(sorted(dict.fromkeys(trials), key=lambda trial: trial.world))
