"""All that belongs to the state is in a checkpoint, and what does not fit is said."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rayzero.engine.state.agreement import CheckpointNotice
from rayzero.engine.state.manifest import read_manifest
from rayzero.errors import CheckpointError, ShardedParameterError
from tests.ranks import Pools, RankContext
from tests.state.cases import Layout, differences, named_state, plain_engine
from tests.state.mixed import OTHER_OPTIMIZER, Mixed, mixed_engine


def save_mixed(ctx: RankContext, layout: Layout, folder: Path) -> dict[str, Any]:
    with mixed_engine(ctx, layout, seed=1) as engine:
        engine.optimizer.param_groups[0]["lr"] = 0.0625
        engine.save(folder)
        return named_state(engine)


def load_mixed(ctx: RankContext, layout: Layout, folder: Path) -> tuple[dict[str, Any], float]:
    with mixed_engine(ctx, layout, seed=2) as engine:
        engine.load(folder)
        return named_state(engine), engine.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (Layout(3, 2, params="bf16"), Layout(1, 3, params="bf16")),
        (Layout(0, 3, params="bf16"), Layout(3, 4, params="bf16")),
        (Layout(2, 4, replicate=2), Layout(0, 4, replicate=2)),
        (Layout(3, 2, params="bf16", offload_params="disk"), Layout(2, 2, params="bf16")),
        (Layout(0, 2), Layout(3, 3, offload="disk", offload_params="disk")),
    ],
)
def test_frozen_weights_buffers_ties_and_settings_come_back(
    ranks: Pools, tmp_path: Path, here: Layout, there: Layout
) -> None:
    """E76."""
    saved = ranks(here.world)(save_mixed, here, tmp_path / "c")[0]
    for loaded, lr in ranks(there.world)(load_mixed, there, tmp_path / "c"):
        # Batch norm follows each rank's own data; what is saved is rank 0's.
        assert not differences(saved, loaded)
        assert lr == 0.0625
    assert saved["weights/norm.num_batches_tracked"].dtype is torch.int64
    narrow = torch.bfloat16 if here.params == "bf16" else torch.float32
    assert saved["weights/frozen.weight"].dtype is narrow
    manifest = read_manifest(tmp_path / "c")
    assert manifest.tied == {"head.weight": "tokens.weight"}
    assert "weights/head.weight" not in manifest.tensors
    assert not any("table" in key for key in manifest.tensors)
    elements = {key: torch.Size(s.shape).numel() for key, s in manifest.tensors.items()}
    num_bytes = sum(n * manifest.tensors[key].torch_dtype.itemsize for key, n in elements.items())
    assert sum(manifest.files) == num_bytes, "padding or a second copy is in the files"


class Grown(nn.Module):
    """The module with a layer more, one less, and one of another size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens = nn.Embedding(11, 7)
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.back = nn.Linear(5, 7)
        self.extra = nn.Linear(3, 2)


def refusal(ctx: RankContext, module: nn.Module, folder: Path, optimizer: Any = None) -> str:
    arguments = [optimizer] if optimizer else []
    with plain_engine(ctx, Layout(3, 2), module, *arguments) as engine:
        before = engine.full_state_dict(all_ranks=True)
        with pytest.raises(CheckpointError) as raised:
            engine.load(folder)
        after = engine.full_state_dict(all_ranks=True)
        assert not differences(before, after), "a refused load changed the engine"
        return str(raised.value)


def load_loosely(ctx: RankContext, module: nn.Module, folder: Path) -> dict[str, Any]:
    with plain_engine(ctx, Layout(3, 2), module) as engine:
        engine.load(folder, strict=False)
        return named_state(engine)


def test_missing_and_unexpected_names_are_listed_and_can_be_allowed(
    ranks: Pools, tmp_path: Path
) -> None:
    saved = ranks(2)(save_mixed, Layout(1, 2), tmp_path / "c")[0]
    text = ranks(2)(refusal, Grown(), tmp_path / "c")[0]
    assert "missing in it: extra.bias, extra.weight" in text
    assert "unexpected in it: frozen.bias, frozen.weight, scale" in text
    assert "strict=False" in text
    loaded = ranks(2)(load_loosely, Grown(), tmp_path / "c")[0]
    own = Grown().state_dict()
    assert torch.equal(loaded["weights/extra.weight"], own["extra.weight"])
    for key in ("weights/back.weight", "exp_avg/back.weight", "exp_avg_sq/tokens.weight"):
        assert torch.equal(loaded[key], saved[key]), key


def test_other_shapes_other_ties_and_other_optimizers_are_refused(
    ranks: Pools, tmp_path: Path
) -> None:
    ranks(2)(save_mixed, Layout(1, 2), tmp_path / "c")
    wider = ranks(2)(refusal, Mixed(1, width=9), tmp_path / "c")[0]
    assert "tokens.weight: saved [11, 7], here [11, 9]" in wider
    untied = ranks(2)(refusal, Mixed(1, tied=False), tmp_path / "c")[0]
    assert "missing in it: head.weight" in untied
    other = ranks(2)(refusal, Mixed(1), tmp_path / "c", OTHER_OPTIMIZER)[0]
    assert "saved by AdamW, the engine has SGD" in other


def save_untied(ctx: RankContext, folder: Path) -> None:
    with mixed_engine(ctx, Layout(2, 2), seed=1, tied=False) as engine:
        engine.save(folder)


def test_a_weight_of_its_own_is_not_dropped_where_the_module_ties_it(
    ranks: Pools, tmp_path: Path
) -> None:
    ranks(2)(save_untied, tmp_path / "c")
    text = ranks(2)(refusal, Mixed(1), tmp_path / "c")[0]
    assert "unexpected in it: head.weight (tied to tokens.weight here)" in text


def load_in_other_precision(
    ctx: RankContext, layout: Layout, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    with mixed_engine(ctx, layout, seed=2) as engine, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", CheckpointNotice)
        engine.load(folder)
        return named_state(engine), [str(w.message) for w in said]


def test_another_precision_converts_from_the_master_with_a_notice(
    ranks: Pools, tmp_path: Path
) -> None:
    narrow, wide = Layout(1, 2, params="bf16"), Layout(3, 3)
    saved = ranks(2)(save_mixed, narrow, tmp_path / "narrow")[0]
    loaded, said = ranks(3)(load_in_other_precision, wide, tmp_path / "narrow")[0]
    assert torch.equal(loaded["weights/back.weight"], saved["master/back.weight"])
    assert torch.equal(loaded["exp_avg/back.weight"], saved["exp_avg/back.weight"])
    assert "parameters saved in bf16 are fp32 here" in said[0]
    saved = ranks(3)(save_mixed, wide, tmp_path / "wide")[0]
    loaded, said = ranks(2)(load_in_other_precision, narrow, tmp_path / "wide")[0]
    assert torch.equal(loaded["master/back.weight"], saved["weights/back.weight"])
    assert torch.equal(loaded["weights/back.weight"], saved["weights/back.weight"].bfloat16())
    assert "parameters saved in fp32 are bf16 here" in said[0]


def state_dict_refusal(ctx: RankContext) -> str:
    with mixed_engine(ctx, Layout(3, 2), seed=1) as engine:
        if ctx.rank:
            return ""
        with pytest.raises(ShardedParameterError) as raised:
            torch.save(engine.module.state_dict(), "/dev/null")
        return str(raised.value)


def test_saving_a_sharded_module_past_the_engine_names_the_right_call(ranks: Pools) -> None:
    assert "engine.full_state_dict()" in ranks(2)(state_dict_refusal)[0]
