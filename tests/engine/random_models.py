"""Small models of any shape, as frozen recipes that can be drawn, printed, pickled and built."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
BATCH = 2
MOMENTS = 9
"""Micro-batches that a part can be told to sit out: 3 steps of at most 3."""


@dataclass(frozen=True)
class Moment:
    """One micro-batch of one rank."""

    rank: int
    step: int
    micro: int

    @property
    def opens_gates(self) -> bool:
        """Whether gates take part; ranks differ."""
        return (self.rank + self.step + self.micro) % 2 == 0

    @property
    def bit(self) -> int:
        """The moment's bit among the MOMENTS, the same on all ranks."""
        return 1 << (3 * self.step + self.micro) % MOMENTS

    def noise(self, *shape: int) -> torch.Tensor:
        """Return data that is this moment's alone."""
        seed = 10_000 * self.step + 100 * self.micro + self.rank
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


@dataclass(frozen=True)
class PartRecipe:
    """A residual part: x + down tanh(up x), and what else it holds.

    frozen: "none", "matrices" or "all". tied_to: up is that part's up. extras, out of "scalar"
    (0-dim), "empty" (no elements), "spare" (never used), "gate" (used where Moment.opens_gates) and
    "inner" (a child module). checkpoint: "none", "reentrant" or "not reentrant", around the call
    of the part or inside its forward. sits_out: bits of the moments when nobody calls it.
    """

    hidden: int = 3
    dtype: str = "fp64"
    frozen: str = "none"
    tied_to: int | None = None
    extras: tuple[str, ...] = ()
    checkpoint: str = "none"
    around: bool = True
    sits_out: int = 0


@dataclass(frozen=True)
class ModelRecipe:
    """Parts called one after another, in the order of calls: none, once or several times each.

    input_grad: the model's input requires a gradient. by_keyword: parts are called with x=x.
    """

    width: int = 3
    parts: tuple[PartRecipe, ...] = (PartRecipe(),)
    calls: tuple[int, ...] = (0,)
    root_dtype: str = "fp64"
    input_grad: bool = False
    by_keyword: bool = False

    @property
    def reuses(self) -> bool:
        """Whether a part is called more than once in a forward."""
        return len(set(self.calls)) < len(self.calls)

    @property
    def ties(self) -> bool:
        """Whether two parts share a parameter."""
        return any(part.tied_to is not None for part in self.parts)

    @property
    def freezes(self) -> bool:
        """Whether a parameter needs no gradient."""
        return any(part.frozen != "none" for part in self.parts)

    @property
    def has_branches(self) -> bool:
        """Whether the graph differs between moments."""
        return any(part.sits_out or "gate" in part.extras for part in self.parts)

    @property
    def checkpoints(self) -> set[str]:
        """The kinds of activation checkpoint."""
        return {part.checkpoint for part in self.parts} - {"none"}

    @property
    def dtypes(self) -> set[str]:
        """Names of the dtypes in it."""
        return {self.root_dtype, *(part.dtype for part in self.parts)}

    @property
    def is_plain(self) -> bool:
        """Whether each part runs once in each forward and once in each backward.

        The statement that stage 3 gathers each unit twice per micro-batch is made for such models.
        """
        return (
            sorted(self.calls) == list(range(len(self.parts)))
            and self.input_grad
            and not self.has_branches
            and not self.checkpoints
        )

    @property
    def may_come_late(self) -> bool:
        """Whether a gradient can come after its flat was handed out: its count varies."""
        return self.has_branches or "reentrant" in self.checkpoints

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Name the modules that can be units at stage 3."""
        inner = [f"parts.{i}.inner" for i, part in enumerate(self.parts) if "inner" in part.extras]
        return (*(f"parts.{i}" for i in range(len(self.parts))), *inner)


class Inner(nn.Module):
    """A vector of its own."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width, dtype=dtype) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x.to(self.scale.dtype) * self.scale).sin().to(x.dtype)


class Part(nn.Module):
    """One part after its recipe."""

    def __init__(self, recipe: PartRecipe, width: int, up: nn.Parameter | None) -> None:
        super().__init__()
        self.recipe = recipe
        dtype = DTYPES[recipe.dtype]

        def values(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, dtype=dtype) / 2)

        self.up = values(recipe.hidden, width) if up is None else up
        self.down = values(width, recipe.hidden)
        for name, shape in {"scalar": (), "empty": (0, 4), "spare": (width,)}.items():
            if name in recipe.extras:
                self.register_parameter(name, values(*shape))
        self.gate = values(width) if "gate" in recipe.extras else None
        self.inner = Inner(width, dtype) if "inner" in recipe.extras else None
        for parameter in {"none": (), "matrices": (self.up, self.down)}.get(
            recipe.frozen, self.parameters()
        ):
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor, now: Moment) -> torch.Tensor:
        if self.training and self.recipe.checkpoint != "none" and not self.recipe.around:
            reentrant = self.recipe.checkpoint == "reentrant"
            return checkpoint(self.body, x, now, use_reentrant=reentrant)
        return self.body(x, now)

    def body(self, x: torch.Tensor, now: Moment) -> torch.Tensor:
        extras = self.recipe.extras
        y = x.to(self.down.dtype)
        y = (y @ self.up.T).tanh() @ self.down.T
        if "scalar" in extras:
            y = y * self.scalar.cos()
        if "empty" in extras:
            y = y + self.empty.sum()
        if self.gate is not None and now.opens_gates:
            y = y + self.gate.sin()
        x = x + y.to(x.dtype)
        return x if self.inner is None else self.inner(x)


class Model(nn.Module):
    """The parts of a recipe, and a scale of its own that is always trained."""

    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=DTYPES[recipe.root_dtype]))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.parts = nn.ModuleList()
        for part in recipe.parts:
            up = None if part.tied_to is None else self.parts[part.tied_to].up
            self.parts.append(Part(part, recipe.width, up))

    def forward(self, x: torch.Tensor, now: Moment) -> torch.Tensor:
        for index in self.recipe.calls:
            part, recipe = self.parts[index], self.recipe.parts[index]
            if recipe.sits_out & now.bit:
                continue
            if self.training and recipe.checkpoint != "none" and recipe.around:
                x = checkpoint(part, x, now, use_reentrant=recipe.checkpoint == "reentrant")
            else:
                x = part(x=x, now=now) if self.recipe.by_keyword else part(x, now)
        return (x * self.scale.double()).square().sum() / max(x.numel(), 1)


def built(recipe: ModelRecipe) -> Model:
    """Build a recipe with the same values everywhere."""
    torch.manual_seed(5)
    return Model(recipe)


def input_at(recipe: ModelRecipe, now: Moment) -> torch.Tensor:
    """Return a moment's input."""
    return now.noise(BATCH, recipe.width).requires_grad_(recipe.input_grad)
