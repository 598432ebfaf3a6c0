"""What a change of the membership costs a node does not grow with the job."""

import time

import pytest

from bench.simulated_scale import measure


def test_messages_and_bytes_of_a_node_do_not_grow_with_the_job():
    small, large = measure(100), measure(1_000)
    for few, many in zip(small, large, strict=True):
        assert many.messages <= few.messages + 1.0, (few, many)  # more nodes lose a peer and say so
        assert many.bytes <= 1.5 * few.bytes, (few, many)
        assert many.bytes_max <= 1.1 * few.bytes_max, (few, many)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ten_thousand_nodes_form_lose_a_hundred_and_take_in_five_hundred_within_a_minute():
    began_s = time.process_time()
    form, lose, take_in = measure(10_000)
    assert (lose.stage, take_in.stage) == ("lose 100", "add 500")
    assert max(form.messages, lose.messages) < 5 and take_in.messages < 8
    # Some 16 s on one core; a cost that grows with the square of the nodes would be hours.
    assert time.process_time() - began_s < 60
