"""Where the members of a torch group add: on accelerators only where all have one of their own, of one kind."""

import pytest

from ayni.buckets import FLAT, Bucket
from worker_agent.torch_collectives import Buffers, common_kind


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ([("cuda", "a"), ("cuda", "b")], "cuda"),
        ([("cuda", "a"), ("cuda", "a")], "cpu"),
        ([("cuda", "a"), ("cpu", "-")], "cpu"),
        ([("cuda", "a"), ("xpu", "b")], "cpu"),
        ([("xpu", "a")], "xpu"),
        ([("cpu", "-"), ("cpu", "-")], "cpu"),
    ],
)
def test_members_add_on_the_kind_of_accelerator_that_all_have(said, kind):
    assert common_kind(said) == kind


def test_a_bucket_keeps_its_vector_as_long_as_it_fits():
    buffers = Buffers()
    first = buffers.of(FLAT, 10)
    assert buffers.of(FLAT, 10) is first
    assert buffers.of(Bucket("block", 0), 10) is not first
    assert buffers.of(FLAT, 11).size == 11
