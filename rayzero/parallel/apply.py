"""Cut a module by a plan: each tp rank keeps its blocks of the weights, on meta or with values."""

from functools import partial
from typing import TypeVar

from torch import nn

from rayzero.config.parallel import Style
from rayzero.dist.comm import Communicator
from rayzero.errors import ConfigError
from rayzero.layout.spec import TpShard
from rayzero.parallel.cutter import Cutter
from rayzero.parallel.entry import SharedEntry, unit_of_entry
from rayzero.parallel.layers import (
    ColumnLinear,
    RowLinear,
    Share,
    SharedWeights,
    VocabEmbedding,
    WholeHeads,
)
from rayzero.parallel.loss import IGNORED, VocabCrossEntropy
from rayzero.parallel.masks import OwnMasks
from rayzero.parallel.plan import Heads, Plan, heads_of, styled
from rayzero.parallel.region import AXIS, enter_together
from rayzero.parallel.stream import SequenceStream, Stream, WholeStream

Layer = TypeVar("Layer", bound=nn.Module)


def apply(
    module: nn.Module,
    plan: Plan,
    comm: Communicator,
    *,
    heads: Heads | None = None,
    sequence: bool = False,
    overlap: bool = True,
) -> dict[str, TpShard]:
    """Cut the module in place and return which parameters are blocks of which; {} for tp = 1.

    heads: which linears' outputs are heads; fewer heads than ranks stay whole on each rank.
    sequence: outside the split parts each rank has its own tokens. overlap: backward computes while
    it communicates; same bits either way. A parameter that two modules share is cut once and stays
    shared. Raise ConfigError where a size does not divide, or a style does not fit the module it
    names.
    """
    if comm.size(AXIS) == 1:
        return {}
    stream = SequenceStream(comm) if sequence else WholeStream(comm)
    surgeon = Surgeon(module, Cutter(comm), stream, heads or {}, overlap=overlap)
    for name, style in list(styled(module, plan)):
        surgeon.give(name, style)
    surgeon.cutter.check_shared(module)
    return {
        name: surgeon.cutter.shards[parameter]
        for name, parameter in module.named_parameters()
        if parameter in surgeon.cutter.shards
    }


class Surgeon:
    """Cuts modules' parameters, hooks modules, or puts parallel ones in their place."""

    def __init__(
        self,
        module: nn.Module,
        cutter: Cutter,
        stream: Stream,
        heads: Heads,
        *,
        overlap: bool,
    ) -> None:
        self._module = module
        self._stream = stream
        self._overlap = overlap
        self._heads = heads
        self._masks = OwnMasks(stream.comm)
        self._entries: dict[str, SharedEntry] = {}
        self._vocabulary: int | None = None
        self.cutter = cutter

    def give(self, name: str, style: Style) -> None:
        """Give one module its style."""
        target = self._module.get_submodule(name)
        match style:
            case Style.COLUMN if next(target.parameters(), None) is None:
                self._masks.attach(target)
            case Style.COLUMN:
                self._cut_column(target, name)
            case Style.ROW:
                linear = _expect(target, nn.Linear, name, style)
                weight = self.cutter.cut(linear, "weight", dim=1, name=name)
                self._replace(name, RowLinear(weight, linear.bias, self._stream, name))
            case Style.VOCAB:
                self._cut_vocabulary(target, name)
            case Style.SEQUENCE:
                self._share(target, name)

    def _cut_column(self, linear: nn.Module, name: str) -> None:
        comm = self._stream.comm
        ranks, num_heads = comm.size(AXIS), heads_of(name, self._heads)
        if not isinstance(linear, nn.Linear):
            self._share_weights(linear, partial(enter_together, comm=comm), name)
            return
        linear = _expect(linear, nn.Linear, name, Style.COLUMN)
        if num_heads is None or num_heads % ranks == 0:
            self._cut_outputs(linear, name)
        elif ranks % num_heads == 0:
            self._replace(name, WholeHeads(linear, num_heads, self._entry(name), comm, name))
        else:
            raise ConfigError(
                f"parallel.tp={ranks} neither divides the {num_heads} heads of {name} nor is a "
                f"multiple of them; choose a tp that is one of the two"
            )

    def _entry(self, name: str) -> SharedEntry:
        unit = unit_of_entry(name)
        entry = SharedEntry(self._stream, unit, overlap=self._overlap)
        return self._entries.setdefault(unit, entry)

    def _cut_outputs(self, linear: nn.Linear, name: str, *, pads: bool = False) -> None:
        weight = self.cutter.cut(linear, "weight", dim=0, name=name, pads=pads)
        bias = linear.bias
        if bias is not None:
            bias = self.cutter.cut(linear, "bias", dim=0, name=name, pads=pads)
        self._replace(name, ColumnLinear(weight, bias, self._entry(name)))

    def _cut_vocabulary(self, target: nn.Module, name: str) -> None:
        if isinstance(target, nn.Linear):
            self._vocabulary = target.out_features
            self._cut_outputs(_expect(target, nn.Linear, name, Style.VOCAB), name, pads=True)
        elif isinstance(target, nn.CrossEntropyLoss):
            self._cut_loss(target, name)
        else:
            table = _expect(target, nn.Embedding, name, Style.VOCAB)
            weight = self.cutter.cut(table, "weight", dim=0, name=name, pads=True)
            layer = VocabEmbedding(weight, self._stream, name, padding_idx=table.padding_idx)
            self._replace(name, layer)

    def _cut_loss(self, target: nn.CrossEntropyLoss, name: str) -> None:
        if (target.reduction, target.ignore_index, target.weight) != ("mean", IGNORED, None):
            raise ConfigError(
                f"the tensor-parallel plan gives {name} the style vocab: over a split vocabulary a "
                f"loss is the mean over tokens without class weights, with ignore_index={IGNORED}"
            )
        if self._vocabulary is None:
            raise ConfigError(
                f"the tensor-parallel plan gives {name} the style vocab, but no Linear before it: "
                "a loss over a split vocabulary needs the layer that splits it"
            )
        is_torchs = type(target) is nn.CrossEntropyLoss
        loss = VocabCrossEntropy(
            self._stream.comm,
            name,
            vocab_size=self._vocabulary,
            label_smoothing=target.label_smoothing,
            eval_smoothing=target.label_smoothing if is_torchs else 0.0,
        )
        self._replace(name, loss)

    def _share(self, target: nn.Module, name: str) -> None:
        if isinstance(self._stream, WholeStream):
            return
        stream = self._stream
        if isinstance(target, nn.Embedding):
            target.register_forward_hook(lambda _, __, rows: stream.own(rows, name))
            return
        if next(target.parameters(), None) is None:
            self._masks.attach(target)
            return
        self._share_weights(target, stream.shared, name)

    def _share_weights(self, target: nn.Module, share: Share, name: str) -> None:
        if any("." in key for key, _ in target.named_parameters()):
            raise ConfigError(
                f"the tensor-parallel plan names {name}, a {type(target).__name__} whose weights "
                "are in modules inside it; name those, or leave it out"
            )
        self._replace(name, SharedWeights(target, share, name))

    def _replace(self, name: str, layer: nn.Module) -> None:
        self._module.set_submodule(name, layer)


def _expect(target: nn.Module, kind: type[Layer], name: str, style: Style) -> Layer:
    """Return the module if it computes what its kind does: a subclass may scale or renorm."""
    renorms = getattr(target, "max_norm", None) is not None
    if not isinstance(target, kind) or type(target).forward is not kind.forward or renorms:
        raise ConfigError(
            f"the tensor-parallel plan gives {name} the style {style.value}, which is for "
            f"a plain {kind.__name__}; it is a {type(target).__name__}"
        )
    return target
