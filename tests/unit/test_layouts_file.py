"""The file that says which layouts a serving agent has."""

import pytest

from ayni.blocks.layouts import AxisOrder, LayoutKind, LocalLayout, Tier
from ayni.settings import SettingsError, from_mapping
from worker_agent.layouts_file import LayoutsFile

ENTRY = {"num_blocks": 8, "num_layers": 2, "inner_dim": 64}


def read(*entries, **values) -> LayoutsFile:
    return from_mapping(LayoutsFile, {"layouts": [{**ENTRY, **entry} for entry in entries], **values})


def test_an_entry_is_a_device_layout_of_keys_and_values_unless_it_says_otherwise():
    [entry] = read({}).layouts
    assert entry.place == LocalLayout(tier=Tier.DEVICE)
    geometry = entry.geometry()
    assert (geometry.kind, geometry.axis_order) == (LayoutKind.FULLY_CONTIGUOUS, AxisOrder.NHD)
    assert geometry.config.block_bytes == 2 * 2 * 16 * 64 * 2


def test_every_value_can_be_given():
    values = {"tier": "disk", "resource_id": 3, "outer_dim": 1, "page_size": 4, "num_heads": 8, "dtype_width_bytes": 1}
    [entry] = read({**values, "kind": "layer_separate_block_second", "axis_order": "hnd"}, model="m").layouts
    assert entry.place == LocalLayout(tier=Tier.DISK, resource_id=3)
    geometry = entry.geometry()
    assert geometry.config.head_dim == 8
    assert geometry.kind is LayoutKind.LAYER_SEPARATE_BLOCK_SECOND


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([], "layouts is empty"),
        ([{}, {}], "more than one device layout"),
        ([{"num_heads": 7}], r"num_heads \(7\) must divide inner_dim \(64\)"),
        ([{"page_size": 12}], "page_size must be a power of two"),
        ([{"num_blocks": 0}], "num_blocks must be at least 1"),
        ([{"kind": "layer_separate_block_first", "axis_order": "universal"}], "can't be universal"),
        ([{"tier": "object"}], r"layouts\[0\].tier must be one of device, host, disk"),
        ([{"blocks": 3}], r"layouts\[0\].blocks is not a known name; did you mean layouts\[0\].num_blocks"),
    ],
)
def test_a_file_that_can_not_be_is_refused_with_the_place(entries, sentence):
    with pytest.raises(SettingsError, match=sentence):
        read(*entries)
