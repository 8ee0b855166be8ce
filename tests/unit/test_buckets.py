"""Bucket layouts: order, components, refusals."""

import pytest

from ayni.buckets import BLOCK_COMPONENTS, FLAT, Bucket
from worker_agent.training.layout import BucketSpec, check_layout, flat_layout, llama_layout

BLOCK = {
    "input_layernorm.weight": 4,
    "mlp.down_proj.weight": 24,
    "mlp.gate_proj.weight": 22,
    "mlp.up_proj.weight": 23,
    "post_attention_layernorm.weight": 5,
    "self_attn.k_proj.weight": 17,
    "self_attn.o_proj.weight": 19,
    "self_attn.q_proj.weight": 16,
    "self_attn.v_proj.weight": 18,
}
LLAMA = {
    "model.embed_tokens.weight": 100,
    **{f"model.layers.{block}.{name}": size for block in range(2) for name, size in BLOCK.items()},
    "model.norm.weight": 6,
    "lm_head.weight": 101,
}


def test_flat_layout_keeps_the_order_of_the_parameters() -> None:
    (spec,) = flat_layout({"lora_b": 6, "lora_a": 4, "head": 2})
    assert spec.bucket == FLAT
    assert spec.names == ("lora_b", "lora_a", "head")
    assert spec.component_sizes == ()
    assert spec.slices() == [("lora_b", slice(0, 6)), ("lora_a", slice(6, 10)), ("head", slice(10, 12))]


def test_llama_buckets_come_in_backward_order_and_hold_everything() -> None:
    specs = llama_layout(LLAMA)
    assert [str(spec.bucket) for spec in specs] == ["lm_head", "final_norm", "block 1", "block 0", "embedding"]
    check_layout(specs, LLAMA)


def test_block_components_are_the_nine_of_the_wire_in_order() -> None:
    block = llama_layout(LLAMA)[3]
    assert block.component_sizes == (16, 17, 18, 19, 22, 23, 24, 4, 5)
    assert len(block.component_sizes) == len(BLOCK_COMPONENTS)
    assert block.names[0] == "model.layers.0.self_attn.q_proj.weight"
    assert block.names[-1] == "model.layers.0.post_attention_layernorm.weight"


def test_tied_embeddings_leave_the_embedding_only() -> None:
    specs = llama_layout({name: size for name, size in LLAMA.items() if name != "lm_head.weight"})
    assert [str(spec.bucket) for spec in specs] == ["final_norm", "block 1", "block 0", "embedding"]


def test_lora_components_without_parameters_are_empty_and_pairs_share_one() -> None:
    names = {
        f"base_model.model.model.layers.{block}.self_attn.{which}_proj.lora_{half}.default.weight": 10 * block + 1
        for block in (0, 10, 9)
        for which in "qv"
        for half in "AB"
    }
    specs = llama_layout(names)
    assert [spec.bucket.index for spec in specs] == [10, 9, 0]
    assert specs[0].component_sizes == (202, 0, 202, 0, 0, 0, 0, 0, 0)
    check_layout(specs, names)


def test_a_parameter_that_is_no_component_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'classifier\.weight' is none of the nine components"):
        llama_layout({**LLAMA, "classifier.weight": 3})


def _spec(bucket: Bucket, names: str, sizes: tuple[int, ...], components: tuple[int, ...] = ()) -> BucketSpec:
    return BucketSpec(bucket=bucket, names=tuple(names), sizes=sizes, component_sizes=components)


@pytest.mark.parametrize(
    ("specs", "problem"),
    [
        ([_spec(FLAT, "a", (1,))], "b is trainable but in no bucket"),
        ([_spec(FLAT, "abc", (1, 2, 3))], "c is in a bucket but not trainable"),
        ([_spec(FLAT, "aba", (1, 2, 1))], "a is in two buckets"),
        ([_spec(FLAT, "a", (1,)), _spec(FLAT, "b", (2,))], "flat appears twice"),
        ([_spec(FLAT, "ab", (1, 3))], "b has 2 elements, the bucket says 3"),
        ([_spec(Bucket("block"), "ab", (1, 2), (1, 1))], "components of block 0 add up to 2, not 3"),
    ],
)
def test_a_wrong_layout_is_refused_with_what_is_wrong(specs: list[BucketSpec], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_layout(specs, {"a": 1, "b": 2})


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="there are no trainable parameters"):
        check_layout(flat_layout({}), {})
