"""The bodies of comms_crew's workers. The forking server imports this module: no thread here."""

import contextlib
import os
import signal
import socket
import struct
import threading
import time

import torch
import torch._dynamo  # what a first DDP would import in each worker
import torch.distributed as dist
from ports import free_port
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from elastane.comms.elastic import ElasticGroup
from elastane.comms.group import ALONE, Wiring, WorldGroup
from elastane.comms.pairing import MispairedError
from elastane.comms.storeclient import GroupStoreClient
from elastane.errors import JobError, PeerLostError
from elastane.process.zygote import store
from elastane.worker.comparison import align_ddps

HOST = "127.0.0.1"
TIMEOUT_S = 60.0


def serve_store(worker, listener):
    """Serve the store as an agent does, on a socket that listens before its port is announced."""
    ours, theirs = socket.socketpair()
    with ours:
        store.send_listener(ours, listener)
    listener.close()
    store.serve(theirs.detach())


def wiring(worker, fence, rank, size, timeout_s=TIMEOUT_S):
    return Wiring(rank, size, HOST, worker.port, fence, timeout_s=timeout_s)


def build(worker, fence, rank, size):
    if size == 1:
        return WorldGroup(ALONE).build()
    return WorldGroup(wiring(worker, fence, rank, size)).build()


def summed(group, rank):
    """The sum of rank + 1 over the group, by a vector that takes several packets."""
    value = torch.full((100_000,), float(rank + 1))
    dist.all_reduce(value, group=group)
    assert (value == value[0]).all()
    return value[0].item()


def of_all(group):
    return torch.ones(1000 * group.size())


OPERATIONS = {
    "all_reduce": lambda g: dist.all_reduce(torch.ones(500_000), group=g),
    "all_reduce_small": lambda g: dist.all_reduce(torch.ones(1), group=g),
    "barrier": lambda g: dist.barrier(group=g),
    "recv": lambda g: dist.recv(torch.ones(8), g.size() - 1, group=g),
    "send": lambda g: dist.send(torch.ones(20_000_000), g.size() - 1, group=g),
    "broadcast": lambda g: dist.broadcast(torch.ones(1000), g.size() - 1, group=g),
    "all_to_all": lambda g: dist.all_to_all_single(of_all(g), of_all(g), group=g),
    "all_gather": lambda g: dist.all_gather_single(of_all(g), torch.ones(1000), group=g),
    "reduce_scatter": lambda g: dist.reduce_scatter_single(torch.ones(1000), of_all(g), group=g),
    "exchange": lambda g: g.exchange(
        [(torch.ones(8), g.size() - 1, 9)], [(torch.ones(20_000_000), g.size() - 1, 9)]
    ).wait(),
    "all_gather_object": lambda g: dist.all_gather_object([None] * g.size(), "x", group=g),
}


def stuck_in(worker, operations, size):
    """Leave the last member out of each operation; the others end the world on request."""
    elastic = ElasticGroup()
    elastic.register()
    rank, last = worker.number, size - 1
    for name in operations:
        elastic.replace(build(worker, f"stuck-{name}", rank, size))
        at = []
        if rank == last:
            worker.say("in")
            worker.hear()
            elastic.abort()
        else:
            told = worker.when_told(lambda at=at: (at.append(time.monotonic()), elastic.abort()))
            worker.say("in")
            try:
                OPERATIONS[name](elastic)
            except (RuntimeError, PeerLostError):
                out = time.monotonic()
            told.join()
            assert elastic.failed
            with contextlib.suppress(PeerLostError):
                elastic.check()
                raise AssertionError("check() found nothing wrong")
            worker.say(out - at[0])
    if rank != last:
        started = time.monotonic()
        elastic.replace(build(worker, "after", rank, size - 1))
        took = time.monotonic() - started
        assert not elastic.failed
        worker.say((summed(elastic, rank), took))
    elastic.close()


def peer_lost(worker, size):
    """All-reduce until the test reports a lost peer, then all-reduce in the next world."""
    elastic = ElasticGroup()
    rank = worker.number
    elastic.replace(build(worker, "first", rank, size))
    at = []
    told = worker.when_told(lambda at=at: (at.append(time.monotonic()), elastic.abort()))
    worker.say("in")
    try:
        while True:
            OPERATIONS["all_reduce"](elastic)
    except (RuntimeError, PeerLostError):
        out = time.monotonic()
    failed = elastic.failed
    told.join()
    worker.say((failed, out - at[0]))
    elastic.replace(build(worker, "second", rank, size - 1))
    worker.say(summed(elastic, rank))
    worker.hear()


def seen(limit_s, ready):
    """Wait until `ready()`; return False after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def held():
    """Return the number of descriptors, and the threads as the kernel lists them."""
    threads = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            threads.append(file.read().strip())
    return len(os.listdir("/proc/self/fd")), sorted(threads)


def entry(port):
    """What a rank that listens at `port` of this host publishes, in a world of two."""
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port)
    address += socket.inet_aton(HOST)
    address = address.ljust(128, b"\0") + struct.pack("=q", -1)
    return struct.pack("=Q", 1) + b"h" + struct.pack("=Q", 136) + address + struct.pack("=2q", 0, 1)


def builds_with(worker, peer):
    """Build with a missing peer, as each rank; abort; report how long the build took to end."""
    client = dist.TCPStore(HOST, worker.port, is_master=False, wait_for_workers=False)
    listener = socket.create_server((HOST, 0), backlog=1)
    first = None
    for rank in (0, 1, 0, 1):
        fence = f"{peer}-{rank}-{time.monotonic_ns()}"
        ports = {"dead": free_port(), "stopped": listener.getsockname()[1]}
        if peer in ports:
            client.set(f"{fence}/gloo/0/{1 - rank}", entry(ports[peer]))
        world = WorldGroup(wiring(worker, fence, rank, 2))
        at = []

        def end(world=world, at=at):
            # Once the addresses are out, gloo is connecting.
            seen(0.2, lambda world=world: world._construction._meeting is not None)
            time.sleep(0.05)
            at.append(time.monotonic())
            world.abort()

        thread = threading.Thread(target=end)
        thread.start()
        try:
            world.build()
            outcome = "built"
        except PeerLostError as error:
            outcome = error.slug
        out = time.monotonic()
        thread.join()
        world.close()
        worker.say((outcome, out - at[0]))
        # What was left behind goes too.
        if first is None:
            seen(2.0, lambda: threading.active_count() == 1)
            first = held()
    gone = seen(30.0, lambda: held()[0] <= first[0] and len(held()[1]) <= len(first[1]))
    worker.say(
        gone
        or (
            first,
            held(),
            [thread.name for thread in threading.enumerate()],
            os.popen(f"ls -l /proc/{os.getpid()}/fd").read(),
        )
    )


def rebuilds(worker, count):
    """Build many worlds, and end them in different ways."""
    rank = worker.number
    elastic = ElasticGroup()
    marks = []
    for number in range(count):
        world = build(worker, f"n{number}", rank, 2)
        value = torch.ones(1000)
        world.group.allreduce([value]).wait()
        assert value[0] == 2
        if number % 3 == 1:
            world.abort()
        elif number % 3 == 2:
            elastic.replace(world)
            world.abort()
            world.abort()
            with contextlib.suppress(RuntimeError, PeerLostError):
                elastic.allreduce([value]).wait()
        world.close()
        world.abort()
        if number in (count // 4, count - 1):
            elastic.close()
            world = None
            seen(30, lambda: len(held()[1]) == 1)  # What ends a world may yet begin a thread.
            marks.append((*held(), resident()))
    worker.say(marks)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def user_sockets(worker, worlds):  # noqa: C901
    """Let user threads open, use and close connections while worlds are built and ended."""
    server = socket.create_server((HOST, 0), backlog=128)
    over, faults, rounds = threading.Event(), [], [0, 0]

    def echo():
        while not over.is_set():
            with contextlib.suppress(OSError):
                peer, _ = server.accept()
                peer.sendall(peer.recv(64))
                peer.close()

    def talk():
        while not over.is_set():
            try:
                with socket.create_connection(server.getsockname()) as sock:
                    sock.sendall(b"hello")
                    assert sock.recv(64) == b"hello"
                rounds[0] += 1
            except (OSError, AssertionError) as error:
                if not over.is_set():  # then the server is gone
                    faults.append(repr(error))

    def ask():
        while not over.is_set():
            try:
                client = GroupStoreClient(HOST, worker.port, TIMEOUT_S)
                client.open()
                client.add("asked", 1)
                client.close()
                rounds[1] += 1
            except RuntimeError as error:
                faults.append(repr(error))

    threads = [threading.Thread(target=each, daemon=True) for each in (echo, talk, talk, ask)]
    for thread in threads:
        thread.start()
    for number in range(worlds):
        world = WorldGroup(wiring(worker, f"u{number}", worker.number, 2))
        if number % 2:
            build_and_end(world)
        else:
            world.build()
            world.group.allreduce([torch.ones(8)]).wait()
            world.abort()
        world.close()
    over.set()
    server.close()
    worker.say((faults, rounds))


def build_and_end(world):
    timer = threading.Timer(0.003, world.abort)
    timer.start()
    with contextlib.suppress(PeerLostError):
        world.build()
    timer.join()


class Net(torch.nn.Module):
    """Several buckets; buffers; one part that only even steps use.

    Parameters are in another order than their gradients come: buckets are laid out again.
    """

    def __init__(self):
        super().__init__()
        self.even, self.odd = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(),
            *(torch.nn.Linear(64, 64) for _ in range(6)),
        )  # fmt: skip

    def forward(self, x, step=None):
        x = self.body(x)
        if step is None:
            return self.even(x) + self.odd(x)
        return (self.odd if step % 2 else self.even)(x)


KINDS = {
    "plain": {"bucket_cap_mb": 0.02},
    "unused": {"bucket_cap_mb": 0.02, "find_unused_parameters": True},
    "views": {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True},
    "static": {"bucket_cap_mb": 0.02, "static_graph": True},
}


def gradients(model, rank, step, kind):
    """One forward and backward on data of this rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch = torch.randn(16, 32, generator=generator)
    model.zero_grad(set_to_none=kind != "views")
    out = model(batch, step) if kind == "unused" else model(batch)
    out.square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def new_net():
    torch.manual_seed(0)
    return Net()


def ddp_survives(worker, kind, size, when):
    """Let a member die in the middle of a backward; the others continue with their DDP."""
    rank = worker.number
    elastic = ElasticGroup()
    elastic.register()
    elastic.replace(build(worker, "first", rank, size))
    net = new_net()
    model = DDP(net, process_group=elastic, **KINDS[kind])
    for step in range(when):
        gradients(model, rank, step, kind)
        elastic.check()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    if rank == size - 1:
        calls = iter(range(1000))

        def die(_grad):
            if next(calls) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        net.body[4].weight.register_hook(die)
    told = worker.when_told(elastic.abort)
    worker.say("in")
    raised = False
    try:
        gradients(model, rank, when, kind)
        elastic.check()
    except (RuntimeError, PeerLostError):
        raised = elastic.failed
    told.join()
    worker.say(raised)
    net.load_state_dict(before)
    elastic.replace(build(worker, "second", rank, size - 1))
    ours = [gradients(model, rank, when + more, kind) for more in range(3)]
    elastic.check()
    after = net.state_dict()
    # What a new DDP over an ordinary group of the new world makes of the same data.
    other = new_net()
    other.load_state_dict(before)
    plain = ElasticGroup("plain")
    plain.register()
    plain.replace(build(worker, "plain", rank, size - 1))
    fresh = DDP(other, process_group=plain, **KINDS[kind])
    theirs = [gradients(fresh, rank, when + more, kind) for more in range(3)]
    worker.say(
        all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        and all(torch.equal(after[name], value) for name, value in other.state_dict().items())
    )
    worker.hear()


def ddp_joined(worker, size, kind):
    """Let a survivor with rebuilt buckets, after an evaluation, train with a new member's DDP."""
    rank = worker.number
    elastic = ElasticGroup()
    elastic.register()
    net = new_net()
    elastic.replace(build(worker, "alone", 0, 1))
    model = DDP(net, process_group=elastic, init_sync=False, **KINDS[kind])
    if rank == 0:
        for step in range(3):
            gradients(model, 0, step, kind)
        with torch.no_grad():
            model(torch.ones(16, 32))
        model.require_backward_grad_sync = False  # as within no_sync()
    elastic.replace(build(worker, "together", rank, size))
    align_ddps(elastic, committed=3 if rank == 0 else -1)
    assert not model.require_backward_grad_sync
    model.require_backward_grad_sync = True
    net.load_state_dict(new_net().state_dict())
    got = [gradients(model, rank, step, kind) for step in range(3)]
    elastic.check()
    worker.say([each.sum().item() for each in got])


def frozen(net):
    net.even.weight.requires_grad_(False)


# What the worker of rank 0 does otherwise than the rest, to its net, and as arguments of DDP.
OTHERWISE = {
    "frozen": (frozen, {}),
    "static": (lambda net: None, {"static_graph": True}),
    "unused": (lambda net: None, {"find_unused_parameters": True}),
    "buckets": (lambda net: None, {"bucket_cap_mb": 3}),
    "buffers": (lambda net: net.body[1].register_buffer("more", torch.ones(2)), {}),
}


def ddp_differs(worker, size, otherwise):
    """Give rank 0 a different DDP than the other ranks."""
    rank = worker.number
    elastic = ElasticGroup()
    elastic.register()
    elastic.replace(build(worker, "alone", 0, 1))
    net = new_net()
    change, options = OTHERWISE[otherwise] if rank == 0 else (lambda net: None, {})
    change(net)
    model = DDP(net, process_group=elastic, **options)
    elastic.replace(build(worker, "together", rank, size))
    try:
        align_ddps(elastic, committed=0)
    except JobError as error:
        worker.say(str(error))
    del model
    worker.hear()


def first_world(worker):
    elastic = ElasticGroup()
    elastic.register()
    elastic.replace(build(worker, "first", worker.number, 3))
    return elastic


def what_happens(action):
    """Return "done", or the text of an error."""
    try:
        action()
    except (RuntimeError, MispairedError, PeerLostError) as error:
        return str(error)
    return "done"


def step_of(elastic, step):
    """Make one step as a job does: a reduction, and a round that runs during the update."""
    dist.all_reduce(torch.ones(8))
    elastic.pairing.start(step)
    elastic.pairing.agree(step)


def commits_early(worker, odd):
    """Begin rounds before the updates; in the last step rank 1 does `odd`."""
    elastic = first_world(worker)
    pairing, is_odd = elastic.pairing, worker.number == 1
    for step in range(3):
        step_of(elastic, step)
    dist.all_reduce(torch.ones(8))
    if odd == "before" and is_odd:
        pairing.tally.note("allreduce", [torch.ones(8)])  # as if paired with a later one
    if not (odd == "no update" and is_odd):
        pairing.start(3)
    dist.all_reduce(torch.ones(8))
    if not (odd == "no second update" and is_odd):
        pairing.start(3)
    dist.all_reduce(torch.ones(8))  # a metric, after the updates
    if odd == "behind" and is_odd:
        pairing.tally.note("allreduce", [torch.ones(8)])
    worker.say(what_happens(lambda: pairing.agree(3)))
    worker.say(what_happens(lambda: step_of(elastic, 4)))
    worker.hear()


def starts_alone(worker):
    """Let rank 0 begin a round before the others begin theirs."""
    elastic = first_world(worker)
    dist.all_reduce(torch.ones(8))
    if worker.number:
        worker.hear()
    elastic.pairing.start(0)
    worker.say("begun")
    elastic.pairing.agree(0)
    worker.say("committed")
    worker.hear()


def next_step(pairing):
    """Make a step whose reduction was paired with a surplus reduction of another member."""
    pairing.tally.note("allreduce", [torch.ones(8)])
    pairing.start(4)
    pairing.agree(4)


def goes_ahead(worker, then):
    """Let rank 1 make one more collective after its update; the others commit and continue."""
    elastic = first_world(worker)
    pairing = elastic.pairing
    for step in range(3):
        step_of(elastic, step)
    dist.all_reduce(torch.ones(8))
    pairing.start(3)
    told = worker.when_told(elastic.abort)
    if worker.number == 1:
        if then == "stand":
            worker.say(what_happens(dist.barrier))  # nobody else makes one
        else:
            pairing.tally.note("allreduce", [torch.ones(8)])
            worker.say(what_happens(lambda: pairing.agree(3)))
    else:
        pairing.agree(3)
        worker.say("committed")
        actions = {
            "stand": lambda: pairing.agree(4),
            "step": lambda: next_step(pairing),
            "insist": pairing.insist,
        }
        worker.say(what_happens(actions[then]))
    told.join()
    elastic.replace(build(worker, "second", worker.number, 3))
    worker.say(what_happens(lambda: pairing.meet(updated=worker.number == 1)))
    worker.hear()


def commits_with(worker, odd):
    """Commit; then rank 1 makes one more all-reduce, and waits in it or has completed it."""
    elastic = first_world(worker)
    for step in range(3):
        dist.all_reduce(torch.ones(8))
        elastic.pairing.agree(step)
    dist.all_reduce(torch.ones(8))
    told = worker.when_told(elastic.abort)
    stands = odd == "stands" and worker.number == 1
    work = dist.all_reduce(torch.ones(8), async_op=True) if stands else None
    if odd == "passed" and worker.number == 1:
        elastic.pairing.tally.note("allreduce", [torch.ones(8)])  # as if paired with a later one
    worker.say("in")
    try:
        if work is not None:
            work.wait()
        elastic.pairing.agree(3)
        worker.say("committed")
    except (RuntimeError, MispairedError, PeerLostError) as error:
        worker.say(str(error))
    told.join()
    elastic.replace(build(worker, "second", worker.number, 3))
    try:
        elastic.pairing.meet(updated=False)
        worker.say("met")
    except MispairedError as error:
        worker.say(str(error))
    worker.hear()
