"""The reasons in the schema and the classes in Python are one list."""

import re
from pathlib import Path

import ayni
from ayni.errors import BY_REASON
from ayni.v1 import errors_pb2

PREFIX = "ERROR_REASON_"
SCHEMA = Path(ayni.__file__).parent / "v1" / "errors.proto"

# Only codes that the gRPC library never sets by itself.
OWN_CODES = {
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "DATA_LOSS",
}


def documented_codes() -> dict[str, str]:
    """Returns the status code that starts the comment above each enum value."""
    pattern = r"\n  // ([A-Z_]+)\. [^\n]*(?:\n  //[^\n]*)*\n  ERROR_REASON_(\w+) = \d+;"
    return {reason: code for code, reason in re.findall(pattern, SCHEMA.read_text())}


def test_every_reason_of_the_schema_has_exactly_one_class():
    in_schema = {name.removeprefix(PREFIX) for name in errors_pb2.ErrorReason.keys()} - {"UNSPECIFIED"}
    assert BY_REASON.keys() == in_schema


def test_every_class_carries_the_code_that_the_schema_documents():
    assert {reason: cls.code for reason, cls in BY_REASON.items()} == documented_codes()


def test_codes_are_never_those_of_the_transport():
    assert {cls.code for cls in BY_REASON.values()} <= OWN_CODES
