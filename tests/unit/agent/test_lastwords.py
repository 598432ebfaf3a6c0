"""The useful part of a crash's long output: both stacks of the thread that crashed."""

from elastane.agent.failure_reports import crash_text, read_last_words
from elastane.process.streams.group import WorkerStreams

CRASH = """loading
Fatal Python error: Segmentation fault

Thread 0x00007f7 (most recent call first):
  File "/data/loader.py", line 3 in wait

Current thread 0x00007ff9 (most recent call first):
  File "/lib/ctypes/__init__.py", line 519 in string_at
  File "/job/train.py", line 6 in <module>
  File "/site/elastane/process/zygote/child.py", line 178 in _run
  File "<frozen runpy>", line 88 in _run_code

Extension modules: numpy._core (total: 13)
SIGSEGV(11), PID: 29717, Thread 29717:
 frame #0: c10::FatalSignalHandler::stacktraceSignalHandler(bool) + 0x8f (0x7f in libc10.so)
frame #1: memcpy + 0x18 (0x7f in libc.so.6)
<omitting python frames>
frame #21: main + 0x7 (0x7f in python)

SIGSEGV(11), PID: 29717, Thread 29726:
frame #3: of_another_thread + 0x1e8 (0x7f in libc.so.6)
"""


# Of a thread that waits in native code, such as for a collective, faulthandler calls none current.
WAITS = CRASH.replace("Current thread 0x00007ff9", "Thread 0x00007ff9")


def test_both_stacks_of_the_thread_that_faulted_are_kept_and_the_name_comes_last():
    assert crash_text(CRASH).splitlines() == [
        "Native stack of the thread that faulted (innermost first):",
        "  frame #1: memcpy + 0x18 (0x7f in libc.so.6)",
        "  frame #21: main + 0x7 (0x7f in python)",
        "Python stack (most recent call last):",
        '  File "/job/train.py", line 6 in <module>',
        '  File "/lib/ctypes/__init__.py", line 519 in string_at',
        "Fatal Python error: Segmentation fault",
    ]


WAITS_IN_PLACE = """Fatal Python error: Aborted

Current thread 0x00007ff9 (most recent call first):
  File "/lib/python3.11/threading.py", line 327 in wait
  File "/site/elastane/synchrony/pending.py", line 255 in wait
  File "/lib/python3.11/site-packages/torch/c10d.py", line 3 in all_reduce
  File "/lib/python3.11/contextlib.py", line 81 in inner
  File "/job/train.py", line 6 in main
  File "/job/train.py", line 9 in <module>
  File "/site/elastane/worker/unmodified.py", line 475 in _run
  File "/site/elastane/process/zygote/child.py", line 178 in _run

"""


def test_the_stack_of_a_script_in_place_shows_its_own_frames_and_what_they_called():
    assert crash_text(WAITS_IN_PLACE).splitlines() == [
        "Python stack (most recent call last):",
        '  File "/job/train.py", line 9 in <module>',
        '  File "/job/train.py", line 6 in main',
        '  File "/lib/python3.11/contextlib.py", line 81 in inner',
        '  File "/lib/python3.11/site-packages/torch/c10d.py", line 3 in all_reduce',
        "Fatal Python error: Aborted",
    ]


def test_the_main_thread_is_the_last_one_if_it_has_the_signal_and_waits_in_native_code():
    assert crash_text(WAITS) == crash_text(CRASH)


def test_of_another_thread_that_waits_in_native_code_no_python_stack_is_claimed():
    assert "Python stack" not in crash_text(WAITS.replace("Thread 29717", "Thread 29999"))
    assert crash_text(WAITS.partition("SIGSEGV(")[0]) == "Fatal Python error: Segmentation fault"


def test_text_without_a_crash_is_left_unchanged():
    assert crash_text("Traceback ...\nValueError: x\n") == ""


def test_a_crash_without_stacks_keeps_its_name():
    assert crash_text("Fatal Python error: Aborted\n") == "Fatal Python error: Aborted"


def test_a_crash_by_a_cpp_exception_says_what_it_said():
    said = "8 vs 4. Received data size doesn't match expected size."
    text = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        f"  what():  [enforce fail at /gloo/transport/tcp/pair.cc:456] {said}\n"
        "Fatal Python error: Aborted\n"
    )
    assert crash_text(text) == f"Fatal Python error: Aborted: {said}"


def streams(error_file="", tail=""):
    return WorkerStreams(1, 2, "", "", error_file, tail)


def test_the_error_file_comes_first_and_gives_the_time_of_failure(tmp_path):
    from elastane.process.errorfile import read_error_file, write_error_file

    path, tail = tmp_path / "error.json", tmp_path / "stderr"
    write_error_file(str(path), ValueError("the cause"))
    tail.write_text("a warning of the teardown\n")
    words = read_last_words(streams(str(path), str(tail)))
    assert "ValueError: the cause" in words.message
    assert words.failed_s == read_error_file(str(path)).monotonic_ns / 1e9
    path.unlink()
    assert read_last_words(streams(str(path), str(tail))).message == "a warning of the teardown\n"
    assert read_last_words(streams()).message == ""
