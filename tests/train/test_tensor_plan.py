"""Models that are not ours, cut by the plan they ship or by the config's."""

from typing import Any

import pytest
import torch
from torch import nn

from rayzero.config.build import build
from rayzero.config.cell import CellConfig
from rayzero.config.parallel import Style
from rayzero.dist.comm import Communicator
from rayzero.errors import CombinationError, ConfigError
from rayzero.models.transformer import Transformer
from rayzero.parallel.plan import Plan
from rayzero.parallel.suggest import plan_as_yaml, suggested_plan
from rayzero.train.build import build_module
from tests.ranks import Pools, RankContext
from tests.tp.cases import MODELS
from tests.train.test_cell import check_theory, config_of, run

pytest.importorskip("transformers")

FACTORY = "rayzero.models.hugging_face:build"
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
}
WIDTHS = {**SIZES, "num_key_value_heads": 2, "head_dim": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**WIDTHS, "vocab_size": 257, "pad_token_id": 65},
    "qwen3": {**WIDTHS, "vocab_size": 256, "tie_word_embeddings": True},
    "gpt_neox": {**SIZES, "vocab_size": 256},
}


def hugging_face(name: str, args: dict[str, Any], **groups: dict[str, Any]) -> CellConfig:
    """Return a cell with this architecture."""
    model = {"name": name, "config": name, "factory": FACTORY, "factory_args": args}
    return config_of(model=model, data={"micro_batch": 3}, **groups)


@pytest.mark.parametrize(("name", "stage"), [("llama", 3), ("qwen3", 1), ("gpt_neox", 2)])
def test_a_hugging_face_model_is_cut_by_its_own_plan_as_theory_says(
    ranks: Pools, name: str, stage: int
) -> None:
    """The same model on the same batches, whole on two data ranks and cut over two tp ranks."""
    losses = {}
    for tp in (1, 2):
        config = hugging_face(
            name,
            ARCHITECTURES[name],
            zero={"stage": stage, "bucket_elements": 5_000},
            parallel={"tp": tp},
            optimizer={"max_grad_norm": 0.5},
        )
        reports = [report for report, _ in ranks(2 * tp)(run, config)]
        check_theory(reports)
        losses[tp] = [(s.loss, s.grad_norm) for s in reports[0].steps]
        assert len({r.num_params for r in reports}) == 1
        losses[tp].append((reports[0].num_params, 0))
    for ours, whole in zip(losses[2], losses[1], strict=True):
        assert ours == pytest.approx(whole, rel=1e-5)


class Plain(nn.Module):
    """A user's model without a plan: a table, a gated part, an output layer and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Part() for _ in range(2))
        self.out = nn.Linear(8, 10)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.table(inputs)
        for block in self.blocks:
            x = x + block(x)
        loss: torch.Tensor = self.loss(self.out(x).flatten(0, 1), targets.flatten())
        return loss


class Part(nn.Module):
    """down(sigmoid(gate(x)) * up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        update: torch.Tensor = self.down(self.gate(x).sigmoid() * self.up(x))
        return update


def plain() -> Plain:
    """Build the user's model."""
    return Plain()


PLAN = {
    "table": "vocab",
    "blocks.*.gate": "column",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "out": "vocab",
    "loss": "vocab",
}


def users_cell(tp: int, plan: dict[str, str]) -> CellConfig:
    """Return a cell with the model above."""
    return config_of(
        model={"factory": f"{__name__}:plain", "vocab_size": 10},
        parallel={"tp": tp, "plan": plan},
        data={"micro_batch": 6},
        zero={"stage": 2},
    )


def test_a_users_model_is_cut_by_the_configs_plan(ranks: Pools) -> None:
    reports = [report for report, _ in ranks(2)(run, users_cell(2, PLAN))]
    check_theory(reports)
    whole = [report for report, _ in ranks(2)(run, users_cell(1, {}))]
    losses, wanted = ([s.loss for s in r[0].steps] for r in (reports, whole))
    assert losses == pytest.approx(wanted, rel=1e-5)


def blocks_of_one_draw(context: RankContext) -> dict[str, tuple[int | None, torch.Tensor]]:
    """Build the model on ranks that draw other values; return (cut dim, value) of each part."""
    torch.manual_seed(context.rank)
    comm = Communicator(context.mesh(tp=context.world))
    model = build_module(users_cell(2, PLAN), comm)
    comm.close()
    cut = model.tensor_parallel
    return {
        name: (cut[name].dim if name in cut else None, parameter.detach())
        for name, parameter in model.module.named_parameters()
    }


def test_ranks_that_draw_other_values_get_blocks_of_rank_0s(ranks: Pools) -> None:
    """T05, T06: the whole model is what rank 0 drew, at any tp."""
    first, second = ranks(2)(blocks_of_one_draw)
    torch.manual_seed(0)
    for name, whole in Plain().named_parameters():
        dim, block = first[name]
        joined = block if dim is None else torch.cat((block, second[name][1]), dim)
        assert torch.equal(joined, whole.detach()), name
        assert dim is not None or torch.equal(block, second[name][1]), name


def refusal(context: RankContext, config: CellConfig) -> str:
    comm = Communicator(context.mesh(tp=context.world))
    with pytest.raises(ConfigError) as caught:
        build_module(config, comm)
    comm.close()
    return str(caught.value)


def test_a_model_without_a_plan_is_refused_with_one_to_start_from(ranks: Pools) -> None:
    message = ranks(2)(refusal, users_cell(2, {}))[0]
    assert "parallel.tp=2 needs a plan" in message
    for pattern, style in PLAN.items():
        assert f'"{pattern}": {style}' in message


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("llama", {**WIDTHS, "num_key_value_heads": 1}, ["parallel.tp=2", "1 heads", "k_proj"]),
        ("llama", {**WIDTHS, "attention_dropout": 0.1}, ["attention_dropout", "parallel.tp"]),
        ("mixtral", WIDTHS, ["moe_tp_experts", "parallel.plan"]),
        ("phi3", {**SIZES, "pad_token_id": None}, ["colwise_gather_output", "parallel.plan"]),
        ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2}, ["ships none", "wte", "vocab"]),
    ],
)
def test_a_plan_that_is_not_built_is_refused(
    ranks: Pools, name: str, args: dict[str, Any], words: list[str]
) -> None:
    for message in ranks(2)(refusal, hugging_face(name, args, parallel={"tp": 2})):
        assert all(word in message for word in words), message


def test_the_plan_suggested_for_our_transformer_is_the_one_it_has() -> None:
    """Without the styles that only matter with sequence parallelism or dropout."""
    with torch.device("meta"):
        module = Transformer(MODELS["gpt2 untied"])
    expected: Plan = {
        "tokens": Style.VOCAB,
        "output": Style.VOCAB,
        "blocks.*.attention.q": Style.COLUMN,
        "blocks.*.attention.k": Style.COLUMN,
        "blocks.*.attention.v": Style.COLUMN,
        "blocks.*.attention.o": Style.ROW,
        "blocks.*.feed_forward.up": Style.COLUMN,
        "blocks.*.feed_forward.down": Style.ROW,
        "loss": Style.VOCAB,
    }
    assert suggested_plan(module) == expected
    assert '    "blocks.*.attention.o": row' in plan_as_yaml(expected).splitlines()


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"parallel": {"tp": 2, "plan": {"tokens": "vocab"}}}, ["parallel.plan", "model.factory"]),
        (
            {"parallel": {"sequence": True}, "model": {"factory": "a:b"}},
            ["parallel.sequence=true", "own transformer"],
        ),
        (
            {"parallel": {"tp": 2, "sequence": True}, "data": {"seq_len": 15}},
            ["parallel.tp=2", "data.seq_len=15", "1, 3, 5, 15"],
        ),
        (
            {"parallel": {"tp": 4}, "model": {"num_heads": 12, "hidden": 24, "num_kv_heads": 6}},
            ["parallel.tp=4", "model.num_kv_heads=6", "1, 2, 3, 6, 12"],
        ),
        (
            {"parallel": {"tp": 4}, "model": {"num_kv_heads": 2, "fused_qkv": True}},
            ["model.num_kv_heads=2 with model.fused_qkv=true", "1, 2"],
        ),
        ({"parallel": {"tp": 2}, "model": {"num_heads": 3, "hidden": 24}}, ["model.num_heads=3"]),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_numbers(
    groups: dict[str, Any], words: list[str]
) -> None:
    """T14."""
    with pytest.raises(CombinationError) as caught:
        build(groups)
    assert all(word in str(caught.value) for word in words), str(caught.value)
