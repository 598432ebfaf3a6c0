"""Sends the spans of a job to a collector of OpenTelemetry.

`JobTrace` gives each span once, as soon as it is over; `SpanSender` sends by the SDK's exporter.
The ids of spans follow from the job, its run and their keys: a span that is sent again has the same
id. The endpoint, headers and certificates are those of the variables `OTEL_EXPORTER_OTLP_*`.
It fails with ConfigurationError if the collector takes no spans.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastane.errors import ConfigurationError
from elastane.observe.account import Accountant
from elastane.observe.deposed import Decided
from elastane.observe.events import EventReader, PlacedEvent
from elastane.observe.spans import Span, spans_of, trace_key
from elastane.observe.view import JobView, after_event
from elastane.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

PIECE_EVENTS = 1000
# Spans of one request: a collector takes 4 MB by default.
BATCH_SPANS = 500
_NS = 1_000_000_000


class JobTrace:
    """The spans of a job while its log grows. `read` and `take` may be called any number of times.

    Memory: the view of the job, and some hundred bytes for each span of its run that was taken.
    """

    def __init__(self, folder: Path) -> None:
        self.view = JobView()
        self._reader = EventReader(folder)
        self._decided: Decided[PlacedEvent] = Decided(lambda placed: placed.event)
        self._accountant = Accountant()
        self._taken: set[str] = set()
        self._earlier: list[tuple[str, list[Span]]] = []

    def read(self) -> None:
        """Read what the log has now."""
        while placed := self._reader.read(PIECE_EVENTS):
            for one in placed:
                self._add_all(self._decided.take(one))
        self._add_all(self._decided.due(time.time()))

    def _add_all(self, found: Iterable[PlacedEvent]) -> None:
        for one in found:
            view = after_event(self.view, one.event)
            if view.run != self.view.run:
                self._earlier.append((trace_key(self.view), self._new()))
                self._taken.clear()
            self.view = view
            self._accountant.add(one.event, view)

    def take(self, *, all_: bool = False) -> list[tuple[str, list[Span]]]:
        """Return the spans of each run that are over and were not taken yet; `all_`: open ones too.

        They come with the key of the run's trace.
        """
        found = [*self._earlier, (trace_key(self.view), self._new(all_=all_))]
        self._earlier = []
        return [(key, spans) for key, spans in found if spans]

    def _new(self, *, all_: bool = False) -> list[Span]:
        spans = spans_of(self.view, self._accountant.account(self.view))
        new = [one for one in spans if (one.is_over or all_) and one.key not in self._taken]
        self._taken |= {one.key for one in new if one.is_over}
        return new


class SpanSender:
    """Sends spans by OTLP over HTTP; `endpoint`: of the collector, "" for that of the variables."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        at = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
        self._exporter: Any = OTLPSpanExporter(endpoint=at)
        self._resource = Resource.create(
            {"service.name": "elastane", "service.version": __version__}
        )
        self.endpoint = endpoint or str(getattr(self._exporter, "_endpoint", ""))

    def send(self, trace: str, spans: Sequence[Span]) -> None:
        """Send the spans of one trace; raises ConfigurationError if the collector refuses them."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        for at in range(0, len(spans), BATCH_SPANS):
            made = [self._made(trace, one) for one in spans[at : at + BATCH_SPANS]]
            try:
                is_taken = self._exporter.export(made) is SpanExportResult.SUCCESS
                said = "the lines above say what it answered"
            except OSError as error:  # Early exporters raise the errors of their HTTP client.
                is_taken, said = False, str(error)
            if not is_taken:
                raise ConfigurationError(
                    f"the collector at {self.endpoint} took no spans",
                    slug="traces-unsent",
                    expected="a collector of OpenTelemetry that takes OTLP over HTTP",
                    next_step=f"elastane traces --endpoint http://HOST:4318 JOB; {said}",
                )

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()

    def _made(self, trace: str, span: Span) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        def context(key: str) -> SpanContext:
            return SpanContext(
                trace_id=_number(trace, 16),
                span_id=_number(f"{trace}/{key}", 8),
                is_remote=False,
                trace_flags=TraceFlags(TraceFlags.SAMPLED),
            )

        found = {**span.attributes, **({} if span.is_over else {"open": True})}
        return ReadableSpan(
            name=span.name,
            context=context(span.key),
            parent=context(span.parent) if span.parent else None,
            resource=self._resource,
            attributes={f"elastane.{name}": value for name, value in found.items()},
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.OK),
            start_time=int(span.from_s * _NS),
            end_time=int(span.to_s * _NS),
        )


def _number(text: str, size: int) -> int:
    """Return an integer of `size` bytes that only depends on the text; never 0."""
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()[:size]
    return int.from_bytes(digest, "big") or 1
