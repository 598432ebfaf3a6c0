"""A membership that is driven by lines on stdin, and answers each.

Arguments: port, nnodes, last call and silence (seconds).

`join`, `finish`, `leave`, `change` (waits for one), `fork` (a child that outlives this process and
says how its own call ended), `end` (the process ends without a goodbye of its own).
"""

import os
import sys
import time

from elastane.agent.membership import MemberConfig, Membership
from elastane.errors import ElastaneError
from elastane.process.endpoint import Endpoint
from elastane.protocol.limits import Timing
from elastane.protocol.model import JobSpec

port, low, high = int(sys.argv[1]), *map(int, sys.argv[2].split(":"))
last_call_s, silence_s = map(float, sys.argv[3:])
membership = Membership(
    MemberConfig(
        spec=JobSpec(
            job="led",
            min_nodes=low,
            max_nodes=high,
            max_restarts=100,
            timing=Timing(last_call_s=last_call_s, gather_s=0.2, silence_s=silence_s),
        ),
        endpoint=Endpoint("127.0.0.1", port),
    ),
    lambda: f"node-{os.getpid()}",
)


def answer(word: str) -> str:
    match word:
        case "join":
            place = membership.join()
            return f"{place.node_rank} {place.nodes} {place.assignment.master_port}"
        case "finish":
            return str(membership.finish().ok)
        case "leave":
            membership.leave()
            return "left"
        case "change":
            membership.wait_change(30.0)
            return membership.change
    return forked()


def forked() -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(membership.has_changed)
        except ElastaneError as error:
            said = error.slug
        os.write(write, said.encode())
        time.sleep(60)
        os._exit(0)
    return f"{os.read(read, 100).decode()} {child}"


print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "end":
        sys.exit(0)
    try:
        print(answer(line.strip()), flush=True)
    except ElastaneError as error:
        print(f"{type(error).__name__} {error.what}", flush=True)
