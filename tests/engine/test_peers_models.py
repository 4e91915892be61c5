"""Models nobody here wrote, at every stage: Hugging Face's, a vision network, compiled blocks."""

import shutil
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rayzero.engine import ZeroEngine, ZeroOptions
from rayzero.records import Phase
from tests.engine.harness import SMALL_SGD, Moment, Script, at_stages, built, plain
from tests.engine.reference import Net, bit_equal, largest_difference, net_batch
from tests.ranks import Pools, RankContext

VOCAB, SEQ_LEN = 50, 12
LAYERS = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32},
    "llama": {**LAYERS, **HEADS},
    "bert": {**LAYERS, "num_attention_heads": 4, "task": "masked"},
    "t5": {
        "task": "seq2seq",
        "num_layers": 2,
        "d_model": 16,
        "d_ff": 24,
        "num_heads": 2,
        "d_kv": 8,
    },
    "mixtral": {**LAYERS, **HEADS, "num_local_experts": 4, "output_router_logits": True},
}
"""GPT-2, Llama with grouped-query attention, BERT, T5, and a mixture of experts, all tiny."""

OPTIONS = [
    *(ZeroOptions(stage=stage, bucket_elements=3000) for stage in range(4)),
    ZeroOptions(stage=3, overlap=False, persistence_elements=16),
    ZeroOptions(stage=3, prefetch_elements=10**6, units=[]),
]
BOUND = 1e-6
"""Some of these models compute norms and softmaxes in fp32 whatever the weights are."""


def token_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    tokens = (now.noise(2, SEQ_LEN + 1).abs() * 1000).long() % VOCAB
    return engine(tokens[:, :-1], tokens[:, 1:])


def build(name: str, **changes: Any) -> nn.Module:
    """Build one of the models; transformers is imported where it is needed."""
    from rayzero.models import hugging_face

    module = hugging_face.build(name, vocab_size=VOCAB, **{**SIZES[name], **changes})
    if name == "mixtral":
        module.model.set_experts_implementation("eager")  # the grouped product knows no fp64
    return module


class Residual(nn.Module):
    """Two convolutions with batch norm, strided and added to a projected input, as in ResNet."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out_channels, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.second = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.project = nn.Conv2d(channels, out_channels, 1, stride=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.first(x)))
        y = self.norm2(self.second(y))
        y += self.project(x)
        return self.relu(y)


class Vision(nn.Module):
    """A small residual network with a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(True))
        self.blocks = nn.Sequential(Residual(4, 6), Residual(6, 8))
        self.pool, self.classify = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = self.pool(self.blocks(self.stem(images))).flatten(1)
        return nn.functional.cross_entropy(self.classify(features), labels)


def image_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    return engine(now.noise(4, 3, 11, 11), torch.tensor([0, 1, 2, 4]))


def weights_of(script: Script, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave buffers out: each rank's batch norm has seen its own batches."""
    buffers = {name for name, _ in built(script).named_buffers()}
    return {name: tensor for name, tensor in state.items() if name not in buffers}


def assert_weights_like_plain(ranks: Pools, script: Script, options: list[ZeroOptions]) -> None:
    """Assert that every option gives REF's weights, the same bits on all ranks."""
    expected = weights_of(script, plain(script, 2))
    first, second = ranks(2)(at_stages, script, options, deadline_s=100)
    for zero, states in zip(options, zip(first, second, strict=True), strict=True):
        mine, other = (weights_of(script, state) for state in states)
        assert bit_equal(mine, other), f"ranks differ: {zero}"
        assert largest_difference(mine, expected) <= BOUND, f"differs from one process: {zero}"


@pytest.mark.parametrize("name", SIZES)
def test_hugging_face_models_train_like_one_process(ranks: Pools, name: str) -> None:
    pytest.importorskip("transformers")
    script = Script(
        make=partial(build, name), loss=token_loss, optimizer=SMALL_SGD, steps=2, micros=2
    )
    assert_weights_like_plain(ranks, script, OPTIONS)


def test_a_vision_network_trains_like_one_process(ranks: Pools) -> None:
    script = Script(make=Vision, loss=image_loss, optimizer=SMALL_SGD, steps=2, micros=2)
    assert_weights_like_plain(ranks, script, OPTIONS)


def grouped_experts() -> nn.Module:
    """Build a mixture whose experts run in one grouped product, as by default: not in fp64."""
    module = build("mixtral")
    module.model.set_experts_implementation("grouped_mm")
    module.double = lambda: module
    return module


def test_experts_in_one_grouped_product(ranks: Pools) -> None:
    pytest.importorskip("transformers")
    script = Script(make=grouped_experts, loss=token_loss, optimizer=SMALL_SGD, steps=2)
    assert_weights_like_plain(ranks, script, OPTIONS[2:])


def checkpointing(name: str, reentrant: bool) -> nn.Module:
    """Turn the model's own activation checkpointing on."""
    module = build(name)
    options = {"use_reentrant": reentrant}
    module.model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    if reentrant:
        module.model.enable_input_require_grads()
    return module


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_hugging_faces_own_checkpointing(ranks: Pools, name: str, reentrant: bool) -> None:
    pytest.importorskip("transformers")
    make = partial(checkpointing, name, reentrant)
    script = Script(make=make, loss=token_loss, optimizer=SMALL_SGD, steps=2)
    assert_weights_like_plain(ranks, script, OPTIONS[2:5])


def adapted() -> nn.Module:
    """Freeze a model but for its norms and the first block's attention, as fine-tuning does."""
    module = build("llama")
    for key, parameter in module.named_parameters():
        parameter.requires_grad_("norm" in key or "layers.0.self_attn" in key)
    return module


def test_a_hugging_face_model_that_is_mostly_frozen(ranks: Pools) -> None:
    pytest.importorskip("transformers")
    script = Script(make=adapted, loss=token_loss, optimizer=SMALL_SGD, steps=2)
    assert_weights_like_plain(ranks, script, OPTIONS)


class Relay(nn.Module):
    """A block that hands its second input on, as T5's do with their position bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x).tanh() + bias, bias


class Relays(nn.Module):
    """Relays, and a bias that is computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(4, 4)
        self.relays = nn.ModuleList(Relay() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias(x)
        for relay in self.relays:
            x, bias = relay(x, bias)
        return x.square().mean()


def backward_gathers(ctx: RankContext) -> Counter[str]:
    zero = ZeroOptions(stage=3, units=[f"relays.{i}" for i in range(4)])
    with ZeroEngine(Relays(), optimizer=SMALL_SGD, zero=zero, mesh=ctx.mesh()) as engine:
        engine.backward(engine(torch.ones(2, 4)))
        lines = engine.ledger.transfers
        return Counter(t.unit for t in lines if t.op == "all_gather" and t.phase == Phase.BACKWARD)


def test_an_input_that_is_handed_on_does_not_gather_its_unit_again(ranks: Pools) -> None:
    for gathers in ranks(2)(backward_gathers):
        assert len(gathers) == 5
        assert set(gathers.values()) == {1}


def with_compiled_blocks(backend: Any) -> nn.Module:
    """Compile the forward of each block, as docs/any_module.md says."""
    module = Net()
    for block in module.blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    return module


def block_loss(engine: nn.Module, now: Moment) -> torch.Tensor:
    return engine(*net_batch(now.step, 10 * now.micro + now.rank))


def compiled(
    ctx: RankContext, backend: str, options: list[ZeroOptions]
) -> list[tuple[dict[str, torch.Tensor], int]]:
    """Train with compiled blocks; return weights and how many graphs were compiled, per option."""
    found = []
    for zero in options:
        torch._dynamo.reset()
        graphs: list[Any] = []

        def note(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return torch._dynamo.lookup_backend(backend)(graph, inputs)

        script = Script(make=partial(with_compiled_blocks, note), loss=block_loss, micros=2)
        found.append((at_stages(ctx, script, [zero])[0], len(graphs)))
    return found


def assert_compiled_like_plain(ranks: Pools, backend: str) -> None:
    options = [ZeroOptions(stage=2), ZeroOptions(stage=3), ZeroOptions(stage=3, overlap=False)]
    expected = plain(Script(make=Net, loss=block_loss, micros=2), 2)
    for found in ranks(2)(compiled, backend, options, deadline_s=300):
        for weights, num_graphs in found:
            assert num_graphs == 1, "blocks share one graph, and no step compiles again"
            assert largest_difference(weights, expected) <= 1e-10


def test_compiled_blocks_train_like_one_process(ranks: Pools) -> None:
    assert_compiled_like_plain(ranks, "aot_eager")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
def test_blocks_compiled_to_kernels_train_like_one_process(ranks: Pools) -> None:
    assert_compiled_like_plain(ranks, "inductor")
