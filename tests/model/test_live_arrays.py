"""What a second look at a live model notices, array by array and module by module, and what it may overlook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers

from prefixbank import PrefixBank
from prefixbank.kvcache.parameters import LiveArrays, digest_parameters
from tests.model.tiny import build_model, random_ids

Change = Callable[[Any], object]


def swap_one_array(model: Any) -> None:
    attention = model.layers[1].self_attn
    attention.k_proj.weight = attention.k_proj.weight * 1.5


def swap_for_an_equal_array(model: Any) -> None:
    """It may be the same numbers: that can only be told by reading them, so it counts as a change."""
    model.layers[0].mlp.up_proj.weight = mx.array(model.layers[0].mlp.up_proj.weight)


def swap_a_module(model: Any) -> None:
    model.layers[0].mlp = build_model(seed=7).layers[0].mlp


def swap_a_module_in_a_list(model: Any) -> None:
    model.layers[1] = build_model(seed=7).layers[1]


def swap_two_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def add_a_parameter(model: Any) -> None:
    model.layers[0].self_attn.q_proj.bias = mx.ones(32)


def add_a_module(model: Any) -> None:
    model.extra = nn.Linear(4, 4)


def remove_a_parameter(model: Any) -> None:
    del model.layers[0].self_attn.q_proj["weight"]


def replace_a_parameter_by_one_of_another_name(model: Any) -> None:
    projection = model.layers[0].self_attn.q_proj
    projection["other"] = projection.pop("weight")


def shorten_the_list_of_layers(model: Any) -> None:
    model.model.layers.pop()


def lengthen_the_list_of_layers(model: Any) -> None:
    model.model.layers.append(build_model(seed=7).layers[0])


def replace_the_list_of_layers(model: Any) -> None:
    model.model.layers = list(model.model.layers)


def convert(model: Any) -> None:
    model.set_dtype(mx.float16)


def update(model: Any) -> None:
    model.update(tree_map(lambda array: array * 2, model.parameters()))


def load(model: Any) -> None:
    model.load_weights([("model.norm.weight", mx.ones(32))], strict=False)


def quantise(model: Any) -> None:
    nn.quantize(model, group_size=32, bits=8)


def add_lora_layers(model: Any) -> None:
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 1.0, "dropout": 0.0})


CHANGES: list[Change] = [
    swap_one_array,
    swap_for_an_equal_array,
    swap_a_module,
    swap_a_module_in_a_list,
    swap_two_layers,
    add_a_parameter,
    add_a_module,
    remove_a_parameter,
    replace_a_parameter_by_one_of_another_name,
    shorten_the_list_of_layers,
    lengthen_the_list_of_layers,
    replace_the_list_of_layers,
    convert,
    update,
    load,
    quantise,
    add_lora_layers,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_is_noticed(change: Change) -> None:
    model = build_model()
    arrays = LiveArrays(model)
    assert arrays.are_unchanged()
    change(model)
    assert not arrays.are_unchanged()
    assert not arrays.are_unchanged()
    assert LiveArrays(model).are_unchanged()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.layers[0].self_attn, "_mask", mx.ones(3)),  # filled in at the first step
        lambda m: m.layers[0].__setitem__("_cached", mx.ones(3)),
        lambda m: setattr(m.layers[0].self_attn, "n_heads", 4),
        lambda m: setattr(m, "something", 17),
        lambda m: m.train(),
        lambda m: m.eval(),
        lambda m: m.freeze(),
        lambda m: mx.eval(m.parameters()),
        lambda m: m(mx.array([random_ids(9)])),
        lambda m: digest_parameters(m),
    ],
)
def test_what_does_not_change_weights_is_overlooked(change: Change) -> None:
    model = build_model()
    arrays = LiveArrays(model)
    change(model)
    assert arrays.are_unchanged()


def test_hidden_arrays_may_come_go_and_change() -> None:
    model = build_model()
    rope = model.layers[0].self_attn.rope
    rope._table = mx.ones(3)
    arrays = LiveArrays(model)
    rope._table = mx.ones(4)
    assert arrays.are_unchanged()
    del rope["_table"]
    assert arrays.are_unchanged()


def test_hidden_entry_that_goes_does_not_hide_a_parameter_that_comes() -> None:
    """The module holds as many as before."""
    model = build_model()
    projection = model.layers[0].self_attn.q_proj
    projection._table = mx.ones(3)
    arrays = LiveArrays(model)
    del projection["_table"]
    projection.bias = mx.ones(32)
    assert not arrays.are_unchanged()


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = {"left": [nn.Linear(2, 2)], "right": (nn.Linear(2, 2), mx.ones(2))}
        self.places: list[Any] = [None, nn.Linear(2, 2), 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.towers["left"].__setitem__(0, nn.Linear(2, 2)),
        lambda m: setattr(m.towers["left"][0], "weight", mx.ones((2, 2))),
        lambda m: setattr(m.towers["right"][0], "weight", mx.ones((2, 2))),
        lambda m: m.towers.__setitem__("right", (nn.Linear(2, 2), mx.ones(2))),
        lambda m: m.towers.__setitem__("middle", mx.ones(2)),
        lambda m: m.towers.pop("left"),
        lambda m: m.places.__setitem__(1, None),
        lambda m: m.places.__setitem__(0, nn.Linear(2, 2)),
        lambda m: m.places.__setitem__(2, mx.ones(2)),
    ],
)
def test_changes_in_nested_dicts_lists_and_tuples_are_noticed(change: Change) -> None:
    model = Nested()
    arrays = LiveArrays(model)
    assert arrays.are_unchanged()
    change(model)
    assert not arrays.are_unchanged()


def test_dead_arrays_are_not_taken_for_new_ones() -> None:
    """What is known by identity must stay alive: else another object could come to have that identity."""
    model = build_model()
    arrays = LiveArrays(model)
    projection = model.layers[0].self_attn.q_proj
    for _ in range(50):
        projection.weight = mx.zeros((32, 32))
        assert not arrays.are_unchanged()


@pytest.mark.parametrize("change", [swap_one_array, swap_a_module, add_a_parameter, swap_two_layers])
def test_bank_serves_a_changed_model_nothing_of_before(change: Change, tokenizer: Any, small_bank: PrefixBank) -> None:
    prompt = random_ids(40)
    llm = small_bank.attach(build_model(), tokenizer)
    llm.warm(prompt)
    assert llm.match([*prompt, 1]).n_tokens == 40
    change(llm.model)
    assert llm.match([*prompt, 1]).n_tokens == 0


def test_digests_tell_arrays_settings_and_classes_apart() -> None:
    digests = [digest_parameters(build_model())]
    assert digest_parameters(build_model()) == digests[0]
    for change in (
        swap_one_array,
        add_a_parameter,
        convert,
        lambda m: setattr(m.layers[0].self_attn, "scale", 0.5),
        lambda m: setattr(m.layers[0].self_attn.rope, "base", 5e5),
        lambda m: setattr(m.layers[0].self_attn, "_table", mx.ones(3)),
        lambda m: setattr(m.layers[0].self_attn, "_table", mx.ones(3) > 0),
        lambda m: setattr(m.layers[0].self_attn, "_table", mx.ones((3, 1))),
        lambda m: setattr(m.layers[0].mlp, "__class__", type("Other", (type(m.layers[0].mlp),), {})),
    ):
        model = build_model()
        change(model)
        digests.append(digest_parameters(model))
    assert len(set(digests)) == len(digests)
    model = build_model()
    model.train()
    assert digest_parameters(model) == digests[0]
