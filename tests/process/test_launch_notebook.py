"""elastane.launch in a real notebook: a kernel of its own runs the cells."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from function_harness import Program
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from process_harness import until
from supervise import marked

HELPER = """\
import os, signal, sys, time
import elastane

def scale(factor, by):
    if by == 0:
        raise ValueError("nothing to scale by")
    return factor * by
"""
LAUNCH = """\
def train(by):
    rank = int(os.environ["RANK"])
    # In one write: workers are unbuffered, and the pieces of a print() of two would mix.
    sys.stdout.write(f"rank {rank} of {os.environ['WORLD_SIZE']}\\n")
    return scale(rank + 1, by)

values = elastane.launch(train, (10,), nproc=2, no_zygote=True)
"""
WAITS = """\
def train():
    from pathlib import Path
    path = Path(os.environ["HERE"], "up." + os.environ["RANK"])
    path.write_text(str(os.getpid()))
    time.sleep(600)

elastane.launch(train, nproc=2, no_zygote=True)
"""


class Notebook(Program):
    """A notebook, and the kernel that runs it."""

    def __init__(self, folder, monkeypatch, *cells):
        super().__init__(folder)
        self.tmp.mkdir()
        own = dict.fromkeys(("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"), str(folder / "jupyter"))
        for name, value in self.environment(**own).items():
            monkeypatch.setenv(name, value)
        self.node = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells]
        )
        self.client = NotebookClient(
            self.node, timeout=240, resources={"metadata": {"path": str(folder)}}
        )

    def text(self, index, stream):
        """Return what a cell shows of one stream."""
        outputs = self.node.cells[index].outputs
        return "".join(one.text for one in outputs if one.get("name") == stream)


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    made = []

    def make(*cells):
        made.append(Notebook(tmp_path, monkeypatch, *cells))
        return made[-1]

    yield make
    for one in made:
        one.gone()
        one.kill_all()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A notebook that was run to its end: several tests look at its cells."""
    config = "class Config:\n    lr = 1\n"
    call = "found = elastane.launch(lambda: Config(), nproc=1, no_zygote=True)[0]\n"
    show = "print(type(found) is Config, found.lr)"
    cells = [
        HELPER + "before = signal.getsignal(signal.SIGINT)\n",
        LAUNCH,
        "print(values, before is signal.getsignal(signal.SIGINT))",
        *(config, call + show, config.replace("1", "2"), call + show),
        LAUNCH.replace("(10,)", "(0,)"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        one = Notebook(tmp_path_factory.mktemp("ran"), patch, *cells)
        one.node.cells[-1].metadata["tags"] = ["raises-exception"]
        try:
            one.client.execute()
            one.gone()
        finally:
            one.kill_all()
    return one


def test_a_cell_gets_values_and_shows_what_workers_print(ran):
    shown = sorted(ran.text(1, "stdout").splitlines())
    assert shown == ["rank 0 of 2", "rank 1 of 2"]
    assert ran.text(2, "stdout") == "{0: 10, 1: 20} True\n"
    assert ran.text(1, "stderr") == ""
    assert not ran.folders()


def test_an_error_in_a_cell_has_the_lines_of_the_cells_it_is_from(ran):
    (error,) = (one for one in ran.node.cells[-1].outputs if one.output_type == "error")
    assert error.ename == "FunctionFailedError"
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join([*error.traceback, error.evalue]))
    assert "train() failed on rank" in text
    assert "ValueError: nothing to scale by" in text
    trace = text.rpartition("Traceback (most recent call last):")[2]
    assert "return scale(rank + 1, by)" in trace
    assert 'raise ValueError("nothing to scale by")' in trace
    assert str(Path(sys.prefix)) not in trace


def test_a_class_of_a_cell_comes_back_as_that_class_and_cells_may_be_run_again(ran):
    assert [ran.text(index, "stdout") for index in (4, 6)] == ["True 1\n", "True 2\n"]


def test_the_notebook_of_the_examples_survives_its_kill(notebook, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    example = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
    cells = [one.source for one in nbformat.read(example, 4).cells if one.cell_type == "code"]
    one = notebook(*cells)
    one.client.execute()
    assert len(one.text(2, "stdout").splitlines()) == 3, "a line of each worker"
    assert one.text(3, "stdout").startswith("1 worker joined, at step ")
    assert "job spirals: succeeded" in one.text(4, "stdout")


def test_interrupting_the_kernel_ends_the_workers_and_the_kernel_lives(notebook):
    one = notebook(HELPER, WAITS)

    async def run():
        async with one.client.async_setup_kernel():
            await one.client.async_execute_cell(one.node.cells[0], 0)
            cell = asyncio.create_task(one.client.async_execute_cell(one.node.cells[1], 1))
            up = [one.folder / f"up.{rank}" for rank in (0, 1)]
            while not all(path.exists() for path in up):
                assert not cell.done(), cell
                await asyncio.sleep(0.01)
            await one.client.km.interrupt_kernel()
            with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
                await cell
            until(lambda: len(marked(one.mark)) == 1, "the kernel alone is left")
            after = nbformat.v4.new_code_cell("print('still here')")
            one.node.cells.append(after)
            await one.client.async_execute_cell(after, 2)

    asyncio.run(run())
    assert one.text(2, "stdout") == "still here\n"
    assert not one.folders()


def test_a_killed_kernel_leaves_no_worker(notebook):
    one = notebook(HELPER, WAITS)

    async def run():
        async with one.client.async_setup_kernel():
            await one.client.async_execute_cell(one.node.cells[0], 0)
            cell = asyncio.create_task(one.client.async_execute_cell(one.node.cells[1], 1))
            while not (one.folder / "up.1").exists():
                assert not cell.done(), cell
                await asyncio.sleep(0.01)
            await one.client.km.shutdown_kernel(now=True)
            cell.cancel()

    asyncio.run(run())
    one.gone()
