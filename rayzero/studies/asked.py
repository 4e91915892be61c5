"""What a table asks of the engine: a cell, played at the paper's size or measured here."""

from dataclasses import dataclass, replace

from rayzero.config.cell import CellConfig
from rayzero.config.dryrun import DryRunConfig
from rayzero.config.model import Checkpointing, Flavour, ModelConfig
from rayzero.config.parallel import ParallelConfig
from rayzero.config.precision import Dtype, PrecisionConfig
from rayzero.config.zero import OffloadConfig, Place, ZeroConfig

MODELS = {
    "7.5B": ModelConfig(
        name="7.5B", num_layers=36, hidden=4096, num_heads=32, vocab_size=51200, max_seq_len=2048
    ),
    "13B": ModelConfig(
        name="13B",
        flavour=Flavour.LLAMA,
        num_layers=40,
        hidden=5120,
        num_heads=40,
        ffn_hidden=13824,
        vocab_size=32000,
        max_seq_len=2048,
        tied_output=False,
    ),
    "128B": ModelConfig(name="128B", num_layers=159, hidden=8192, num_heads=64, vocab_size=51200),
    "1T": ModelConfig(
        name="1T", num_layers=128, hidden=25600, num_heads=160, vocab_size=51200, max_seq_len=2048
    ),
    "scaled": ModelConfig(name="scaled", num_layers=4, hidden=256, num_heads=4),
}
"""The paper's sizes, shaped as in conf/model, and one that fits on CPU ranks."""

_BF16, _FP32 = Dtype.BF16, Dtype.FP32
PRECISIONS = {
    "paper": PrecisionConfig(name="paper", params=_BF16, reduce=_BF16, accumulate=_BF16),
    "bf16": PrecisionConfig(name="bf16", params=_BF16),
    "fp32": PrecisionConfig(name="fp32", params=_FP32),
}
PRECISION_OF = {16: "paper", 18: "bf16"}
"""Which precision has how many bytes per parameter; none of ours has 20."""

BUCKET_ELEMENTS = 5 * 10**8
SEQ_LEN = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A cell in few words; equal ones are run once."""

    model: str
    world: int
    stage: int
    precision: str = "paper"
    tp: int = 1
    replicate: int = 1
    micro_steps: int = 1
    checkpointing: str = "none"
    offload: str = "none"
    steady: bool = False
    """Whether its transfers are asked for, not only what it holds."""

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data."""
        return self.world // self.tp

    def config(self, base: CellConfig) -> CellConfig:
        """Return the cell, with the base's cluster, seed and folders."""
        model = replace(MODELS[self.model], checkpointing=Checkpointing(self.checkpointing))
        return replace(
            base,
            model=model,
            precision=PRECISIONS[self.precision],
            zero=ZeroConfig(stage=self.stage, bucket_elements=BUCKET_ELEMENTS),
            parallel=ParallelConfig(tp=self.tp, replicate=self.replicate),
            offload=OffloadConfig(optimizer=Place(self.offload)),
            data=replace(
                base.data,
                global_batch=self.data_ranks * self.micro_steps,
                micro_batch=1,
                seq_len=SEQ_LEN,
            ),
            dryrun=DryRunConfig(world=self.world, rank=0, trace=False, steady=self.steady),
        )
