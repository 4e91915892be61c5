"""DeepSpeed's ZeRO, stages 1 to 3, with its own defaults; the package is an extra.

On a machine without GPU it takes its CPU accelerator, whose communication kernel it compiles on
first use: a C++ compiler must be there; a minute, then cached in the user's home.
"""

import contextlib
import importlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rayzero.baselines.peer import GroupsFactory, OptimizerFactory, local, optimizer_states
from rayzero.dist.process import launcher_variables
from rayzero.errors import ConfigError
from rayzero.records import Kind

NEVER = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions:
    """What becomes DeepSpeed's config. reduce, accumulate: dtype names such as fp32."""

    stage: int
    accumulation: int
    max_grad_norm: float | None
    params: str
    reduce: str
    accumulate: str

    def plain(self) -> dict[str, Any]:
        """Return the config; what is not said here keeps DeepSpeed's default."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.max_grad_norm or 0.0,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": self.params == "bf16"},
            "communication_data_type": self.reduce,
            "data_types": {"grad_accum_dtype": self.accumulate},
            "steps_per_print": NEVER,
        }


class DeepSpeed:
    """A module under deepspeed.initialize."""

    def __init__(
        self,
        module: nn.Module,
        groups: GroupsFactory,
        factory: OptimizerFactory,
        *,
        options: DeepSpeedOptions,
        device: torch.device,
    ) -> None:
        self._module = module
        self._last = True
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(launcher_variables(device))
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.optimizer = factory([group for group in groups(trained) if group["params"]])
        self._library = import_deepspeed()
        self._engine: Any = self._library.initialize(
            model=module,
            optimizer=self.optimizer,
            config=options.plain(),
            dist_init_required=False,
        )[0]

    def begin(self, *, last: bool) -> None:
        """Remember where the window stands; DeepSpeed counts micro-batches itself."""
        self._last = last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; between micro-batches its step only counts."""
        self._engine.backward(loss, scale_wrt_gas=False)
        if not self._last:
            self._engine.step()

    def step(self, max_norm: float | None) -> torch.Tensor:
        """Clip and update as configured."""
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return torch.as_tensor(float("nan") if norm is None else norm)

    def held(self) -> Iterator[tuple[Kind, torch.Tensor]]:
        """Yield parameters or their shards, master shards, moments."""
        for parameter in self._module.parameters():
            yield Kind.PARAMETERS, getattr(parameter, "ds_tensor", parameter)
        yield from ((Kind.MODULE_BUFFERS, buffer) for buffer in self._module.buffers())
        own = {_storage(p) for p in self._module.parameters()}
        for group in self.optimizer.param_groups:
            yield from ((Kind.MASTER, p) for p in group["params"] if _storage(p) not in own)
        yield from optimizer_states(self.optimizer)

    def full_state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return full weights, gathered at stage 3."""
        with self._library.zero.GatheredParameters(list(self._module.parameters())):
            return {k: v.detach().cpu().clone() for k, v in self._module.state_dict().items()}

    def close(self) -> None:
        """Drop its hooks, the process groups in its globals, and the launcher's variables."""
        self._engine.destroy()
        groups = importlib.import_module("deepspeed.utils.groups")
        groups._release_process_group_references()
        self._stack.close()


def _storage(tensor: torch.Tensor) -> int:
    return int(local(tensor).untyped_storage()._cdata)


def import_deepspeed() -> ModuleType:
    """Import it, without its notes on standard output; raise ConfigError where it is missing."""
    try:
        library = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(
            f"engine=deepspeed needs the extra 'deepspeed', which cannot be imported ({error}); "
            "install it on every node: pip install 'rayzero[deepspeed]' (make bench does so)"
        ) from error
    library.utils.logger.setLevel(logging.ERROR)
    return library
