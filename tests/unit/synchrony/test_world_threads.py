"""A group whose worlds follow one another keeps no thread of a former world."""

import threading

from torch.distributed import Work

from elastane.comms.works import Waited
from elastane.synchrony.ordered import OrderedGroup


class Done(Work):
    def wait(self, timeout=None):
        return True


class World:
    when_aborted = None

    def close(self):
        pass

    def refuses(self, error):
        return False


def waiters():
    return {thread for thread in threading.enumerate() if thread.name == "elastane-wait"}


def test_the_threads_that_waited_for_works_end_with_their_world():
    before = waiters()
    group = OrderedGroup(host=None, keeps_ranks=False)
    former = set()
    for _ in range(5):
        log = group._use(World())
        Waited(Done(), log, [], sliced=False).wait()
        for thread in former:
            thread.join(30)
        assert not former & waiters()
        former = waiters() - before
        assert len(former) == 1
    log.close()
