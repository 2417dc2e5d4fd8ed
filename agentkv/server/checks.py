"""What a request must fulfil before the engine hears of it: the only validator.

It owns every limit that is known without the engine's state, and lists all that a request
violates, not only the first. It knows no context: whether a handle names anything, whether a
position lies inside it and whether blocks are free are the engine's to say.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from google.protobuf.message import Message

from agentkv.config import LimitsConfig
from agentkv.constraint import Constraint
from agentkv.core.lease import LeaseMode, LeaseTerms
from agentkv.engine.outputs import ModelFacts
from agentkv.errors import InvalidRequest, Reason
from agentkv.sampling_params import SamplingParams
from agentkv.server.constraint_checks import read_constraint
from agentkv.server.input_checks import InputChecks
from agentkv.server.sampling_checks import check_sampling
from agentkv.server.unknown_fields import unknown_fields
from agentkv.server.violations import Violations
from agentkv.v1 import agentkv_pb2 as pb

MAX_LABELS: Final = 64
MAX_LABEL_KEY: Final = 63
MAX_LABEL_VALUE: Final = 256
MAX_PAGE_SIZE: Final = 1000
MAX_PAGE_TOKEN: Final = 512
MAX_RELEASE_COUNT: Final = 10_000
MAX_REQUEST_ID: Final = 36
MAX_TOKENS_READ: Final = 65_536
DEFAULT_PAGE_SIZE: Final = 100
LEASE_MODES: Final = MappingProxyType(
    {
        pb.LEASE_MODE_UNSPECIFIED: None,
        pb.LEASE_MODE_RETAIN: LeaseMode.RETAIN,
        pb.LEASE_MODE_PIN: LeaseMode.PIN,
        pb.LEASE_MODE_PARK: LeaseMode.PARK,
        pb.LEASE_MODE_DROPPABLE: LeaseMode.DROPPABLE,
    }
)


class Checks:
    """Collects what one request violates; `finish` raises if anything does.

    Each method reads one part of the request and returns its value. A value that is wrong is
    returned as it is: `finish` raises before anyone uses it.
    """

    def __init__(self, request: Message, limits: LimitsConfig, model: ModelFacts) -> None:
        self._request = request
        self._limits = limits
        self._model = model
        self._is_known = False
        self._violations = Violations()
        self.inputs = InputChecks(self._violations, limits, model)
        """Reads texts, conversations and token ids."""

    def finish(self) -> None:
        """Raises if the request violates anything, or holds what this version does not know.

        Raises:
            InvalidRequest: See `Violations.raise_any`.
        """
        if not (self._violations or self._is_known):
            for field in unknown_fields(self._request):
                self._violations.add(
                    field, "is not known to this server", Reason.UNSUPPORTED_OPTION
                )
            self._is_known = True
        self._violations.raise_any()

    def context_id(self, value: str, field: str = "context_id") -> str:
        """Checks that a handle was given; what it names is the engine's to say."""
        self._violations.require(bool(value), field, "must name a context")
        return value

    def context_ids(self, values: Sequence[str]) -> tuple[str, ...]:
        """Checks the handles of one Release; a handle given twice counts once."""
        if not self._violations.require(
            1 <= len(values) <= MAX_RELEASE_COUNT,
            "context_ids",
            f"takes 1 to {MAX_RELEASE_COUNT} handles, got {len(values)}",
        ):
            return ()
        self._violations.require(all(values), "context_ids", "must each name a context")
        return tuple(dict.fromkeys(values))

    def request_id(self, value: str) -> str | None:
        """Checks a request id; None when the caller gave none."""
        self._violations.require(
            len(value) <= MAX_REQUEST_ID and value.isascii() and value.isprintable(),
            "request_id",
            f"must be 1 to {MAX_REQUEST_ID} printable ASCII characters",
        )
        return value or None

    def labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Checks the labels of a new context."""
        if not self._violations.require(
            len(labels) <= MAX_LABELS,
            "labels",
            f"takes at most {MAX_LABELS} entries, got {len(labels)}",
        ):
            return {}
        for key, value in labels.items():
            self._violations.require(
                1 <= len(key) <= MAX_LABEL_KEY and "\0" not in key,
                "labels",
                f"takes keys of 1 to {MAX_LABEL_KEY} characters",
            )
            self._violations.require(
                len(value) <= MAX_LABEL_VALUE and "\0" not in value,
                f"labels[{key}]",
                f"must be at most {MAX_LABEL_VALUE} characters",
            )
        # Maps travel in any order, and a repeat must look like the request it repeats.
        return dict(sorted(labels.items()))

    def lease(
        self, request: pb.CreateRequest | pb.ForkRequest | pb.UpdateLeaseRequest | pb.RestoreRequest
    ) -> LeaseTerms | None:
        """Checks the lease that is asked for; None when the caller named none.

        Which times a lease may have is the engine's to say.
        """
        if not request.HasField("lease"):
            return None
        options = request.lease
        self._violations.require(
            options.mode in LEASE_MODES,
            "lease.mode",
            f"is none this server knows, got {options.mode}",
            Reason.UNSUPPORTED_OPTION,
        )
        ttl = options.ttl if options.HasField("ttl") else None
        return LeaseTerms(LEASE_MODES.get(options.mode), ttl, options.may_reduce)

    def snapshot_name(self, value: str) -> str:
        """Checks that a name was given; which names there may be is the engine's to say."""
        self._violations.require(bool(value), "name", "must name a snapshot")
        return value

    def count(self, request: pb.ForkRequest | pb.GenerateBranchesRequest) -> int:
        """Checks the number of branches, before any work grows with it."""
        count = request.count if request.HasField("count") else 1
        most = self._limits.max_fork_count
        self._violations.require(
            1 <= count <= most, "count", f"must be in [1, {most}], got {count}"
        )
        return count

    def length(self, request: pb.TruncateRequest) -> int:
        """Checks that the length to keep was given: 0 is a length, absence is not."""
        self._violations.require(request.HasField("length"), "length", "must be given")
        return request.length

    def page_size(self, request: pb.ListRequest) -> int:
        """Checks the size of a page."""
        size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE_SIZE
        self._violations.require(
            1 <= size <= MAX_PAGE_SIZE, "page_size", f"must be in [1, {MAX_PAGE_SIZE}], got {size}"
        )
        return size

    def page_token(self, value: str) -> str:
        """Checks that a page token may be one of ours; the engine says whether it is."""
        self._violations.require(
            len(value) <= MAX_PAGE_TOKEN, "page_token", "is none the server gave"
        )
        return value

    def sampling(self, options: pb.SamplingOptions) -> SamplingParams:
        """Checks the sampling options."""
        checked = check_sampling(options, self._model.vocab_size)
        for violation in checked.violations:
            self._violations.add(*violation)
        return checked.params

    def constraint(
        self, request: pb.GenerateRequest | pb.GenerateBranchesRequest
    ) -> Constraint | None:
        """Checks the form of a constraint; what it says is the compiler's to judge."""
        if not request.HasField("constraint"):
            return None
        self._violations.require(
            not request.sampling.ignore_eos,
            "sampling.ignore_eos",
            "contradicts a constraint, which ends the text",
        )
        try:
            constraint = read_constraint(request.constraint)
        except InvalidRequest as error:
            for field, what in error.violations.items():
                self._violations.add(field, what, Reason.GRAMMAR_REJECTED)
            return None
        self._violations.require(constraint is not None, "constraint", "must be given in one form")
        return constraint
