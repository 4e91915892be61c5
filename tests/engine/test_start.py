"""Where weights come from and go: rank 0's values, meta modules, gathering, full states."""

from typing import Any

import pytest
import torch
from torch import nn

from rayzero.engine import PrecisionOptions, ZeroEngine, ZeroOptions
from rayzero.layout.spec import TpShard
from tests.engine.harness import SGD, error_of
from tests.engine.reference import ADAMW, Net, bit_equal, net_batch
from tests.ranks import Pools, RankContext

BF16 = PrecisionOptions(params="bf16")


class Buffered(nn.Module):
    """A linear, a float table, an integer and a boolean buffer, all drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("count", torch.randint(0, 1000, ()))
        self.register_buffer("mask", torch.rand(9) > 0.5)


def differently_seeded(ctx: RankContext) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in range(4):
        for precision in (PrecisionOptions(), BF16):
            torch.manual_seed(ctx.rank)
            module = Buffered()
            zero = ZeroOptions(stage=stage)
            with ZeroEngine(
                module, optimizer=ADAMW, zero=zero, precision=precision, mesh=ctx.mesh()
            ) as engine:
                found.append(engine.full_state_dict(all_ranks=True))
    return found


def test_all_ranks_start_from_rank_0(ranks: Pools) -> None:
    """E50: weights and buffers."""
    torch.manual_seed(0)
    expected = Buffered().state_dict()
    for found in ranks(3)(differently_seeded):
        for fp32, bf16 in zip(found[0::2], found[1::2], strict=True):
            assert bit_equal(fp32, expected)
            for name in expected:
                rounded = expected[name]
                if name.startswith("linear"):
                    rounded = rounded.bfloat16()
                assert torch.equal(bf16[name], rounded), name


class Pieces(nn.Module):
    """A parameter that tp cuts and one that it replicates."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(7))
        self.cut = nn.Parameter(torch.randn(4))


def seeded_under_tp(ctx: RankContext) -> list[list[float]]:
    mesh = ctx.mesh(tp=2)
    index = mesh.get_local_rank("tp")
    found = []
    for stage in range(4):
        torch.manual_seed(ctx.rank)
        with (
            ZeroEngine(
                Pieces(),
                optimizer=ADAMW,
                zero=ZeroOptions(stage=stage),
                mesh=mesh,
                tensor_parallel={"cut": TpShard(dim=0, index=index, count=2)},
            ) as engine,
            engine.gathered(engine.module),
        ):
            found.append([*engine.module.whole.tolist(), *engine.module.cut.tolist()])
    return found


def test_replicated_weights_are_rank_0s_and_cut_ones_data_rank_0s(ranks: Pools) -> None:
    """E50, T05: ranks 0 1 are the first tp group, 2 3 the second."""
    own = []
    for rank in range(2):
        torch.manual_seed(rank)
        module = Pieces()
        own.append((module.whole.tolist(), module.cut.tolist()))
    for rank, found in enumerate(ranks(4)(seeded_under_tp)):
        assert found == [own[0][0] + own[rank % 2][1]] * 4


def set_to_seven(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 7)


def initialize_later(ctx: RankContext) -> list[tuple[str, float, float]]:
    """Set weights to 7 behind the engine's back; then step with lr 1 and gradient 1."""
    found = []
    for stage in range(4):
        for precision in (PrecisionOptions(), BF16):
            module = nn.Sequential(nn.Linear(3, 1, bias=False))
            with ZeroEngine(
                module,
                optimizer=SGD,
                zero=ZeroOptions(stage=stage),
                precision=precision,
                mesh=ctx.mesh(),
            ) as engine:
                text = error_of(lambda m=module: m.apply(set_to_seven))
                with engine.gathered(module):
                    before = module[0].weight.float().mean().item()
                dtype = torch.bfloat16 if precision is BF16 else torch.float32
                engine.backward(engine(torch.ones(1, 3, dtype=dtype)).sum())
                engine.step()
                with engine.gathered(module):
                    after = module[0].weight.float().mean().item()
                found.append((text, before, after))
    return found


def test_weights_set_after_the_start_are_kept_or_refused(ranks: Pools) -> None:
    """E49: never the old values, also where the optimizer steps an fp32 master."""
    for found in ranks(2)(initialize_later):
        for text, before, after in found[:6]:
            assert (text, before, after) == ("", 7.0, 6.0)
        for text, _, _ in found[6:]:
            assert text.startswith("ShardedParameterError")


def constructors(ctx: RankContext) -> list[Any]:
    found = []
    for stage in range(4):
        zero = ZeroOptions(stage=stage)
        with ZeroEngine(Net(), optimizer=ADAMW, zero=zero, mesh=ctx.mesh()) as engine:
            leaf = torch.zeros(4, requires_grad=True)
            fresh = nn.Linear(2, 2)
            engine.backward(engine(*net_batch(0, ctx.rank)))
            found.append(
                [
                    torch.Tensor([5]).tolist(),
                    leaf.is_leaf,
                    torch.arange(3).tolist(),
                    type(fresh.weight) is nn.Parameter,
                    fresh(torch.ones(2)).shape == (2,),
                ]
            )
    return found


def test_constructors_of_tensors_and_modules_are_left_alone(ranks: Pools) -> None:
    """E51."""
    for found in ranks(2)(constructors):
        assert found == [[[5.0], True, [0, 1, 2], True, True]] * 4


def on_meta(ctx: RankContext) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in range(4):
        for _ in range(2):
            torch.manual_seed(100 * ctx.rank + stage)
            with torch.device("meta"):
                module = Net()
            engine = ZeroEngine(
                module, optimizer=ADAMW, zero=ZeroOptions(stage=stage), mesh=ctx.mesh(), seed=11
            )
            with engine:
                found.append(engine.full_state_dict(all_ranks=True))
                engine.backward(engine(*net_batch(0, ctx.rank)))
                engine.step()
    return found


def test_meta_modules_draw_their_own_values(ranks: Pools) -> None:
    """By reset_parameters: equal on all ranks and stages, tied, in the range of each module."""
    results = ranks(2)(on_meta)
    first = results[0][0]
    for found in results:
        assert all(bit_equal(state, first) for state in found)
    assert torch.equal(first["head.weight"], first["embedding.weight"])
    assert torch.equal(first["norm.weight"], torch.ones(6))
    up = first["blocks.1.up.weight"]
    assert 0.2 < up.abs().max() <= 6**-0.5
    assert not torch.equal(up, first["blocks.0.up.weight"])


class Bare(nn.Module):
    """A parameter on a module that cannot reset itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))


def meta_without_reset(ctx: RankContext) -> str:
    with torch.device("meta"):
        module = nn.Sequential(Bare())
    return error_of(lambda: ZeroEngine(module, optimizer=ADAMW, mesh=ctx.mesh()))


def test_a_meta_module_that_cannot_reset_itself_is_refused_by_name(ranks: Pools) -> None:
    for text in ranks(2)(meta_without_reset):
        assert text.startswith("ConfigError")
        assert "'0' (Bare)" in text
        assert "initialize=" in text


def gather_and_write(ctx: RankContext) -> list[Any]:
    found = []
    for stage in range(4):
        for writer in (None, 0, 1):
            module = Net()
            zero = ZeroOptions(stage=stage)
            with ZeroEngine(module, optimizer=SGD, zero=zero, mesh=ctx.mesh()) as engine:
                old = module.embedding.weight.clone() if stage < 3 else None
                with engine.gathered(module.embedding, writer_rank=writer), torch.no_grad():
                    old = module.embedding.weight.clone() if old is None else old
                    module.embedding.weight.fill_(10.0 + ctx.rank)
                state = engine.full_state_dict(all_ranks=True)
                found.append(
                    [
                        torch.equal(state["embedding.weight"], old),
                        state["embedding.weight"].mean().item(),
                        torch.equal(state["head.weight"], state["embedding.weight"]),
                    ]
                )
    return found


def test_what_is_written_while_gathered_survives_only_with_a_writer(ranks: Pools) -> None:
    for found in ranks(2)(gather_and_write):
        for stage in range(4):
            none, first, second = found[3 * stage : 3 * stage + 3]
            assert none[0]
            assert first == [False, 10.0, True]
            assert second == [False, 11.0, True]


def write_one_of_many(ctx: RankContext) -> list[bool]:
    """Write one bias while gathered, in bf16; the masters of all else must keep their bits."""
    found = []
    for stage in range(4):
        masters = []
        for writes in (False, True):
            torch.manual_seed(3)
            module = Net()
            with ZeroEngine(
                module,
                optimizer=torch.optim.AdamW,
                zero=ZeroOptions(stage=stage),
                precision=BF16,
                mesh=ctx.mesh(),
            ) as engine:
                for step in range(2):
                    engine.backward(engine(*net_batch(step, ctx.rank)))
                    engine.step()
                if writes:
                    with engine.gathered(module.blocks[1].norm, writer_rank=0), torch.no_grad():
                        module.blocks[1].norm.bias.fill_(0.5)
                groups = engine.optimizer.param_groups
                masters.append(torch.cat([p.detach().flatten() for p in groups[0]["params"]]))
        changed = masters[0] != masters[1]
        found.append(bool((masters[1][changed] == 0.5).all()) and int(changed.sum()) <= 6)
    return found


def test_writing_one_parameter_leaves_the_masters_of_the_others(ranks: Pools) -> None:
    for found in ranks(2)(write_one_of_many):
        assert found == [True] * 4


def nested_gathering(ctx: RankContext) -> list[Any]:
    """Gather twice at once, and run the module inside the block."""
    found = []
    for stage in range(4):
        torch.manual_seed(3)
        module = Net()
        zero = ZeroOptions(stage=stage)
        with ZeroEngine(module, optimizer=SGD, zero=zero, mesh=ctx.mesh()) as engine:
            with engine.gathered(module):
                with engine.gathered(module.blocks[0]):
                    inner = module.blocks[0].up.weight.sum().item()
                after_inner = module.blocks[0].up.weight.sum().item()
                with torch.no_grad():
                    loss = engine(*net_batch(0, ctx.rank)).item()
                after_forward = module.blocks[0].up.weight.sum().item()
            again = engine(*net_batch(0, ctx.rank)).item()
            found.append([inner, after_inner, after_forward, loss, again])
    return found


def test_gathering_twice_and_running_forward_while_gathered(ranks: Pools) -> None:
    for rank, found in enumerate(ranks(2)(nested_gathering)):
        torch.manual_seed(3)
        module = Net()
        total = module.blocks[0].up.weight.sum().item()
        loss = module(*net_batch(0, rank)).item()
        assert found == [[total, total, total, loss, loss]] * 4


def raise_while_gathered(ctx: RankContext) -> list[list[bool]]:
    found = []
    for stage in range(4):
        module = nn.Sequential(nn.Linear(2, 2))
        zero = ZeroOptions(stage=stage)
        with ZeroEngine(module, optimizer=SGD, zero=zero, mesh=ctx.mesh()) as engine:
            before = engine.full_state_dict(all_ranks=True)
            found.append(
                [write_and_raise(engine), bit_equal(before, engine.full_state_dict(all_ranks=True))]
            )
    return found


def write_and_raise(engine: ZeroEngine) -> bool:
    try:
        with engine.gathered(engine.module), torch.no_grad():
            engine.module[0].weight.fill_(3.0)
            raise KeyError
    except KeyError:
        return True
    return False


def test_an_error_while_gathered_leaves_the_old_weights(ranks: Pools) -> None:
    for found in ranks(2)(raise_while_gathered):
        assert found == [[True, True]] * 4


def full_states(ctx: RankContext) -> list[Any]:
    found = []
    for stage in range(4):
        torch.manual_seed(3)
        zero = ZeroOptions(stage=stage)
        with ZeroEngine(Net(), optimizer=ADAMW, zero=zero, mesh=ctx.mesh()) as engine:
            engine.backward(engine(*net_batch(0, ctx.rank)))
            some = engine.full_gradients()
            every = engine.full_gradients(all_ranks=True)
            state, states = engine.full_state_dict(), engine.full_state_dict(all_ranks=True)
            found.append([sorted(some), every, sorted(state), states])
            engine.step()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_full_states_are_on_rank_0_or_on_all_under_the_modules_names(
    ranks: Pools, world: int
) -> None:
    """E78: and load strictly into a plain module."""
    reference = Net()
    for rank, found in enumerate(ranks(world)(full_states)):
        for some, every, state, states in found:
            assert some == (sorted(every) if rank == 0 else [])
            assert state == (sorted(states) if rank == 0 else [])
            assert set(every) == {name for name, _ in reference.named_parameters()}
            for name, parameter in reference.named_parameters():
                assert every[name].shape == parameter.shape
                assert torch.equal(every[name], found[0][1][name])
            reference.load_state_dict(states, strict=True)


def misuse_gathered(ctx: RankContext) -> list[str]:
    found = []
    for stage in range(4):
        zero = ZeroOptions(stage=stage)
        with ZeroEngine(Net(), optimizer=SGD, zero=zero, mesh=ctx.mesh()) as engine:

            def no_such_writer(engine: ZeroEngine = engine) -> None:
                with engine.gathered(engine.module, writer_rank=2):
                    pass

            def step_inside(engine: ZeroEngine = engine) -> None:
                with engine.gathered(engine.module):
                    engine.step()

            engine.backward(engine(*net_batch(0, ctx.rank)))
            found += [error_of(no_such_writer), error_of(step_inside)]
            engine.step()
    return found


def test_a_writer_that_does_not_exist_and_a_step_while_gathered_are_refused(ranks: Pools) -> None:
    for found in ranks(2)(misuse_gathered):
        assert all("writer_rank=2" in text for text in found[0::2])
        assert all("step() inside engine.gathered" in text for text in found[1::2])
