"""Every bound of worker output, with unit and reason, checked against each other at import.

Durations are seconds, sizes are bytes. None of these can lose output that goes to a file: they
bound what reaches the console, and what the agent holds in memory on the way.
"""

from __future__ import annotations

# How often growth of a file is looked for while something is teed; torchrun's tail_log.py too.
TEE_POLL_S = 0.1
# The same while files are only redirected: all it serves then is the time index.
INDEX_POLL_S = 0.25
# What one look may read of one stream. With TEE_POLL_S that is 2.5 MB/s and stream, more than
# any terminal shows; a burst is taken over several looks.
READ_BYTES_MAX = 256 << 10
# A line that is longer is shown in pieces, each with a mark.
LINE_BYTES_MAX = 64 << 10
# A line without its end waits this long for it: prompts and progress bars write none.
PARTIAL_WAIT_S = 0.5
# Further behind than this the console skips ahead: a burst of this size is shown in full.
LAG_BYTES_MAX = 8 << 20
# After a skip this much of the newest output is shown.
LAG_KEEP_BYTES = 64 << 10
# A worker that is skipped time and again is said to be so no more often than this.
SKIP_TELL_S = 1.0
# Output that waits for one console. Small: whatever waits here delays the other workers' lines.
CONSOLE_BYTES_MAX = 128 << 10
# The least share of the console's room that one stream gets.
SHARE_BYTES_MIN = 4 << 10
# One write to a console; POSIX keeps writes to a pipe whole up to this size (PIPE_BUF on Linux).
WRITE_BYTES = 4096
# A log folder that has not answered for this long (a dead NFS server) does without files.
OPEN_S = 2.0
# When the workers are gone, the console may take this long to show the rest.
FINISH_S = 3.0
# A console that took nothing for this long is stuck, and the next attempt does not wait for it.
STALL_S = 0.25
# A console that somebody made non-blocking, and that is full, is tried again after this.
RETRY_S = 0.1
# stderr that the agent captures: the most that waits in the kernel for one worker. An unprivileged
# process may ask for this much (fs.pipe-max-size); where it gets less, copying is slower.
PIPE_BYTES = 1 << 20
# What one read of a captured stream takes.
CAPTURE_READ_BYTES = 64 << 10
# After a turn over the captured streams: output of a burst is copied in few and larger pieces.
CAPTURE_PAUSE_S = 0.005
# A captured line without its end is shown after this: a prompt, a progress bar.
CAPTURE_PARTIAL_S = 0.05
# Of each captured stream this much stays for a diagnosis; twice that before memory is given back.
CAPTURE_TAIL_BYTES = 64 << 10
# When a worker has ended, this long is waited for the console to take what it left in the kernel.
SETTLE_S = 0.25
# And never more than this beyond what its console takes: a child of it may write on.
SETTLE_BYTES_MAX = 2 * PIPE_BYTES
# A console that took nothing for this long gets no more of what the last workers said. Longer than
# STALL_S, for it is there that one reads why a job failed.
CAPTURE_STALL_S = 1.0
# What is kept in a file of a stream that goes to the console, where no option asks for a file: at
# most twice this of each stream. The default folder may be in memory, or in a pod's small disk.
KEPT_BYTES_MAX = 16 << 20
# Output that waits for a slow disk; what comes beyond is not kept.
KEPT_QUEUE_BYTES = 4 << 20
# When the workers are gone, a disk may take this long to have the rest.
KEPT_CLOSE_S = 1.0
# Last lines of a file, for a diagnosis.
TAIL_LINES_MAX = 30
TAIL_BYTES_MAX = 8 << 10
# Entries of a time index at the full rate; each further such number halves the rate, so a file
# that grows for a week at ten looks a second has 46,000 entries of 16 bytes.
INDEX_EPOCH_ENTRIES = 4096
# Workers of one log that write to the same fence and rank again: names tried for an error file.
ERROR_FILES_MAX = 1000

assert WRITE_BYTES <= SHARE_BYTES_MIN <= CONSOLE_BYTES_MAX <= READ_BYTES_MAX
assert LINE_BYTES_MAX <= READ_BYTES_MAX <= LAG_BYTES_MAX
assert LAG_KEEP_BYTES < LAG_BYTES_MAX
assert STALL_S < FINISH_S
assert TEE_POLL_S <= PARTIAL_WAIT_S
assert CAPTURE_PAUSE_S < CAPTURE_PARTIAL_S < SETTLE_S
assert CAPTURE_STALL_S < FINISH_S
assert CAPTURE_READ_BYTES <= KEPT_QUEUE_BYTES < KEPT_BYTES_MAX and KEPT_CLOSE_S < FINISH_S
assert TAIL_BYTES_MAX <= CAPTURE_TAIL_BYTES and CAPTURE_READ_BYTES <= SETTLE_BYTES_MAX
