"""docs/functions.md: its programs run, and print what the page says."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from function_harness import program
from ports import free_port

PAGE = (Path(__file__).parents[2] / "docs" / "functions.md").read_text("utf-8")
_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PRINTED = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)
FIRST, *BLOCKS = _FENCE.findall(PAGE)
DEFINED, _, _ = FIRST.partition("values = ")
SEVERAL = "node-a:29400"


@pytest.mark.parametrize("block", [block for block in (FIRST, *BLOCKS) if SEVERAL not in block])
def test_a_program_of_the_page_prints_what_it_says(tmp_path, block):
    with program(tmp_path, DEFINED, block) as one:
        assert one.wait() == 0, one.err
        said = _PRINTED.findall(block)
        assert said and one.out.splitlines() == said


def test_two_nodes_of_the_page_meet(tmp_path):
    (block,) = (block for block in BLOCKS if SEVERAL in block)
    block = block.replace(SEVERAL, f"127.0.0.1:{free_port()}") + "print(sorted(values))\n"
    with ExitStack() as stack:
        nodes = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            one = program(tmp_path / name, DEFINED, block, ELASTANE_NODE_ID=name)
            nodes.append(stack.enter_context(one))
        assert [node.wait() for node in nodes] == [0, 0], nodes[0].err + nodes[1].err
        assert sorted(node.out for node in nodes) == ["[0, 1]\n", "[2, 3]\n"]
