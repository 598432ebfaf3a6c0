"""Logs ten steps to the stand-in for MLflow in a folder, reports it, and waits to be killed."""

import signal
import sys

import elastane
from elastane.worker.scalars import ScalarLog

log = ScalarLog()
log.add_sinks((elastane.MLflow(sys.argv[1]),))
log.enter(is_writer=True, committed=0, is_first=True)
for step in range(1, 11):
    log.begin()
    log.add({"loss": step / 10}, step - 1)
    log.leave()
    log.commit(step)
print("made", flush=True)
signal.pause()
