"""Matrix products are cut so that every part fits, and every element is computed once."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.portable.gemm_plan import K_PART, Shape, buffer_bytes, k_parts, parts
from worker_agent.portable.gemm_shader import PARAMETERS_BYTES, source

LIMIT_OF_TURNS = 65_535


@given(z=st.integers(1, 6), m=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 40), most=st.integers(40, 400))
def test_every_element_is_computed_once_and_every_operand_fits(z: int, m: int, n: int, k: int, most: int):
    seen = np.zeros((z, m, n), int)
    for part in parts(Shape(z=z, m=m, n=n, k=k), most * 4):
        batch, rows, columns = part.z_stop - part.z, part.m_stop - part.m, part.n_stop - part.n
        assert max(batch * rows * k, batch * columns * k, batch * rows * columns) <= most
        seen[part.z : part.z_stop, part.m : part.m_stop, part.n : part.n_stop] += 1
    assert (seen == 1).all()


def test_a_product_that_fits_is_one_part():
    assert len(list(parts(Shape(z=8, m=512, n=2048, k=512), 128 << 20))) == 1


def test_rows_are_cut_at_the_longest_binding():
    [first, second] = parts(Shape(z=1, m=50_000, n=64, k=1024), 128 << 20)
    assert (first.m, first.m_stop, second.m, second.m_stop) == (0, 32_768, 32_768, 50_000)


def test_a_row_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="a row of 101 elements does not fit 400 bytes"):
        list(parts(Shape(z=1, m=1, n=1, k=101), 400))


@pytest.mark.parametrize(("k", "expected"), [(1, 1), (K_PART, 1), (K_PART + 1, 2), (70_000, 5)])
def test_the_sum_is_cut_so_that_no_shader_turns_too_often(k: int, expected: int):
    found = list(k_parts(k))
    assert len(found) == expected
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == k
    # Both loops of the shader together.
    assert all(stop - start + (stop - start) // 16 + 1 < LIMIT_OF_TURNS for start, stop in found)


def test_the_shader_has_two_loops_and_uses_every_parameter_that_it_declares():
    text = source()
    assert len(re.findall(r"\bfor \(", text)) == 2
    [fields] = re.findall(r"struct Parameters \{(.*?)\}", text, re.DOTALL)
    names = re.findall(r"(\w+): u32", fields)
    assert len(names) * 4 == PARAMETERS_BYTES
    assert [name for name in names if f"p.{name}" not in text] == ["unused_1", "unused_2", "unused_3"]


@pytest.mark.parametrize(
    ("asked", "given_"), [(1, 256), (256, 256), (257, 512), (1 << 20, 1 << 20), (5 << 20, 8 << 20)]
)
def test_buffers_are_powers_of_two(asked: int, given_: int):
    assert buffer_bytes(asked) == given_
