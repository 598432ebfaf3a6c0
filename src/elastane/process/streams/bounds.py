"""Every bound of worker output, with unit and reason, checked against each other at import.

Durations are seconds, sizes are bytes. None of these bounds loses output that goes to a file: they
limit the console's share, and the agent's memory on the way.
"""

from __future__ import annotations

# The interval at which a file is checked for growth while it is teed, as in torchrun's tail_log.py.
TEE_POLL_S = 0.1
# The interval while files are only redirected: it then serves only the time index.
INDEX_POLL_S = 0.25
# The most that one check reads of one stream. With TEE_POLL_S that is 2.5 MB/s and stream, more
# than any terminal displays; a burst is read in several checks.
READ_BYTES_MAX = 256 << 10
# A longer line is displayed in pieces, each with a mark.
LINE_BYTES_MAX = 64 << 10
# A line without its end is displayed after this: prompts and progress bars write no end.
PARTIAL_WAIT_S = 0.5
# The console skips ahead if it is further behind; a burst of this size is displayed in full.
LAG_BYTES_MAX = 8 << 20
# After a skip this much of the newest output is displayed.
LAG_KEEP_BYTES = 64 << 10
# The least time between two notices that a worker's output was skipped.
SKIP_TELL_S = 1.0
# The output that waits for one console. Small, because it delays the other workers' lines.
CONSOLE_BYTES_MAX = 128 << 10
# The least share of the console's room that one stream gets.
SHARE_BYTES_MIN = 4 << 10
# One write to a console; POSIX keeps writes to a pipe whole up to this size (PIPE_BUF on Linux).
WRITE_BYTES = 4096
# A log folder that has not answered for this long (a dead NFS server) is given up.
OPEN_S = 2.0
# The time that the console has for the rest of the output after the workers have ended.
FINISH_S = 3.0
# A console that accepted nothing for this long is stuck; the next attempt does not wait for it.
STALL_S = 0.25
# The wait before another write to a full console that another process made non-blocking.
RETRY_S = 0.1
# Captured stderr: the most that waits in the kernel for one worker. An unprivileged process may
# request this much (fs.pipe-max-size); with less, copying is slower.
PIPE_BYTES = 1 << 20
# The size of one read of a captured stream.
CAPTURE_READ_BYTES = 64 << 10
# The pause after a turn over the captured streams, so that a burst is copied in larger pieces.
CAPTURE_PAUSE_S = 0.005
# A captured line without its end is displayed after this: a prompt, a progress bar.
CAPTURE_PARTIAL_S = 0.05
# The end of each captured stream that stays for a diagnosis; memory is freed at twice that.
CAPTURE_TAIL_BYTES = 64 << 10
# After a worker has ended, the wait until the console has what was left in the kernel.
SETTLE_S = 0.25
# The most that is read beyond what its console accepts, because a child of it may keep writing.
SETTLE_BYTES_MAX = 2 * PIPE_BYTES
# A console that accepted nothing for this long gets no more of the last workers' output. Longer
# than STALL_S, because users read there why a job failed.
CAPTURE_STALL_S = 1.0
# The copy of a stream that goes to the console, if no option asks for a file: at most twice this
# for each stream. The default folder may be in memory, or on a pod's small disk.
KEPT_BYTES_MAX = 16 << 20
# The output that waits for a slow disk; output beyond it is missing in the copy.
KEPT_QUEUE_BYTES = 4 << 20
# The time that a disk has for the rest of the copy after the workers have ended.
KEPT_CLOSE_S = 1.0
# The last lines of a file, for a diagnosis.
TAIL_LINES_MAX = 30
TAIL_BYTES_MAX = 8 << 10
# The entries of a time index at the full rate; after each further such number the rate halves. A
# file that grows for a week at ten checks a second has 46,000 entries of 16 bytes.
INDEX_EPOCH_ENTRIES = 4096
# The names tried for an error file, if workers of one log have the same fence and rank.
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
