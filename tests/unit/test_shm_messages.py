"""What workers of one host say about shared memory is read as it was written, or refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.blocks.layouts import LayoutHandle
from ayni.errors import BadRequest, StaleEpoch, UnknownLayout
from ayni.shm import host, json_messages
from worker_agent.blocks.engines import shm_messages as messages

HOST = host.HostIdentity(boot_id="b" * 36, pid_namespace=4026531836, uid=1000)
numbers = st.integers(0, (1 << 64) - 1)
handles = st.builds(LayoutHandle, owner_id=numbers, number=numbers)


@given(incarnation=numbers, layouts=st.lists(handles, max_size=4))
def test_export_and_request_are_read_as_they_were_written(incarnation, layouts):
    export = messages.ShmExport(host=HOST, folder="/run/ayni", incarnation=incarnation, layouts=tuple(layouts))
    assert messages.decode_export(messages.encode_export(export)) == export
    assert host.is_socket_name(export.socket_name)
    for layout in layouts:
        request = messages.PoolRequest(incarnation=incarnation, layout=layout)
        assert messages.decode_request(messages.encode_request(request)) == request


def test_answer_is_read_and_a_refusal_is_raised():
    answer = messages.PoolAnswer(epoch=3, start=4096)
    assert messages.decode_answer(messages.encode_answer(answer)) == answer
    with pytest.raises(UnknownLayout, match="no such layout") as caught:
        messages.decode_answer(json_messages.encode_refusal(UnknownLayout("no such layout", layout="1/2")))
    assert caught.value.metadata == {"layout": "1/2"}
    with pytest.raises(StaleEpoch):
        messages.decode_answer(json_messages.encode_refusal(StaleEpoch("over", epoch=1, current_epoch=2)))


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff\xfe", b"[]", b"null", b"7", b'{"reason": "X"}', b'{"epoch": "1", "start": 0}'),
        *(b'{"epoch": 1, "start": -1}', b'{"epoch": true}', b"[" * 100_000, b'{"reason": [], "metadata": {}}'),
    ],
)
def test_what_can_not_be_read_is_refused_by_every_reader(data):
    for decode in (messages.decode_export, messages.decode_request, messages.decode_answer):
        with pytest.raises(BadRequest, match="can't be read"):
            decode(data)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("shm-0123456789abcdef.sock", True),
        ("shm-0123456789abcde.sock", False),
        ("shm-0123456789abcdeF.sock", False),
        ("shm-0123456789abcdef.sock.new", False),
        ("x/shm-0123456789abcdef.sock", False),
        ("0123456789abcdef", False),
    ],
)
def test_only_names_of_sockets_are_names_of_sockets(name, is_one):
    assert host.is_socket_name(name) is is_one


@pytest.mark.parametrize("folder", ["/tmp/\0x", "/tmp/\ud800", "tmp", "", 5, None])
def test_folder_that_can_be_none_is_refused(folder):
    export = messages.ShmExport(host=HOST, folder="/run/ayni", incarnation=1, layouts=())
    data = json.dumps(json.loads(messages.encode_export(export)) | {"folder": folder}).encode()
    with pytest.raises(BadRequest, match="can't be read"):
        messages.decode_export(data)
