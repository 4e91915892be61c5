"""The dry run: the engine's own step on one rank of any world, in one process, without values.

Tensors are fake CPU ones (sizes, no memory), the process group is torch's fake one. Everything
else is what trains: build_engine_on, Trainer, the stage classes, the ledger. So a mistake in a
stage shows here as it would on real ranks. Gradients travel as on NCCL: no pairwise scratch.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch

from rayzero.config.cell import CellConfig
from rayzero.config.data import DataConfig, DataKind
from rayzero.dist.fake import fake_world, why_untraceable, with_values, without_values
from rayzero.engine import ZeroEngine
from rayzero.engine.partition import find_units
from rayzero.errors import ConfigError
from rayzero.layout.spec import ParamSpec, Span
from rayzero.records import DryRunReport, Holdings, MemoryPoint, Transfer
from rayzero.theory.memory import holdings_of
from rayzero.theory.traffic import step_transfers
from rayzero.train.build import build_communicator, build_engine_on
from rayzero.train.cell import make_trainer
from rayzero.train.data import Batch, Data, load_data
from rayzero.train.module_watch import ModuleWatch
from rayzero.train.theory import num_params, question_for, tp_transfers_for
from rayzero.train.timeline import trace_step

CPU = torch.device("cpu")


def dry_run(config: CellConfig) -> DryRunReport:
    """Play two steps of the rank that config.dryrun names; the second gives transfers and timeline.

    Without `dryrun.steady` one micro-batch and its step are played, for what is held alone. Raise
    ConfigError, with the module's name, for a model whose forward asks for values.
    """
    started = time.perf_counter()
    asked = config.dryrun
    grid = config.grid(asked.world)
    config.batching(asked.world)
    with fake_world(world=asked.world, rank=asked.rank):
        comm = build_communicator(grid, CPU)
        with without_values():
            engine = build_engine_on(config, comm, initialize=_no_values)
            with engine:
                return Rehearsal(config, engine).report(started=started)


class Rehearsal:
    """Two windows of one engine that has no values."""

    def __init__(self, config: CellConfig, engine: ZeroEngine) -> None:
        world = config.dryrun.world
        self._config = config
        self._engine = engine
        self._batching = config.batching(world)
        self._watch = ModuleWatch(engine.module, find_units(engine.module, config.zero.units))
        self._data = FakeData(config.data, config.model.vocab_size)
        self._trainer = make_trainer(config, engine, self._data, world, CPU)

    def report(self, *, started: float) -> DryRunReport:
        """Play, and lay theory beside what the engine did."""
        config, engine, asked = self._config, self._engine, self._config.dryrun
        after_init = engine.holdings()
        with self._errors_name_the_module():
            after_backward = self._first_window()
            timeline = self._traced_step() if asked.trace else self._step() if asked.steady else ()
        question = question_for(config, engine, asked.world, asked.rank)
        formula: tuple[Transfer, ...] = ()
        if asked.steady:
            micro_steps = self._batching.accumulation
            formula = step_transfers(question, backwards=micro_steps, reductions=1)
            formula += tp_transfers_for(config, engine, question, micro_steps)
        return DryRunReport(
            rank=asked.rank,
            world=asked.world,
            num_params=num_params(config, engine),
            after_init=after_init,
            after_backward=after_backward,
            after_step=engine.holdings(),
            formula_after_init=holdings_of(question, after_backward=False, after_step=False),
            formula_after_backward=holdings_of(question, after_step=False),
            formula_after_step=holdings_of(question),
            transfers=engine.ledger.transfers if asked.steady else (),
            formula_transfers=formula,
            timeline=timeline,
            wall_s=time.perf_counter() - started,
        )

    def _first_window(self) -> Holdings:
        """Run one micro-batch; return what is held when its gradients are reduced."""
        loss = self._engine(*self._data.batch(0, range(self._batching.micro_batch)))
        self._engine.backward(loss)
        # Scaling by one waits for the reductions and changes nothing.
        self._engine.scale_gradients(1.0)
        held = self._engine.holdings()
        self._engine.step()
        return held

    def _step(self) -> tuple[MemoryPoint, ...]:
        self._trainer.step()
        return ()

    def _traced_step(self) -> tuple[MemoryPoint, ...]:
        return trace_step(self._engine, self._watch, self._trainer.step)

    @contextlib.contextmanager
    def _errors_name_the_module(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = why_untraceable(error)
            if reason is None:
                raise
            running = self._watch.running
            module = f"module {running[-1] or '(the model itself)'!r}" if running else "the step"
            raise ConfigError(
                f"the dry run cannot go through {module}: {reason}, or measure with the verb run"
            ) from error


class FakeData:
    """Batches of the right shapes and dtypes without values."""

    def __init__(self, config: DataConfig, vocab_size: int) -> None:
        self._seq_len = config.seq_len
        self._real: Data | None = None
        if config.kind is DataKind.FACTORY:
            with with_values():
                self._real = load_data(config, vocab_size=vocab_size)
        self.fingerprint = ""

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        """Return a micro-batch; a user's data is asked for a real one, whose values are dropped."""
        if self._real is None:
            shape = (len(positions), self._seq_len)
            return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        with with_values():
            inputs, targets = self._real.batch(step, positions)
        return _alike(inputs), _alike(targets)

    def validation(self, positions: Sequence[int]) -> Batch:
        """Return a batch."""
        return self.batch(-1, positions)


def _no_values(spec: ParamSpec, span: Span) -> torch.Tensor:
    return torch.empty(span.elements)


def _alike(real: torch.Tensor) -> torch.Tensor:
    return torch.zeros(real.shape, dtype=real.dtype)
