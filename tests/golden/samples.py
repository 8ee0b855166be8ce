"""One sample of each message of ayni.v1, with every field set. Run as a program it adds new messages to v1.json.

What is committed is never rewritten: an old frame must decode for as long as v1 lives.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from ayni.v1 import collective_pb2, coordinator_pb2, errors_pb2, peer_pb2, tensor_pb2, worker_pb2

GOLDEN = Path(__file__).with_name("v1.json")
FILES = tuple(
    file.DESCRIPTOR for file in (tensor_pb2, errors_pb2, coordinator_pb2, worker_pb2, peer_pb2, collective_pb2)
)
DEEPEST = 6

_BY_KIND: dict[int, object] = {
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    FieldDescriptor.CPPTYPE_DOUBLE: -0.25,
}


def descriptors() -> Iterator[Descriptor]:
    """Yields every message of the schema, nested ones included."""
    waiting = [message for file in FILES for message in file.message_types_by_name.values()]
    while waiting:
        message = waiting.pop(0)
        if not message.GetOptions().map_entry:
            yield message
        waiting += message.nested_types


def sample(descriptor: Descriptor, depth: int = 0) -> Message:
    """Returns a message with every field set; of a oneof, the last field."""
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if field.message_type and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[_text(field)] = _text(field)
        elif field.is_repeated:
            getattr(message, field.name).extend([_value(field, depth)] * 2)
        elif field.message_type:
            getattr(message, field.name).CopyFrom(_value(field, depth))
        else:
            setattr(message, field.name, _value(field, depth))
    return message


def _value(field: FieldDescriptor, depth: int) -> object:
    if field.message_type:
        inner = message_factory.GetMessageClass(field.message_type)
        return sample(field.message_type, depth + 1) if depth < DEEPEST else inner()
    if field.enum_type:
        return field.enum_type.values[-1].number
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes([field.number, 0, 255])
    if field.type == FieldDescriptor.TYPE_STRING:
        return _text(field)
    return _BY_KIND.get(field.cpp_type, field.number * 1000 + 1)


def _text(field: FieldDescriptor) -> str:
    return f"{field.name} {field.number}"


def as_json(message: Message) -> object:
    """Returns the sample as JSON values."""
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def main() -> int:
    """Adds what is missing."""
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for descriptor in descriptors():
        if descriptor.full_name not in known:
            message = sample(descriptor)
            wire = message.SerializeToString(deterministic=True).hex()
            known[descriptor.full_name] = {"bytes": wire, "json": as_json(message)}
            print(f"added {descriptor.full_name}")
    GOLDEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
