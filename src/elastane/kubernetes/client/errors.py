"""Answers of the API server: an object of the expected type, or an error.

Owns the classes of errors, the choice of the class for an answer, and the decoding of objects and
lists. Bytes that do not decode are an ApiAnswerError. Callers decide by the class of an error and
by Kubernetes' own words in it; the text is for people.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

import msgspec

from elastane.errors import ElastaneError, ExitCode
from elastane.protocol.unreadable import UNREADABLE

# Characters of a server's sentence in an error: an admission webhook may return any length.
MESSAGE_CHARS_MAX = 1000


class ErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The answer behind an error; the defaults mean that no answer came.

    `status` is the HTTP status, `reason` Kubernetes' own word (`AlreadyExists`, `Expired`),
    `causes` those of its details, `message` the server's sentence. `retry_after_s` is the pause
    that the server asks for; None where it asks for none.
    """

    status: int = 0
    reason: str = ""
    message: str = ""
    causes: frozenset[str] = frozenset()
    retry_after_s: float | None = None


_NO_ANSWER = ErrorDetails()


class ApiError(ElastaneError):
    """A request that failed, or whose answer is not of the requested type."""

    exit_code = ExitCode.TRY_AGAIN
    slug = "kube-refused"

    def __init__(
        self,
        what: str,
        *,
        slug: str = "",
        where: str = "",
        expected: str = "",
        next_step: str = "",
        answer: ErrorDetails = _NO_ANSWER,
    ) -> None:
        super().__init__(
            what,
            slug=slug or type(self).slug,
            where=where,
            expected=expected,
            next_step=next_step,
        )
        self.status = answer.status
        self.reason = answer.reason
        self.message = answer.message
        self.causes = answer.causes
        self.retry_after_s = answer.retry_after_s


class ApiConflictError(ApiError):
    """409: the object is not at the version that was expected, or exists already."""

    slug = "kube-conflict"

    @property
    def exists(self) -> bool:
        """Whether an object of that name was in the way of its creation."""
        return self.reason == "AlreadyExists"


class ApiNotFoundError(ApiError):
    """404: no such object, or no such kind."""

    slug = "kube-not-found"


class ApiGoneError(ApiError):
    """410: the requested version or page is no longer there; list again."""

    slug = "kube-gone"


class ApiForbiddenError(ApiError):
    """403: this identity may not do that."""

    exit_code = ExitCode.CONFIGURATION
    slug = "kube-forbidden"

    @property
    def namespace_ends(self) -> bool:
        """Whether the reason is that the namespace is being deleted, where no right would help."""
        return "NamespaceTerminating" in self.causes


class ApiUnauthorizedError(ApiError):
    """401: the server rejects this identity, also after the credentials were read again."""

    exit_code = ExitCode.CONFIGURATION
    slug = "kube-unauthorized"


class ApiInvalidError(ApiError):
    """400 or 422: the object or the request is wrong, so a retry would fail, too."""

    exit_code = ExitCode.CONFIGURATION
    slug = "kube-invalid"


class ApiBusyError(ApiError):
    """429 or 5xx: the server cannot answer now; a retry may succeed."""

    slug = "kube-busy"


class ApiAnswerError(ApiError):
    """An answer that no API server gives: garbage, or larger than its bound."""

    slug = "kube-answer"


class ApiUnreachableError(ApiError):
    """No answer came. `sent`: the server may still have carried the request out."""

    slug = "kube-unreachable"

    def __init__(self, what: str, *, where: str, sent: bool) -> None:
        super().__init__(
            what,
            where=where,
            expected="an API server that answers",
            next_step="kubectl get --raw /readyz",
        )
        self.sent = sent


class StatusCause(msgspec.Struct):
    """One of the details of a failure."""

    reason: str = ""


class Details(msgspec.Struct):
    """Details of a failure for programs."""

    causes: list[StatusCause] | None = None


class Status(msgspec.Struct):
    """The Status object of a failure, with the fields that we read."""

    message: str = ""
    reason: str = ""
    code: int = 0
    details: Details | None = None


_KINDS: dict[int, type[ApiError]] = {
    400: ApiInvalidError,
    401: ApiUnauthorizedError,
    403: ApiForbiddenError,
    404: ApiNotFoundError,
    409: ApiConflictError,
    410: ApiGoneError,
    422: ApiInvalidError,
    429: ApiBusyError,
}
_NEXT_STEPS: dict[type[ApiError], str] = {
    ApiForbiddenError: "kubectl auth can-i --list, as this user or service account",
    ApiUnauthorizedError: "renew the token or certificate; try kubectl version with the same ones",
    ApiBusyError: "nothing: it is tried again",
    ApiConflictError: "nothing: it is read again and tried again",
    ApiGoneError: "nothing: it is listed again",
}


def read_status(content: bytes) -> Status:
    """Return the Status in a body; of any other body, one with its beginning as the message."""
    try:
        return msgspec.json.decode(content, type=Status)
    except UNREADABLE:
        return Status(message=content[:200].decode(errors="replace").strip())


def refusal(
    asked: str, status: int, said: Status, *, where: str, retry_after_s: float | None = None
) -> ApiError:
    """Return the error for an answer: `asked` is the label of the request."""
    kind = _KINDS.get(status, ApiBusyError if status >= 500 else ApiError)
    message = said.message[:MESSAGE_CHARS_MAX] or said.reason or "no reason was given"
    causes = said.details.causes if said.details is not None else None
    return kind(
        f"kubernetes: {asked}: {message} (HTTP {status})",
        where=where,
        next_step=_NEXT_STEPS.get(kind, ""),
        answer=ErrorDetails(
            status=status,
            reason=said.reason,
            message=message,
            causes=frozenset(cause.reason for cause in causes or ()),
            retry_after_s=retry_after_s,
        ),
    )


def unreachable(asked: str, fault: str, *, where: str, sent: bool) -> ApiUnreachableError:
    """Return the error for a request that got no answer."""
    return ApiUnreachableError(f"kubernetes: {asked}: {fault}", where=where, sent=sent)


def garbage(asked: str, fault: str, *, where: str) -> ApiAnswerError:
    """Return the error for an answer that is not of the requested type."""
    return ApiAnswerError(
        f"kubernetes: {asked}: the answer is not of the requested type: {fault}",
        where=where,
        expected="a Kubernetes API server at that address, and no proxy that answers for it",
        next_step="kubectl get --raw /version",
    )


T = TypeVar("T")


class ListMeta(msgspec.Struct):
    """The metadata of a list: its version, and where the next page begins."""

    resourceVersion: str = ""  # noqa: N815 the wire's
    going_on: str = msgspec.field(default="", name="continue")


class Items(msgspec.Struct, Generic[T]):
    """A page of a list; an empty one may say null."""

    metadata: ListMeta
    items: list[T] | None = None


class VersionMeta(msgspec.Struct):
    """The metadata of an object: its version."""

    resourceVersion: str = ""  # noqa: N815 the wire's


class Versioned(msgspec.Struct):
    """An object of which only the version is read."""

    metadata: VersionMeta


def decoded(content: bytes | msgspec.Raw, kind: type[T], label: str, where: str) -> T:
    """Return the object; ApiAnswerError if it is not of `kind`."""
    try:
        found: T = _decoder(kind).decode(content)
    except UNREADABLE as error:
        raise garbage(label, str(error)[:300], where=where) from error
    return found


def pages(content: bytes, kind: type[T], label: str, where: str) -> Items[T]:
    """Return the page of a list of `kind`; ApiAnswerError for anything else."""
    return decoded(content, Items[kind], label, where)  # type: ignore[valid-type]


@functools.lru_cache(maxsize=256)
def _cached(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return _cached(kind)
