"""Minutes of faults on one ElasticJob: of its pods, nodes, operator and API server.

SOAK_S is how long, SEED which faults; a failure names both.
"""

import os
import random
import time

import pytest
from elastic_jobs import steps_of
from jobs import newest, until

NODES = ("a", "b", "c")
SEED = int(os.environ.get("SEED", "1"))
SOAK_S = float(os.environ.get("SOAK_S", "240"))


class Faults:
    """What may happen; each method leaves all as able to work as it was."""

    def __init__(self, job, cluster, operator, dice):
        self.job, self.cluster, self.operator, self.dice = job, cluster, operator, dice
        self.plane = job.plane
        self.wanted = 3

    def kill_a_pod(self):
        self.cluster.tell(self.job.space, self._pod(), "signal", number=9)

    def delete_a_pod(self):
        self.job.kubectl("delete", "pod", self._pod(), "--wait=false")

    def evict_a_pod(self):
        self.cluster.tell(self.job.space, self._pod(), "evict", message="low on memory")

    def scale(self):
        self.wanted = self.dice.choice([n for n in (1, 2, 3) if n != self.wanted])
        self.job.kubectl("scale", f"ej/{self.job.name}", f"--replicas={self.wanted}")

    def kill_the_operator(self):
        self.operator.kill()
        self._meanwhile()
        self.operator.start()

    def lose_a_node(self):
        node = self.cluster[self.dice.choice(NODES)]
        node.die()
        self._meanwhile()
        self._wait_trained()
        node.start()

    def cut_a_node_off(self):
        node = self.cluster[self.dice.choice(NODES)]
        node.cut_off()
        self._meanwhile()
        self._wait_trained()
        node.heal()

    def kill_the_api_server(self):
        self.plane["kube-apiserver"].kill()
        self._meanwhile()
        self.plane.start_part("kube-apiserver")

    def stop_etcd(self):
        self.plane.pause("etcd")
        self._meanwhile()
        self.plane.resume("etcd")

    def _pod(self):
        return self.dice.choice(self._running())

    def _running(self):
        pods = self.job.pods().items()
        return sorted(name for name, pod in pods if _runs(pod))

    def _meanwhile(self):
        """Let the fault last for a while, during which the job may be told nothing."""
        end_s = time.monotonic() + self.dice.choice([0.0, 1.0, 5.0, 15.0])
        until(lambda: time.monotonic() >= end_s, "time passes")

    def _wait_trained(self):
        at = self._now()
        until(lambda: self._now() != at, "a worker trains", 180)

    def _now(self):
        last = newest(self.job.seen())
        return (last[-1].round, last[-1].attempt, last[-1].step) if last else None

    def wait_settled(self):
        """Wait until exactly the wanted pods make steps; start an operator that has ended."""
        since_s = time.time()

        def is_so():
            if not self.operator.part.is_alive:
                self.operator.start()
            pods = self.job.pods()
            if len(pods) != self.wanted or self._running() != sorted(pods):
                return False
            last = [each for each in newest(self.job.seen()) if each.time_s > since_s]
            # A pod in the place of one that was lost has a name of its own; its node has not.
            indices = {pod["metadata"]["labels"]["replica-index"] for pod in pods.values()}
            train = {each.node.rpartition("-")[2] for each in last}
            return train == indices and last[0].world == self.wanted

        until(is_so, f"{self.wanted} train", 240)


def _runs(pod):
    is_leaving = "deletionTimestamp" in pod["metadata"]
    return pod["status"].get("phase") == "Running" and not is_leaving


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_minutes_of_faults_cost_no_step_twice_in_one_world(cluster, operator, make_job):
    for name in NODES:
        cluster.add(name)
    job = make_job()
    job.apply(replicas=3, low=1, high=3)
    job.wait_step(world=3)
    faults = Faults(job, cluster, operator, random.Random(SEED))
    names = [name for name in vars(Faults) if not name.startswith("_") and name != "wait_settled"]
    done = []
    end_s = time.monotonic() + SOAK_S
    while time.monotonic() < end_s:
        done.append(faults.dice.choice(names))
        print(f"{time.strftime('%X')} {done[-1]}", flush=True)
        try:
            getattr(faults, done[-1])()
            faults.wait_settled()
        except AssertionError as error:
            error.add_note(f"SEED={SEED}, after {done}")
            raise
    judge(job.seen())


def judge(seen):
    """One world at a time, each step committed once and in order."""
    fences = [(each.round, each.attempt) for each in sorted(seen, key=lambda each: each.time_s)]
    assert fences == sorted(fences), "a world that was followed by another did a step"
    twice = {step: worlds for step, worlds in steps_of(seen).items() if len(worlds) > 1}
    # Only a job that lost all of its pods at once begins again at step 1.
    assert not twice or min(twice) == 1, twice
