"""Finds the failure that caused an incident, and those that are consequences.

Every failure carries an age by its sender's monotonic clock, so all failures of a job stand on the
coordinator's one time line, and the earliest is the cause. A worker that only lost the connection
to a peer is a consequence, as long as any other failure explains it.
"""

from __future__ import annotations

import builtins
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from elastane.protocol.mismatches import judge_calls
from elastane.protocol.model import NO_RANK, Cause, FailedWorker, Failure, Fence, NamedWorker
from elastane.protocol.patterns import LOST_PEER, Clue, class_of, find_clue
from elastane.protocol.ring import WorkerCalls
from elastane.protocol.verdicts import Verdict
from elastane.protocol.words import OTHER_PROGRAM, counted

# Failures in an outcome, and the text that each carries after the first ones: 64 KB to each agent
# at most, once.
OUTCOME_FAILURES_MAX = 64
OUTCOME_FAILURES_WHOLE = 4
OUTCOME_FAILURE_CHARS_MAX = 500

# Where gloo could not connect to (torch 2.13).
_UNREACHED = re.compile(r"connect\w* .*?remote=\[([0-9a-fA-F.:]+)\]:\d")
# What gloo says around a lost peer: the line of its own source, and a guess.
_NOISE = re.compile(r"\[\S+\.cc:\d+\] |\. This is typically caused by .*$")
# What gloo says as it ends a worker that received more than its tensor holds (torch 2.13).
_TOO_MUCH = "received data size doesn't match expected size"
# Signals that another process sends: the worker's last output is not about its end.
_FROM_OUTSIDE = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGKILL,
        signal.SIGTERM,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGXCPU,
    }
)
_HEADLINE_CHARS_MAX = 200
LIVES = "it had not failed when the others did"
STOPPED_IN_ITS_END = "its own error came first; it was stopped while it was ending"
_FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+)', re.MULTILINE)
# Signals that a process gets for its own fault, unless a person sends them.
_OWN_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL}
)
# The libraries of the network and the device, as native frames name them: these may recover.
_PASSING_FRAME = re.compile(r"nccl|rccl|gloo|libcuda\.so|libnvidia", re.IGNORECASE)
_BY_TIMER = "[timer-expired]"
# What the agent says of a SIGKILL if the kernel's counter for the workers' cgroup has grown.
_KILLED_BY_KERNEL = "out of memory: the kernel killed "
# An error of memory names amounts and processes, which differ each time.
_NO_MEMORY = re.compile(
    r"^(?:\w+\.)*\w*MemoryError\b|out of memory|(?:can't|Cannot) allocate memory"
)
_OUT_OF_MEMORY = "out of memory"
# Classes of an end by a signal that the process sent itself.
_OWN_ENDS = frozenset({"crash", "memory"})
# Mistakes of a program, whatever words their texts have: an argument may be named `cuda`.
_MISTAKES = (TypeError, AttributeError, NameError, SyntaxError, NotImplementedError)
# Errors that may not occur in the next attempt: those of the system and requests to exit, ...
_PASSING_ERRORS = (OSError, KeyboardInterrupt, SystemExit)
# ... and others of the network and the device, by words that torch and its libraries use. An
# `accelerator` alone is an argument of Lightning, Fabric and others, which refuse what it has.
_PASSING = re.compile(
    r"connect|time[d ]*-?out|\bhttp|\burl|\bssl|network|socket|resolve|gaierror|unavailable|"
    r"out ?of ?memory|\bcuda|cudnn|cublas|nccl|gloo|\bhip\b|accelerator ?(?:error|device)|"
    r"MemoryError|\bDist\w*Error|(?<!re)store",
    re.IGNORECASE,
)
# A collective that ended after its timeout: gloo says so in one line, NCCL's watchdog in another.
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
# Crash sites of the workers of one attempt: enough for an error that names its rank to come again.
CRASH_SITES_MAX = 16
# A process needs this long to end after its program has returned and its sockets were closed, and
# its agent to report that.
_RETURN_LATE_S = 2.0
RETURNED = "its program returned{} while others still trained"
_TRACEBACK = "Traceback (most recent call last):"
# The beginnings of errors of ours, whose next lines say what is to be done.
_OWN_ERRORS = ("elastane.errors.", "not started: ")
# An error of ours as the last one of a worker, with its slug and what to do.
_OWN_NEXT = re.compile(
    r"^(?:\S*Error|not started): .* \[[a-z-]+\]\n(?:  \w+: .*\n)*  next: (.+)\s*\Z", re.MULTILINE
)
_OWN_SLUG = re.compile(r"^elastane\.errors\.\w+: .* \[([a-z-]+)\]$")
# Errors by which elastane refuses what a script does, on each node and in each attempt. Errors that
# only a worker gets that joins later, or that depend on the number of workers, are not among them:
# a restart of all may mend those.
REFUSALS = frozenset(
    {
        "accelerate-adopt",
        "any-source",
        "checkpoint-restore-first",
        "data-loader",
        "data-source",
        "deterministic-use",
        "elastic-loader",
        "elastic-strategy",
        "elastic-trainer",
        "in-place-refused",
        "job-backend",
        "job-steps",
        "job-track",
        "job-update",
        "state-kind",
        "subgroup",
        "world-change",
    }
)
_STATE_LOST = "[job-state-lost]"
_OTHER_MESH = "[job-mesh-size]"
_ASKS_RESTART = "[in-place-restart]"
# The end of an incident's reason that says so of a worker.
TO_RESTART = " to restart all workers"


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A failure with its node and its time on the coordinator's clock."""

    node_id: str
    at_s: float
    failure: Failure


def is_lost_peer(failure: Failure) -> bool:
    """Whether the failure only says that the connection to a peer was lost."""
    if _is_unexplained(failure):
        return False
    text = failure.message.lower()
    return any(sign in text for sign in LOST_PEER)


def unreached_address(said: str) -> str:
    """Return the address to which a worker could not connect; empty if the text names none."""
    found = _UNREACHED.search(said)
    return found[1].removeprefix("::ffff:") if found else ""


def says_mismatch(failure: Failure) -> bool:
    """Whether the worker ended because another one sent more than it expected."""
    return not _is_unexplained(failure) and _TOO_MUCH in failure.message.lower()


def own_next_step(failure: Failure) -> str:
    """Return what the last error says is to be done, if it is one of ours; "" otherwise."""
    found = None if _is_unexplained(failure) else _OWN_NEXT.search(failure.message)
    return found.group(1) if found else ""


def refusal(failure: Failure) -> str:
    """Return the slug of the error by which elastane refused what the script does, otherwise ""."""
    error = "" if _is_unexplained(failure) else headline(failure.message)
    found = _OWN_SLUG.search(error)
    return found.group(1) if found and found.group(1) in REFUSALS else ""


def is_state_lost(failure: Failure) -> bool:
    """Whether the worker ended because all workers that held the state had been lost."""
    return failure.exit_code > 0 and _STATE_LOST in headline(failure.message)


def has_other_mesh(failure: Failure) -> bool:
    """Whether the worker ended because workers that joined have a mesh of another size."""
    return failure.exit_code > 0 and _OTHER_MESH in headline(failure.message)


def asks_restart(failure: Failure) -> bool:
    """Whether the worker ended because all have to restart after a loss."""
    return says_restart(failure.exit_code, failure.message)


def says_restart(exit_code: int, message: str) -> bool:
    """Whether a worker that ended so asks that all workers restart; `message`: its last output."""
    return exit_code > 0 and _ASKS_RESTART in headline(message)


def says_why(said: str) -> bool:
    """Whether a line is elastane's own, in which a worker says why it ends."""
    return said.startswith("elastane: ") and said.endswith("]")


def says_other_program(failure: Failure) -> bool:
    """Whether the worker ended because the collectives of the workers differ."""
    return asks_restart(failure) and OTHER_PROGRAM in headline(failure.message)


def is_from_outside(failure: Failure) -> bool:
    """Whether a signal that other processes send ended the worker."""
    return is_signal_from_outside(failure.exit_code) and not failure.error_file


def is_signal_from_outside(exit_code: int) -> bool:
    """Whether an exit code is that of a signal that other processes send."""
    return -exit_code in _FROM_OUTSIDE


def known_end(failure: Failure) -> Clue | None:
    """Return what the table of patterns says of a worker's end; None if nothing fits."""
    error = "" if _is_unexplained(failure) else headline(failure.message)
    return find_clue((failure_text(failure), error))


def _is_unexplained(failure: Failure) -> bool:
    """Whether another process's signal ended the worker, which its last output cannot explain."""
    return failure.output and is_signal_from_outside(failure.exit_code)


def without_noise(error: str) -> str:
    """Return what gloo says of a lost peer without the line of its source and its guess."""
    return _NOISE.sub("", error)


def headline(said: str) -> str:
    """Return the line of a worker's output that names its error, otherwise the last line.

    An exception's own text may have several lines; the line after the stack names it.
    """
    *_, last = said.rpartition(_TRACEBACK)
    lines = [line for line in last.splitlines() if line.strip()]
    if _TRACEBACK in said or said.startswith(_OWN_ERRORS):
        lines = [line for line in lines if not line[0].isspace()][:1] or lines
    return lines[-1].strip() if lines else ""


def exit_text(exit_code: int) -> str:
    """Return in words how a process with this exit code ended (negative: by a signal)."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return name


def failure_text(failure: Failure) -> str:
    """Return in words how a worker ended, with the evidence of its agent."""
    if failure.lives:
        return LIVES
    if failure.stopped:
        return f"an error of its own; {exit_text(failure.exit_code)} came while it was ending"
    evidence = f" ({failure.evidence})" if failure.evidence else ""
    return exit_text(failure.exit_code) + evidence


def evidence_text(failure: Failure) -> str:
    """Return what the agent knows about a worker's end besides its exit code."""
    return STOPPED_IN_ITS_END if failure.stopped else failure.evidence


def worker_text(rank: int) -> str:
    """Return the name of a worker in a sentence."""
    return "worker without a rank" if rank == NO_RANK else f"worker of rank {rank}"


def end_text(failure: Failure) -> str:
    """Return in words, as a predicate, how a worker failed."""
    if failure.stopped:
        return "failed by an error of its own"
    return f"ended with {failure_text(failure)}"


def _error_text(failure: Failure) -> str:
    """Return the text of a worker's error, as a root cause shows it after the worker's end."""
    words = without_noise(headline(failure.message))
    if len(words) > _HEADLINE_CHARS_MAX:
        words = f"{words[: _HEADLINE_CHARS_MAX - 4]} ..."
    if not words or _is_unexplained(failure):
        return ""
    if failure.output and failure.exit_code >= 0 and _TRACEBACK not in failure.message:
        return f"; the last line of its stderr: {words}"
    return f": {words}"


def sighting_text(sighting: Sighting) -> str:
    """Return in words which worker ended how."""
    failure = sighting.failure
    return f"{worker_text(failure.rank)} on node {sighting.node_id} {end_text(failure)}"


def failures_in_order(sightings: Sequence[Sighting], now_s: float) -> tuple[FailedWorker, ...]:
    """Return an incident's failures in the order of time, bounded, with their ages as of now."""
    found = []
    for place, one in enumerate(sorted(sightings, key=_place)[:OUTCOME_FAILURES_MAX]):
        message = one.failure.message
        if place >= OUTCOME_FAILURES_WHOLE:
            message = message[-OUTCOME_FAILURE_CHARS_MAX:]
        failure = msgspec.structs.replace(
            one.failure, age_s=max(0.0, now_s - one.at_s), message=message, calls=()
        )
        found.append(FailedWorker(node_id=one.node_id, failure=failure))
    return tuple(found)


def _place(sighting: Sighting) -> tuple[float, int]:
    return sighting.at_s, sighting.failure.rank


def find_return(sightings: Sequence[Sighting], returned: Sequence[Sighting]) -> Sighting | None:
    """Return the first program that returned on its rank, if it explains all failures.

    `returned`: the workers that ended with exit code 0. It explains a failure only if that worker
    lost a peer; any other failure has another cause.
    """
    if not returned or not all(is_lost_peer(one.failure) for one in sightings):
        return None
    first = min(returned, key=_place)
    if sightings and first.at_s > min(one.at_s for one in sightings) + _RETURN_LATE_S:
        return None
    steps = f" after {counted(first.failure.steps, 'step')}" if first.failure.steps else ""
    failure = msgspec.structs.replace(first.failure, evidence=RETURNED.format(steps))
    return msgspec.structs.replace(first, failure=failure)


def root_cause(
    sightings: Sequence[Sighting],
    fence: Fence,
    returned: Sequence[Sighting] = (),
    stopped: Mapping[str, Sequence[WorkerCalls]] = MappingProxyType({}),
) -> Cause:
    """Return the earliest failure that no lost peer explains; needs at least one sighting.

    If all are lost peers, it is the first worker of `returned` whose program ended before them.
    `stopped`: the last collectives of the workers that were stopped after the failures, by node id.
    """
    left = find_return(sightings, returned)
    first = _first_cause(sightings, fence, stopped)
    if left is None:
        return first
    return Cause(
        kind="worker",
        what=f"{_named(left)} {end_text(left.failure)}; so {first.what}",
        node_id=left.node_id,
        fence=fence,
        failure=left.failure,
        consequences=len(sightings),
    )


def _named(sighting: Sighting) -> str:
    failure = sighting.failure
    who = f"{worker_text(failure.rank)} (local rank {failure.local_rank}, pid {failure.pid})"
    return f"{who} on node {sighting.node_id}"


def _first_cause(
    sightings: Sequence[Sighting], fence: Fence, stopped: Mapping[str, Sequence[WorkerCalls]]
) -> Cause:
    own = [s for s in sightings if not is_lost_peer(s.failure)] or list(sightings)
    first = min(own, key=_place)
    failure = msgspec.structs.replace(first.failure, calls=())
    error, mismatch = _own_error(failure), find_mismatch(sightings, stopped)
    alike = sum(bool(error) and _own_error(s.failure) == error for s in sightings) - bool(error)
    cause = Cause(
        kind="worker",
        what=f"{_named(first)} {end_text(failure)}{_error_text(failure)}",
        node_id=first.node_id,
        fence=fence,
        failure=failure,
        consequences=len(sightings) - 1 - alike,
        alike=alike,
    )
    if mismatch is None:
        return cause
    return after_mismatch(cause, mismatch.sentence, mismatch.worker, sightings)


def after_mismatch(
    cause: Cause, sentence: str, worker: NamedWorker | None, sightings: Sequence[Sighting]
) -> Cause:
    """Return the cause of failures that followed since `worker` called another collective.

    The worker's own failure, if it has failed, says only that it lost its peers. Without a worker,
    that differs from most, the first failure remains the cause.
    """
    cause = msgspec.structs.replace(cause, what=f"{sentence}; so {cause.what}", is_mismatch=True)
    return cause if worker is None else _by_worker(cause, worker, sightings)


def after_wait(cause: Cause, wait: Verdict, sightings: Sequence[Sighting]) -> Cause:
    """Return the cause of failures in a world whose workers waited for one, as was reported.

    That wait is the cause if the awaited worker itself failed first, or if the first one to fail
    gave up its own wait. Any other failure has a cause of its own.
    """
    first = cause.failure
    if first is None or cause.is_mismatch:
        return cause
    worker = wait.worker
    is_own = worker is not None and (cause.node_id, first.pid) == (worker.node_id, worker.pid)
    if not (is_own or first.lives or is_lost_peer(first) or _gave_up(first)):
        return cause
    if wait.sentence not in cause.what:  # Its agent says it of a worker that it ended.
        follows = "then" if is_own else "so"
        what = f"{wait.sentence}; {follows} {cause.what}"
        cause = msgspec.structs.replace(cause, what=what, is_mismatch=wait.is_mismatch)
    return cause if worker is None or is_own else _by_worker(cause, worker, sightings)


def _gave_up(failure: Failure) -> bool:
    """Whether the worker's own group ended its wait after the timeout that the script gave it."""
    return not _is_unexplained(failure) and _TIMED_OUT.search(failure.message) is not None


def _by_worker(cause: Cause, worker: NamedWorker, sightings: Sequence[Sighting]) -> Cause:
    """Return the cause with this worker as the one that is to blame, whether it failed or not."""
    own = [s for s in sightings if (s.node_id, s.failure.pid) == (worker.node_id, worker.pid)]
    return msgspec.structs.replace(
        cause,
        node_id=worker.node_id,
        failure=msgspec.structs.replace(own[0].failure, calls=()) if own else _living(worker),
        consequences=len(sightings) - len(own),
        alike=0,
    )


def _living(worker: NamedWorker) -> Failure:
    """Return, as a failure, a worker that had not failed when others did because of it."""
    return Failure(
        local_rank=worker.local_rank, rank=worker.rank, pid=worker.pid, exit_code=0, lives=True
    )


def find_mismatch(
    sightings: Sequence[Sighting],
    stopped: Mapping[str, Sequence[WorkerCalls]] = MappingProxyType({}),
) -> Verdict | None:
    """Return which rank called another collective than most, if that ended a worker by gloo.

    None if no worker says so, or if the collectives of the failures, and of the workers that were
    stopped after them (by node id), do not show it.
    """
    if not any(says_mismatch(one.failure) for one in sightings):
        return None
    shown = [
        (one.node_id, each) for one in sorted(sightings, key=_place) for each in one.failure.calls
    ]
    shown += [(node_id, each) for node_id, calls in sorted(stopped.items()) for each in calls]
    known: dict[int, WorkerCalls] = {}
    nodes: dict[int, str] = {}
    for node_id, each in shown:
        nodes.setdefault(each.rank, node_id)
        known[each.rank] = each.after(known.get(each.rank))
    return judge_calls(known.values(), nodes)


def crash_site(failure: Failure) -> str:
    """Return in words where an error arose that only a change of the script can correct.

    Empty if another attempt may succeed: the worker left no error file and no signal of its own
    ended it, or its error is of the network, the device or the file system. Memory may be short for
    another process's sake, so a lack of it counts only where steps show.
    """
    error = headline(failure.message)
    if is_lost_peer(failure):
        return ""
    if not failure.error_file:
        return _site_of_signal(failure)
    frames = _FRAME.findall(failure.message)
    if not frames:
        return ""
    file, line = frames[-1]
    kind = error.partition(":")[0].rpartition(".")[2]
    known = getattr(builtins, kind, None)
    known = known if isinstance(known, type) else object
    if _shows_steps(failure) and _NO_MEMORY.search(error) and not issubclass(known, OSError):
        return f"{kind}: {_OUT_OF_MEMORY}, {file}:{line}"
    words = None if issubclass(known, _MISTAKES) else _PASSING.search(error)
    if words or issubclass(known, _PASSING_ERRORS):
        return ""
    return f"{error[:_HEADLINE_CHARS_MAX]}, {file}:{line}"


def _site_of_signal(failure: Failure) -> str:
    """Return the signal by which a worker ended itself, with its innermost Python frame if known.

    Empty for a signal of its agent or of another process, and if neither the frame nor a step
    shows. A kill by the kernel for lack of memory is the worker's own.
    """
    name, frames = exit_text(failure.exit_code), _FRAME.findall(failure.message)
    if failure.evidence.startswith(_KILLED_BY_KERNEL) and failure.exit_code == -signal.SIGKILL:
        return f"{name}: {_OUT_OF_MEMORY}" if _shows_steps(failure) else ""
    if -failure.exit_code not in _OWN_SIGNALS or _BY_TIMER in failure.evidence:
        return ""
    ends = (failure_text(failure), headline(failure.message))
    lines = failure.message.splitlines()
    passes = class_of(ends, lines).kind not in _OWN_ENDS or any(map(_PASSING_FRAME.search, lines))
    if passes or _PASSING.search(ends[1]):
        return ""
    if failure.output or not frames:
        return name if _shows_steps(failure) else ""
    file, line = frames[-1]
    return f"{name}, {file}:{line}"


def _shows_steps(failure: Failure) -> bool:
    return bool(failure.steps or failure.measured)


def crash_sites(cause: Failure, others: Iterable[str]) -> tuple[str, ...]:
    """Return the crash site of the cause, and those of `others` with its error and line.

    Empty if the cause has none.
    """
    site = crash_site(cause)
    if not site:
        return ()
    alike = {other for other in others if _place_of_site(other) == _place_of_site(site)}
    return tuple(sorted({site, *alike})[:CRASH_SITES_MAX])


def _place_of_site(site: str) -> tuple[str, str]:
    return site.partition(":")[0], site.rpartition(", ")[2]


def _own_error(failure: Failure) -> str:
    """Return the part of a failure that is equal for the same error; empty without an error."""
    if failure.output or is_lost_peer(failure):
        return ""
    return headline(failure.message)
