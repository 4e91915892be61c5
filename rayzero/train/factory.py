"""A user's own model and data by dotted path: package.module:function, called with factory_args."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping

from torch import nn

from rayzero.config.data import DataConfig
from rayzero.config.model import ModelConfig
from rayzero.errors import ConfigError

DATA_NAMES = ("fingerprint", "batch", "validation")


def build_model(config: ModelConfig) -> nn.Module:
    """Call model.factory; its module's forward(inputs, targets) returns the mean loss."""
    choice = {} if config.config is None else {"config": config.config}
    built = _call("model", config.factory, {**config.factory_args, **choice})
    if not isinstance(built, nn.Module):
        raise ConfigError(
            f"model.factory={config.factory} returned {type(built).__name__}; it must return a "
            "torch.nn.Module whose forward(inputs, targets) returns the mean loss"
        )
    return built


def build_data(config: DataConfig) -> object:
    """Call data.factory; the result has the names of train.data.Data."""
    built = _call("data", config.factory, config.factory_args)
    missing = [name for name in DATA_NAMES if not hasattr(built, name)]
    if missing:
        raise ConfigError(
            f"data.factory={config.factory} returned {type(built).__name__} without "
            f"{', '.join(missing)}; it needs fingerprint, batch(step, positions) and "
            "validation(positions), see docs/your_model.md"
        )
    return built


def _call(group: str, path: str | None, args: Mapping[str, object]) -> object:
    assert path is not None, f"{group}.factory is not set"
    function = _load(f"{group}.factory={path}", path)
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise ConfigError(
            f"{group}.factory_args={dict(args)} does not fit {group}.factory={path}: {error}; "
            f"its signature is {inspect.signature(function)}"
        ) from error
    return function(**args)


def _load(key: str, path: str) -> Callable[..., object]:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: no module named {error.name!r}; install it, or put the folder that holds it "
            "on PYTHONPATH (on every node of the cluster)"
        ) from error
    function: object = getattr(module, name, None)
    if not callable(function):
        close = difflib.get_close_matches(name, dir(module), n=1)
        found = "nothing" if function is None else f"a {type(function).__name__}"
        raise ConfigError(
            f"{key}: {module_name} has {found} called {name!r}"
            + (f"; did you mean {module_name}:{close[0]}?" if close else "")
            + " The name after the colon must be a function"
        )
    return function
