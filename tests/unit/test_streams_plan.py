"""The plan for worker output: parsing, names, prefixes."""

import pytest

from elastane.errors import UsageError
from elastane.process.streams.plan import (
    DEFAULT_PREFIX_TEMPLATE,
    LogPlan,
    StreamChoice,
    WorkerPlace,
    parse_rank_dir,
    parse_ranks,
    parse_std_map,
    prefix_template,
)
from elastane.protocol.model import Fence

PLACE = WorkerPlace(Fence(3, 1), local_rank=2, rank=6, role="default", node="host-a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", {0: StreamChoice.NONE, 1: StreamChoice.NONE}),
        ("3", {0: StreamChoice.ALL, 1: StreamChoice.ALL}),
        ("0:3,1:2", {0: StreamChoice.ALL, 1: StreamChoice.ERR}),
        ("1:1", {0: StreamChoice.NONE, 1: StreamChoice.OUT}),
        ("0:1,7:3", {0: StreamChoice.OUT, 1: StreamChoice.NONE}),
    ],
)
def test_std_map_means_what_it_means_to_torchrun(text, expected):
    assert parse_std_map(text, 2) == expected


def test_local_ranks_of_two_digits_can_be_named():
    assert parse_std_map("10:3", 12)[10] is StreamChoice.ALL


@pytest.mark.parametrize("text", ["4", "", "0:4", "a:1", "0=1", "0:1,", "-1", "33", "0:1;1:1"])
def test_wrong_std_map_is_refused_with_its_value_and_the_choices(text):
    with pytest.raises(UsageError) as caught:
        parse_std_map(text, 2, option="--tee")
    assert f"--tee: {text!r}" in str(caught.value)
    assert "3 (both)" in str(caught.value)


def test_rank_list_takes_commas_and_spans():
    assert parse_ranks("0, 2,10-12") == {0, 2, 10, 11, 12}
    assert parse_ranks("") == frozenset()


@pytest.mark.parametrize("text", ["x", "3-1", "-1", "1,,y"])
def test_wrong_rank_list_is_refused(text):
    with pytest.raises(UsageError, match="--local-ranks-filter"):
        parse_ranks(text)


def test_folder_of_a_worker_carries_round_attempt_and_rank_and_is_read_back():
    folder = LogPlan("/logs").rank_dir("../evil", Fence(3, 1), 6)
    assert folder.parts[:2] == ("/", "logs")
    assert ".." not in folder.parts
    assert parse_rank_dir("/".join(folder.parts[3:])) == (Fence(3, 1), 6)
    assert parse_rank_dir("round_1/attempt_x/rank_0") is None


def test_default_prefix_names_role_rank_node_round_and_attempt():
    assert LogPlan("/logs").line_prefix(PLACE) == b"[default6 host-a r3.1]: "


def test_prefix_template_of_torchrun_is_honoured_with_our_names_besides():
    environ = {
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}/${rank}/${local_rank} "
        "${node} ${round}.${attempt} $unknown|"
    }
    plan = LogPlan("/logs", prefix=prefix_template(environ))
    assert plan.line_prefix(PLACE) == b"default/6/2 host-a 3.1 $unknown|"
    assert prefix_template({}) == DEFAULT_PREFIX_TEMPLATE


@pytest.mark.parametrize("base_dir", ["", "/dev/null"])
def test_without_a_folder_no_stream_has_a_file(base_dir):
    plan = LogPlan(base_dir, redirects={0: StreamChoice.ALL}, tee={0: StreamChoice.ALL})
    assert not plan.keeps(0, StreamChoice.OUT)
    assert not plan.tees(0, StreamChoice.OUT)


def test_tee_implies_a_file_and_the_rank_filter_affects_only_the_console():
    plan = LogPlan(
        "/logs", tee={0: StreamChoice.OUT, 1: StreamChoice.OUT}, console_ranks=frozenset({1})
    )
    assert plan.keeps(0, StreamChoice.OUT)
    assert not plan.tees(0, StreamChoice.OUT)
    assert plan.tees(1, StreamChoice.OUT)
    assert not plan.keeps(1, StreamChoice.ERR)
