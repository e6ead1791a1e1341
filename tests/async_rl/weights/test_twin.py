import threading
from concurrent.futures import wait

import pytest
import torch

from async_rl.weights.checksum import model_contents
from async_rl.weights.twin import Staging, Twin


class Kernel:
    """As the implementation of an attention layer: it refers to a module and holds its own weights."""

    def __init__(self, layer):
        self.layer = layer
        self.packed = None

    def pack(self):
        self.packed = self.layer.weight.detach() * 2


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.weight.loader = self.load_weight
        self.register_buffer("scale", torch.zeros(4))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.kernel = Kernel(self)
        self.calls = 0

    def load_weight(self, value):
        self.weight.data.fill_(value)
        self.scale.fill_(value)
        weight = self.weight * 2
        self.forward_packed = lambda x: x @ weight.T  # as a weight that is packed for a CPU kernel
        self.kernel.pack()

    def forward(self, x):
        self.calls += 1
        assert torch.equal(self.kernel.packed, self.weight * 2)
        return self.forward_packed(x) + self.scale


class Model(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.head = Layer()
        self.head.weight = self.layers[0].weight  # tied
        self.view = self.layers[1].weight[1:]
        load(self, value)

    def forward(self, x):
        return torch.stack([layer(x) for layer in (*self.layers, self.head)])


def load(model, value):
    for layer in (*model.layers, model.head):
        layer.weight.loader(value)
        layer.load_weight(value)


def output(model):
    return model(torch.ones(3)).unique().tolist()


def test_a_twin_shares_no_weights_and_an_exchange_swaps_all_of_them():
    model = Model(1.0)
    twin = Twin(model)
    load(twin.model, 2.0)
    assert output(model) == [7.0]
    for value in (3.0, 4.0, 5.0):
        sums, replaced = model_contents(twin.model), output(model)
        twin.exchange()
        assert model_contents(model) == sums
        load(twin.model, value)
        assert output(model) == [7.0 * (value - 1)] != replaced
    assert model.layers[0].calls == 7, "what is no weight stays"


def test_references_to_modules_and_parameters_stay_together_in_both():
    model = Model(1.0)
    weight = model.layers[1].weight
    twin = Twin(model)
    for _ in range(2):
        load(twin.model, 2.0)
        twin.exchange()
        assert weight is model.layers[1].weight and weight.unique().tolist() == [2.0]
        for each in (model, twin.model):
            assert each.head.weight is each.layers[0].weight
            assert each.head.kernel.layer is each.head
    assert model.layers[0].weight.data_ptr() != twin.model.layers[0].weight.data_ptr()
    assert [name for name, _ in twin.model.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_staging_loads_beside_the_model_and_commits_once():
    model, staging, enter = Model(1.0), Staging(), threading.Event()

    def load_two(twin):
        enter.wait()
        load(twin.model, 2.0)
        return "two"

    staging.start(model, load_two)
    assert staging.result() is None and output(model) == [7.0]
    enter.set()
    wait([staging._load])
    assert staging.result() == "two" and output(model) == [7.0]
    staging.commit()
    assert output(model) == [14.0]
    with pytest.raises(RuntimeError, match="no staged version"):
        staging.commit()


def test_a_failed_load_leaves_the_model_and_the_next_one_starts_from_a_new_twin():
    model, staging = Model(1.0), Staging()

    def fail(twin):
        load(twin.model, 9.0)
        raise OSError("damaged")

    staging.start(model, fail)
    wait([staging._load])
    with pytest.raises(OSError, match="damaged"):
        staging.result()
    with pytest.raises(RuntimeError):
        staging.commit()
    staging.start(model, lambda twin: output(twin.model))
    wait([staging._load])
    assert staging.result() == [7.0], "a copy of the model's own weights"
