"""`elastane explain JOB`: why a job failed or restarted, attempt by attempt.

This module owns the words; `observe.story` finds the facts. It reads a folder, so it works on a
running job, on one that ended long ago, and on one whose agents were all killed.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from elastane.cli.parser import add_job_options
from elastane.protocol.diagnosis import says_restart
from elastane.protocol.words import counted

if TYPE_CHECKING:
    from elastane.observe.account import Account
    from elastane.observe.story import AttemptStory, JobStory, SeenFailure, SeenStacks

# How many failures of one attempt are shown; --json has all.
_FAILURES_SHOWN_MAX = 8
_MESSAGE_LINES_MAX = 12
_DIFFERED_SHOWN_MAX = 8
_INJECTED_SHOWN_MAX = 20
_NOTICES_SHOWN_MAX = 20
_CULPRITS_SHOWN_MAX = 8
_STACKS_SHOWN_MAX = 2
_STRAGGLERS_SHOWN_MAX = 8
# The end of a worker's log in which signs of its failure are sought.
_LOG_BYTES = 1 << 16
# What follows the milliseconds in a time of the event log.
_BEYOND_MILLISECONDS = re.compile(r"(?<=:\d\d\.\d{3})\d{6}Z")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_job_options(parser)
    add = parser.add_argument
    add("--round", metavar="N", type=int, default=None, help="only this round")
    add("--attempt", metavar="N", type=int, default=None, help="only this attempt")
    add("--patterns", metavar="FILE", default="",
        help="TOML file with classes of failures of your own (or ELASTANE_PATTERNS)")  # fmt: skip
    add("--json", action="store_true", help="print everything as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the story; returns 0 for every outcome of the job."""
    from elastane.cli._patterns import load_patterns
    from elastane.cli.logs import find_job
    from elastane.observe.account import LogAccount, account_lines
    from elastane.observe.box import printable
    from elastane.observe.deposed import decided
    from elastane.observe.events import read_events
    from elastane.observe.story import story_of
    from elastane.process import environment

    own = load_patterns(args.patterns or environment.get("ELASTANE_PATTERNS"))
    folder = find_job(args.job, args.log_dir, "explain")
    accounting = LogAccount()
    events = accounting.through(decided(read_events(folder, all_counts=False)))
    story = story_of(folder.name, str(folder), events)
    runs_here = _runs_here(folder)
    account = accounting.account(time.time() if runs_here else None)
    story.attempts = [
        one
        for one in story.attempts
        if args.round in (None, one.round) and args.attempt in (None, one.attempt)
    ]
    for failure in (failure for attempt in story.attempts for failure in attempt.failures):
        failure.classify(_end_of_log(folder, failure.log_file), own)
    if args.json:
        import msgspec

        found = {**msgspec.to_builtins(story), "account": account}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        told = story_lines(story, account, runs_here=runs_here)
        if account is None and story.attempts:
            told += account_lines(None)
        lines = (printable(line.expandtabs()) for line in told)
        sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _end_of_log(folder: Path, name: str) -> str:
    """Return the end of a worker's log; empty if it is not below the job's folder, or not here.

    A line of the event log must not choose which other file is read.
    """
    with contextlib.suppress(OSError, ValueError):
        path = Path(name).resolve()
        if name and path.is_file() and path.is_relative_to(folder.resolve()):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LOG_BYTES))
                return file.read(_LOG_BYTES).decode("utf-8", "replace")
    return ""


def _runs_here(folder: Path) -> bool:
    """Whether an agent of this user that logs to this job's folder runs on this machine."""
    from elastane.errors import ElastaneError
    from elastane.process import environment
    from elastane.process.files import JobRegistry, runtime_folder

    with contextlib.suppress(ElastaneError):
        running = JobRegistry(runtime_folder(environment.snapshot())).running(folder.name)
        known = (Path(one.log_dir).resolve() for one in running if one.log_dir)
        return folder.resolve().parent in known
    return False


def story_lines(
    story: JobStory, account: Account | None = None, *, runs_here: bool = False
) -> list[str]:
    """Return the story for a person, with the account of where the time went.

    `runs_here`: an agent of the job runs on this machine.
    """
    from elastane.observe.account import account_lines

    lines = [f"job {story.job}: {_verdict(story, runs_here=runs_here)}"]
    if story.next_step:
        lines.append(f"next: {story.next_step}")
    if story.restarts_used:
        lines.append(_budget_line(story))
    if story.earlier_runs:
        runs = counted(story.earlier_runs, "earlier run")
        lines.append(f"of the newest run; the log has {runs} of jobs of this name")
    for attempt in story.attempts:
        lines += ["", *_attempt_lines(attempt)]
    if story.departures:
        lines += ["", "nodes that departed:", *(f"  {line}" for line in story.departures)]
    if story.outages:
        lines += ["", "no coordinator could decide:", *(f"  {line}" for line in story.outages)]
    if story.notices:
        lines += ["", "notices about nodes:"]
        lines += [f"  {line}" for line in story.notices[-_NOTICES_SHOWN_MAX:]]
    if story.injected:
        lines += ["", "faults that were injected:"]
        lines += [f"  {line}" for line in story.injected[-_INJECTED_SHOWN_MAX:]]
    if account is not None:
        lines += ["", *account_lines(account)]
    lines += ["", f"logs: {story.log_dir}", f"output: elastane logs {story.log_dir}"]
    return [_BEYOND_MILLISECONDS.sub("Z", line) for line in lines]


def _budget_line(story: JobStory) -> str:
    """Return how the restart budget was used."""
    if not story.replacements:
        return f"restarts used: {story.restarts_used}"
    return (
        f"restart budget used: {story.restarts_used}, {story.replacements} of it for replacements"
        " of lost workers"
    )


def _verdict(story: JobStory, *, runs_here: bool) -> str:
    if not story.attempts and not story.ended:
        return "no attempt is on file" + (f"; last: {story.last_event}" if story.last_event else "")
    if not story.ended and runs_here:
        return f"it runs; last: {story.last_event}"
    if not story.ended and story.agents_left and not story.agents_here:
        return (
            "no outcome: all agents whose logs are here left before the job ended; the last at"
            f" {story.agents_left[-1]}"
        )
    if not story.ended:
        return (
            f"no end is on file: it runs, or all its agents were killed; last: {story.last_event}"
        )
    word = "succeeded" if story.ok else f"failed with exit code {story.exit_code}"
    return f"{word} at {story.ended}: {story.reason}"


def _attempt_lines(attempt: AttemptStory) -> list[str]:
    nodes, workers = counted(attempt.nodes, "node"), counted(attempt.world_size, "worker")
    world = f", {nodes}, {workers}" if attempt.nodes else ""
    lines = [f"round {attempt.round} attempt {attempt.attempt}{world}"]
    if attempt.began:
        lines.append(f"  began      {attempt.began}: {attempt.began_because}")
    if attempt.members:
        lines.append(f"  nodes      {attempt.members}")
    if attempt.ended:
        lasted = f" (after {attempt.lasted_s:g} s)" if attempt.lasted_s is not None else ""
        lines.append(f"  ended      {attempt.ended}{lasted}: {attempt.ended_because}")
    lines += _findings_lines(attempt)
    if attempt.root_cause:
        lines.append(f"  root cause {attempt.root_cause}")
    if attempt.alike:
        lines.append(f"  also       {attempt.alike} more failed by the same error")
    own = [one for one in attempt.failures if not one.stopped]
    own.sort(key=lambda one: not _is_root(attempt, one))
    said: set[str] = set()
    for number, one in enumerate(own[:_FAILURES_SHOWN_MAX]):
        # The first one is the cause, if that is known. The others mostly lost their connections.
        said_max = _MESSAGE_LINES_MAX if number == 0 or _is_root(attempt, one) else 1
        if one.message in said:  # All workers say the same before all restart.
            said_max = 0
        said.add(one.message)
        lines += _failure_lines(one, said_max, root=_is_root(attempt, one))
    return lines + _counts(attempt, len(own))


def _findings_lines(attempt: AttemptStory) -> list[str]:
    """Return what was found about workers that had not failed."""
    lines = [f"  replica    {each}" for each in attempt.differed[-_DIFFERED_SHOWN_MAX:]]
    for culprit in attempt.culprits[-_CULPRITS_SHOWN_MAX:]:
        until = f" until {culprit.ended}" if culprit.ended else ""
        lines.append(f"  culprit    {culprit.time}{until}: {culprit.sentence} [{culprit.kind}]")
    for stacks in attempt.stacks[-_STACKS_SHOWN_MAX:]:
        lines += _stacks_lines(stacks)
    for slow in attempt.stragglers[-_STRAGGLERS_SHOWN_MAX:]:
        until = f" until {slow.ended}" if slow.ended else ""
        lines.append(f"  straggler  {slow.time}{until}: {slow.sentence} [{slow.why}]")
    return lines


def _stacks_lines(one: SeenStacks) -> list[str]:
    who = f"rank {one.rank} on node {one.node} (pid {one.pid})"
    said = (f"    | {line}" for line in one.stacks.splitlines())
    return [f"  stacks     {one.time}: {who}, by {one.source}", *said]


def _is_root(attempt: AttemptStory, one: SeenFailure) -> bool:
    if one.rank is None or says_restart(one.exit_code, one.message):
        return False  # Workers that end for all to restart do so for another cause.
    return (attempt.root_node, attempt.root_rank) == (one.node, one.rank)


def _rank_text(one: SeenFailure) -> str:
    return "a worker without a rank" if one.rank is None else f"rank {one.rank}"


def _failure_lines(one: SeenFailure, said_max: int, *, root: bool) -> list[str]:
    from elastane.observe.box import without_carets

    mark = "cause" if root else "failure"
    lines = [
        f"  {mark:<10} {_rank_text(one)} on node {one.node} (local rank {one.local_rank},"
        f" pid {one.pid}) at {one.time}: {one.exit}"
    ]
    said = without_carets(one.message.strip("\n").splitlines())
    if said_max == 0 and said:
        lines.append("    it said the same")
    elif said:
        lines += ["    its last output:"] if one.output else []
        lines += [f"    | {line}" for line in said[-said_max:]]
    if one.kind:
        told = f": {one.clue}" if one.clue and one.clue not in one.message + one.exit else ""
        lines.append(f"    class {one.kind}; another attempt: {one.outlook}{told}")
        lines += [f"    next: {one.next_step}"] if root and one.next_step else []
    for label, path in (("error file", one.error_file), ("its log", one.log_file)):
        lines += [f"    {label}: {path}"] if path else []
    return lines


def _counts(attempt: AttemptStory, own: int) -> list[str]:
    stopped = sum(one.stopped for one in attempt.failures)
    texts = [
        f"{own - _FAILURES_SHOWN_MAX} more failures (--json has all)"
        if own > _FAILURES_SHOWN_MAX
        else "",
        f"{counted(stopped, 'worker')} {'was' if stopped == 1 else 'were'} stopped"
        if stopped
        else "",
        f"{attempt.succeeded} ended with exit code 0" if attempt.succeeded else "",
    ]
    found = [text for text in texts if text]
    return [f"  others     {', '.join(found)}"] if found else []
