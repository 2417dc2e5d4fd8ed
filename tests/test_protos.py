"""The wire contract: its committed code is current, and it says what it must."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

ROOT = Path(__file__).parent.parent
PROTO = "protos/agentkv/v1/agentkv.proto"
GENERATED = ("agentkv_pb2.py", "agentkv_pb2.pyi", "agentkv_pb2_grpc.py", "agentkv_pb2_grpc.pyi")

# Tags of FileDescriptorProto and what it holds: a comment's path alternates tag and index.
FILE_MESSAGES, FILE_ENUMS, FILE_SERVICES = 4, 5, 6
MESSAGE_FIELDS, MESSAGE_ONEOFS = 2, 8
ENUM_VALUES = 2
SERVICE_METHODS = 2

NUMERIC = {
    FieldDescriptorProto.TYPE_DOUBLE,
    FieldDescriptorProto.TYPE_FLOAT,
    FieldDescriptorProto.TYPE_UINT32,
    FieldDescriptorProto.TYPE_UINT64,
    FieldDescriptorProto.TYPE_INT32,
    FieldDescriptorProto.TYPE_INT64,
}


def protoc(*arguments: str) -> None:
    """Runs the compiler of this environment in the repository's root."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", *arguments, PROTO]
    # The plug-ins lie beside this interpreter, which need not be the first on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptorProto:
    """The parsed contract, comments included."""
    path = tmp_path_factory.mktemp("protos") / "descriptors"
    protoc("--include_source_info", f"--descriptor_set_out={path}")
    return FileDescriptorSet.FromString(path.read_bytes()).file[0]


def named(contract: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yields the path and the name of every component that needs a comment."""
    for i, message in enumerate(contract.message_type):
        if message.options.map_entry:
            continue
        yield (FILE_MESSAGES, i), message.name
        for j, field in enumerate(message.field):
            yield (FILE_MESSAGES, i, MESSAGE_FIELDS, j), f"{message.name}.{field.name}"
        for j, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):  # an `optional` field's own
                yield (FILE_MESSAGES, i, MESSAGE_ONEOFS, j), f"{message.name}.{oneof.name}"
    for i, enum in enumerate(contract.enum_type):
        yield (FILE_ENUMS, i), enum.name
        for j, value in enumerate(enum.value):
            yield (FILE_ENUMS, i, ENUM_VALUES, j), value.name
    for i, service in enumerate(contract.service):
        yield (FILE_SERVICES, i), service.name
        for j, method in enumerate(service.method):
            yield (FILE_SERVICES, i, SERVICE_METHODS, j), f"{service.name}.{method.name}"


def requests(contract: FileDescriptorProto) -> list[DescriptorProto]:
    """Lists the messages whose fields a caller chooses."""
    return [
        message
        for message in contract.message_type
        if message.name.endswith("Request") or message.name == "SamplingOptions"
    ]


def test_committed_code_is_current(tmp_path: Path) -> None:
    """Catches an edit of the contract without `make protos`, or one made by another toolchain."""
    protoc(
        *(f"--{plugin}_out={tmp_path}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc"))
    )
    stale = [
        name
        for name in GENERATED
        if (tmp_path / "agentkv/v1" / name).read_text() != (ROOT / "agentkv/v1" / name).read_text()
    ]
    assert stale == [], "run `make protos`"


def test_every_component_has_a_comment(contract: FileDescriptorProto) -> None:
    """Catches a field whose unit, range and default a client would have to guess."""
    comments = {
        tuple(location.path): location.leading_comments
        for location in contract.source_code_info.location
    }
    bare = [name for path, name in named(contract) if not comments.get(path, "").strip()]
    assert bare == []


def test_numeric_options_have_presence(contract: FileDescriptorProto) -> None:
    """Catches a number whose absence reads as zero, as in a fork at position 0."""
    missing = [
        f"{message.name}.{field.name}"
        for message in requests(contract)
        for field in message.field
        if field.type in NUMERIC
        and field.label != FieldDescriptorProto.LABEL_REPEATED
        and not field.proto3_optional
    ]
    assert missing == []


def test_numbers_of_callers_are_unsigned(contract: FileDescriptorProto) -> None:
    """Catches a signed length or id: a negative one would reach block arithmetic."""
    signed = {
        FieldDescriptorProto.TYPE_INT32,
        FieldDescriptorProto.TYPE_INT64,
        FieldDescriptorProto.TYPE_SINT32,
        FieldDescriptorProto.TYPE_SINT64,
    }
    assert [m.name for m in requests(contract) if any(f.type in signed for f in m.field)] == []


def test_enums_begin_with_unspecified(contract: FileDescriptorProto) -> None:
    """Catches an enum whose zero has a meaning, which an old client would send unknowingly."""
    for enum in contract.enum_type:
        assert enum.value[0].number == 0
        assert enum.value[0].name.endswith("_UNSPECIFIED")


def test_only_unary_calls_are_repeated_by_request_id(contract: FileDescriptorProto) -> None:
    """Catches a promise to replay a stream, whose chunks nobody keeps."""
    takers = {
        message.name
        for message in contract.message_type
        if any(field.name == "request_id" for field in message.field)
    }
    assert takers == {"CreateRequest", "ForkRequest", "RestoreRequest"}


def test_requests_and_responses_carry_their_methods_names(contract: FileDescriptorProto) -> None:
    """Catches a message shared by two methods, which could then never grow apart."""
    for method in contract.service[0].method:
        assert method.input_type == f".agentkv.v1.{method.name}Request"
        assert method.output_type == f".agentkv.v1.{method.name}Response"


def test_order_is_resources_requests_enums(contract: FileDescriptorProto) -> None:
    """Catches messages out of the order readers rely on: requests follow the methods."""
    order = [
        message.name
        for message in contract.message_type
        if message.name.endswith(("Request", "Response"))
    ]
    methods = [method.name for method in contract.service[0].method]
    assert order == [f"{name}{kind}" for name in methods for kind in ("Request", "Response")]
    names = [message.name for message in contract.message_type]
    assert names[-len(order) :] == order
