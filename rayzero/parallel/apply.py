"""Cut a module by a plan: each tp rank keeps its blocks of the weights, on meta or with values."""

from typing import Any, TypeVar

from torch import Tensor, nn

from rayzero.dist.comm import Communicator
from rayzero.errors import ConfigError
from rayzero.layout.spec import TpShard
from rayzero.parallel.layers import RowLinear, VocabEmbedding
from rayzero.parallel.loss import VocabCrossEntropy
from rayzero.parallel.plan import Plan, Style, styled
from rayzero.parallel.region import AXIS, enter

Layer = TypeVar("Layer", bound=nn.Module)


def apply(module: nn.Module, plan: Plan, comm: Communicator) -> dict[str, TpShard]:
    """Cut the module in place and return which parameters are blocks of which; {} for tp = 1.

    A parameter that two modules share is cut once and stays shared. Raise ConfigError where a size
    does not divide, or a style does not fit the module it names.
    """
    if comm.size(AXIS) == 1:
        return {}
    cutter = Cutter(comm)
    for name, style in list(styled(module, plan)):
        _apply_style(module, name, style, cutter, comm)
    cutter.check_shared(module)
    return {
        name: cutter.shards[parameter]
        for name, parameter in module.named_parameters()
        if parameter in cutter.shards
    }


class Cutter:
    """Cuts parameters and remembers them, so that a shared one is cut once."""

    def __init__(self, comm: Communicator) -> None:
        self._index, self._count = comm.rank(AXIS), comm.size(AXIS)
        self._locals: dict[nn.Parameter, nn.Parameter] = {}
        self.shards: dict[nn.Parameter, TpShard] = {}

    def cut(self, owner: nn.Module, key: str, *, dim: int, name: str) -> nn.Parameter:
        """Return this rank's block of the owner's parameter."""
        whole = getattr(owner, key)
        if whole not in self._locals:
            size, remainder = divmod(whole.shape[dim], self._count)
            if remainder:
                raise ConfigError(
                    f"parallel.tp={self._count} does not divide dim {dim} of {name}.{key}, which "
                    f"has {whole.shape[dim]}; choose a tp that does"
                )
            block = whole.detach().narrow(dim, self._index * size, size).clone()
            local = nn.Parameter(block, requires_grad=whole.requires_grad)
            self._locals[whole] = local
            self.shards[local] = TpShard(dim=dim, index=self._index, count=self._count)
        return self._locals[whole]

    def check_shared(self, module: nn.Module) -> None:
        """Raise ConfigError if a module still holds the whole of what another one had cut."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in self._locals:
                raise ConfigError(
                    f"the tensor-parallel plan cuts a parameter that {name} shares, but gives "
                    f"{name.rpartition('.')[0]} no style; name both modules in the plan"
                )


def _apply_style(
    module: nn.Module, name: str, style: Style, cutter: Cutter, comm: Communicator
) -> None:
    """Cut one module's parameters, or put a parallel module in its place."""
    target = module.get_submodule(name)
    match style:
        case Style.COPY_INPUT:
            _copy_input(target, comm, name)
        case Style.COLUMN:
            _cut_outputs(_expect(target, nn.Linear, name, style), cutter, name)
        case Style.VOCAB_OUTPUT:
            _cut_outputs(_expect(target, nn.Linear, name, style), cutter, name)
            _copy_input(target, comm, name)
        case Style.ROW:
            linear = _expect(target, nn.Linear, name, style)
            weight = cutter.cut(linear, "weight", dim=1, name=name)
            module.set_submodule(name, RowLinear(weight, linear.bias, comm, name))
        case Style.VOCAB:
            table = _expect(target, nn.Embedding, name, style)
            weight = cutter.cut(table, "weight", dim=0, name=name)
            module.set_submodule(name, VocabEmbedding(weight, comm, name))
        case Style.VOCAB_LOSS:
            module.set_submodule(name, VocabCrossEntropy(comm, name))


def _cut_outputs(linear: nn.Linear, cutter: Cutter, name: str) -> None:
    linear.weight = cutter.cut(linear, "weight", dim=0, name=name)
    linear.out_features = linear.weight.shape[0]
    if linear.bias is not None:
        linear.bias = cutter.cut(linear, "bias", dim=0, name=name)


def _copy_input(target: nn.Module, comm: Communicator, unit: str) -> None:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = args[0]
        return enter(x, comm, unit), *args[1:]

    target.register_forward_pre_hook(hook)


def _expect(target: nn.Module, kind: type[Layer], name: str, style: Style) -> Layer:
    if not isinstance(target, kind):
        raise ConfigError(
            f"the tensor-parallel plan gives {name} the style {style.value}, which is for "
            f"{kind.__name__}; it is a {type(target).__name__}"
        )
    return target
