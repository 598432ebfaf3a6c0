"""Nodes of one rack get ranks next to each other in a real job, also one that arrives later."""

from jobs import Job, newest, ranks


def test_nodes_of_one_rack_have_ranks_next_to_each_other_and_an_arrival_joins_its_rack(tmp_path):
    with Job(tmp_path, "3:4", conf="last_call=0.5,gather=0.1") as job:
        for number, (node, rack) in enumerate([("a", "r1"), ("b", "r2"), ("c", "r1")]):
            job.start(node, "--node-rank", str(number), env={"ELASTANE_TOPOLOGY": f"z1/{rack}"})
        first = job.wait_step(world=3)
        assert ranks(newest(job.seen())) == {0: "a", 1: "c", 2: "b"}
        job.start("d", "--topology", "z1//r1/")
        job.wait_step(world=4, fence=(first.round, first.attempt))
        assert ranks(newest(job.seen())) == {0: "a", 1: "c", 2: "d", 3: "b"}
