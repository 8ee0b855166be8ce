"""What docs/protocol.md says in its own words is what the code does."""

import re
from collections.abc import Iterator

import numpy as np

from ayni.order import permutation
from ayni.tree import cover
from tests.unit.test_layers import ROOT

PAGE = (ROOT / "docs" / "protocol.md").read_text()
MASK = (1 << 64) - 1


def as_the_page_says(start: int, stop: int, count: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        size = 1
        while start % (2 * size) == 0 and size < count and min(start + 2 * size, count) <= stop:
            size = 2 * size
        yield start, min(start + size, count)
        start = min(start + size, count)


def philox(seed: int, dataset_pass: int, count: int) -> list[int]:
    words: list[int] = []
    for c in range(1, count // 4 + 2):
        x, a, b = (c, 0, 0, 0), seed, dataset_pass
        for _ in range(10):
            p, q = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = ((q >> 64) ^ x[1] ^ a, q & MASK, (p >> 64) ^ x[3] ^ b, p & MASK)
            a, b = (a + 0x9E3779B97F4A7C15) & MASK, (b + 0xBB67AE8584CAA73B) & MASK
        words += x
    return words[:count]


def test_the_cover_is_that_of_the_tree():
    for count in range(1, 24):
        for start in range(count + 1):
            for stop in range(start, count + 1):
                nodes = [(node.start, node.stop) for node in cover(start, stop, count)]
                assert list(as_the_page_says(start, stop, count)) == nodes


def test_covers_in_the_table_are_right():
    rows = re.findall(r"^\| \[(\d+), (\d+)\) \| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 4
    for start, stop, count, told in rows:
        nodes = cover(int(start), int(stop), int(count))
        assert told == " ".join(f"[{node.start}, {node.stop})" for node in nodes)


def test_the_words_and_the_order_are_those_of_the_code():
    constants = ("0xD2E7470EE14C6C93", "0xCA5A826395121157", "0x9E3779B97F4A7C15", "0xBB67AE8584CAA73B")
    assert all(constant in PAGE for constant in constants)
    words = philox(7, 3, 8)
    assert re.findall(r"0x[0-9a-f]{16}\b", PAGE) == [f"{word:#018x}" for word in words[:4]]
    order = permutation(7, 3, 8).tolist()
    assert np.argsort(np.array(words, np.uint64), kind="stable").tolist() == order
    assert f"8 samples come in the order {' '.join(map(str, order))}." in PAGE
