"""The page of `elastane dashboard` in a real browser, wide and on a phone, light and dark."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from chromium import MISSING, PROGRAM, Browser
from shown_job import write_job
from view_events import event, settled, started

from elastane.observe.events import encode_line

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)
# Generous: a browser on a busy machine.
DEADLINE_S = 120.0
SHAPES = [(1280, 900, False), (390, 844, True)]
READ = """
["account", "events"].every((id) => document.querySelector(`#${id}-body table`))
  && /live|folder/.test(document.getElementById("connection").textContent)
"""
# The elements that are wider than the page: they make the whole page scroll sideways.
TOO_WIDE = """
[...document.querySelectorAll("main *, header *")].filter((one) => {
  const box = one.getBoundingClientRect(), width = document.documentElement.clientWidth;
  return box.width && box.right > width + 1 && !one.closest(".scroll");
}).map((one) => `${one.tagName} ${one.id} ${one.className.baseVal ?? one.className}`).slice(0, 5)
"""
SMALL = """
[...document.querySelectorAll("button, select, input")].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width && (box.width < 24 || box.height < 24);
}).map((one) => one.outerHTML.slice(0, 90)).slice(0, 5)
"""
# The texts of charts that reach beyond their chart, which cuts them.
CUT = """
[...document.querySelectorAll("#scalars svg text")].filter((one) => {
  const [text, chart] = [one, one.ownerSVGElement].map((each) => each.getBoundingClientRect());
  return text.left < chart.left || text.right > chart.right;
}).map((one) => one.textContent)
"""
OVERLAPPING = """
(() => {
  const texts = [...document.querySelectorAll("#chart text")].filter((one) => one.textContent);
  const boxes = texts.map((one) => one.getBoundingClientRect()), found = [];
  for (let a = 0; a < boxes.length; a += 1) for (let b = a + 1; b < boxes.length; b += 1) {
    const [p, q] = [boxes[a], boxes[b]];
    const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (wide > 1 && high > 3) found.push(`${texts[a].textContent} / ${texts[b].textContent}`);
  }
  return found.slice(0, 5);
})()
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of a dashboard, and the log of the job that it shows."""
    folder = tmp_path_factory.mktemp("page")
    job = write_job(folder / "logs")
    private = folder / "run"
    private.mkdir(mode=0o700)
    command = [sys.executable, "-m", "elastane", "dashboard", "--port", "0", "--log-dir"]
    server = subprocess.Popen(
        [*command, str(folder / "logs")],
        env={**os.environ, "XDG_RUNTIME_DIR": str(private)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield re.search(r"http://\S+/", server.stdout.readline())[0], job
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(DEADLINE_S)


def seen(url, look, width=1280, height=900, ready=READ, **options):
    """Return the result of `look` on the page, which must load without errors."""

    async def play():
        async with Browser(width, height, **options) as page:
            await page.open(url)
            await page.until(ready, DEADLINE_S)
            found = await look(page)
            assert page.problems == []
            return found

    return asyncio.run(asyncio.wait_for(play(), DEADLINE_S))


async def shape(page):
    """Return the faults of the layout: page width, and elements too wide, too small or covered."""
    return {
        "page": await page.run("document.documentElement.scrollWidth"),
        "wide": await page.run(TOO_WIDE),
        "small": await page.run(SMALL),
        "overlapping": await page.run(OVERLAPPING),
    }


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height", "mobile"), SHAPES, ids=["1280", "390"])
def test_the_page_fits_its_window_and_can_be_touched(served, width, height, mobile, dark):
    async def look(page):
        return await page.run("document.documentElement.dataset.theme"), await shape(page)

    theme, found = seen(
        f"{served[0]}?job={served[1].name}", look, width, height, dark=dark, mobile=mobile
    )
    assert theme == ("dark" if dark else "light")
    assert found == {"page": width, "wide": [], "small": [], "overlapping": []}


def test_the_page_of_a_job_that_waits_fits_a_small_phone(served):
    url, job = served
    now_s = time.time()
    waiting = job.parent / "waiting"
    waiting.mkdir()
    (waiting / "events.h.jsonl").write_bytes(
        encode_line(event("agent-started", "node-a", time_s=now_s))
        + encode_line(event("waiting", "node-a", "1 node of 4", min_nodes=4, time_s=now_s))
    )
    found = seen(f"{url}?job=waiting", shape, 360, 640, mobile=True)
    assert found == {"page": 360, "wide": [], "small": [], "overlapping": []}


def test_the_page_of_a_log_without_the_coordinators_decisions_says_what_is_not_known(served):
    """Two minutes later a coordinator begins to log there: the account begins with it."""
    url, job = served
    apart, begun_s = job.parent / "apart", time.time() - 240.0
    shown = "['answer-rate', 'answer-lost', 'incident-body', 'account-body']"

    async def look(page):
        said = f"{shown}.map((id) => document.getElementById(id).innerText)"
        before = await page.run(said)
        takes_over = encode_line(event("coordinator-started", "b", time_s=begun_s + 120.0))
        trains = encode_line(event("pace", "b", **at | {"time_s": begun_s + 200.0}))
        with (apart / "events.h.jsonl").open("ab") as file:
            file.write(takes_over + trains)
        await page.until("document.querySelector('#account-body table')", DEADLINE_S)
        return before, await page.run(said)

    apart.mkdir()
    at = {"round": 1, "attempt": 0, "time_s": begun_s}
    (apart / "events.h.jsonl").write_bytes(
        encode_line(event("agent-started", "b", time_s=begun_s))
        + encode_line(started("b", 1, **at))
    )
    ready = "document.getElementById('account-body')?.innerText.includes('Not known')"
    before, after = seen(f"{url}?job=apart", look, ready=ready)
    assert "The count of steps is not known here." in before[0]
    assert "Not known" in before[1] and "The coordinator logs on another node" in before[1]
    assert before[2] == "Incidents are not known here."
    assert before[3].startswith("Not known: the coordinator logs on another node")
    assert "Without the 120.00 s before: the coordinator logged on another node" in after[3]
    assert "No incident so far." in after[2] and "Nothing" in after[1]


def test_an_incident_that_ended_no_world_was_over_and_no_workers_started(served):
    url, job = served
    silent = job.parent / "silent-store"
    silent.mkdir()
    (silent / "events.h.jsonl").write_bytes(
        b"".join(
            encode_line(one)
            for one in (
                event("coordinator-started", "a", time_s=1.0),
                settled(1, "a", 1, time_s=2.0),
                started("a", 1, round=1, attempt=0, time_s=3.0),
                event("authority-lost", "a", round=1, attempt=0, time_s=5.0),
                event("authority-regained", "a", round=1, attempt=0, time_s=5.4),
            )
        )
    )
    ready = "document.getElementById('incident-body')?.innerText.includes('Cost')"

    shown = "['answer-lost', 'incident-body'].map((id) => document.getElementById(id).innerText)"

    async def look(page):
        return await page.run(shown)

    lost, body = seen(f"{url}?job=silent-store", look, ready=ready)
    assert "400 ms until it was over." in body
    assert "Nothing" in lost and "1 more incident stopped no worker" in lost


def test_an_incident_shows_its_duration_its_last_output_and_whether_it_stayed_open(served):
    """The first worker printed its error, and the second one was killed; then all nodes left."""
    url, job = served
    two = job.parent / "two-incidents"
    two.mkdir()
    first, second = {"round": 1, "attempt": 0}, {"round": 2, "attempt": 0}
    said = {"exit_code": 1, "rank": 1, "local_rank": 1, "pid": 11, "message": "ValueError: no"}
    killed = {"exit_code": -9, "rank": 0, "local_rank": 0, "pid": 10, "message": "step 3"}
    (two / "events.h.jsonl").write_bytes(
        b"".join(
            encode_line(one)
            for one in (
                event("agent-started", "a", time_s=1.0),
                event("coordinator-started", "a", time_s=1.0),
                settled(1, "a", 2, time_s=2.0),
                started("a", 10, 11, **first, time_s=3.0),
                event("worker-exited", "a", "exit code 1", **first, **said, time_s=20.0),
                event("incident", "a", "rank 1 failed", **first, time_s=20.0),
                settled(2, "a", 1, time_s=21.0),
                started("a", 10, **second, time_s=22.0),
                event("workers-training", "a", **second, time_s=25.0),
                event(
                    "worker-exited", "a", "SIGKILL", **second, **killed, output=True, time_s=40.0
                ),
                event("incident", "a", "rank 0 failed", **second, time_s=40.0),
                event("agent-stopped", "a", "SIGTERM", exit_code=143, time_s=45.0),
            )
        )
    )
    body = "document.getElementById('incident-body').innerText"

    async def look(page):
        last = await page.run(body)
        await page.run("document.getElementById('earlier').click()")
        await page.until(f"{body}.includes('until its first step')", DEADLINE_S)
        return last, await page.run(body)

    ready = "document.getElementById('incident-body')?.innerText.includes('Cost')"
    last, first_one = seen(f"{url}?job=two-incidents", look, ready=ready)
    assert "open at the end" in last and "5.0 s until the end" in last
    assert "Its last output" in last and "It said" not in last
    assert "It said" in first_one and "ValueError: no" in first_one
    assert "3.0 s until its first step." in first_one


def test_a_long_error_in_the_events_takes_the_width_of_a_phone(served):
    url, job = served
    failed = job.parent / "failed"
    failed.mkdir()
    said = "worker of rank 0 ended with exit code 1: torch.OutOfMemoryError: " + "CUDA " * 40
    (failed / "events.h.jsonl").write_bytes(
        encode_line(event("agent-started", "node-a", time_s=1.0))
        + encode_line(event("job-ended", "node-a", said, ok=False, exit_code=1, time_s=2.0))
    )

    async def look(page):
        cells = "[...document.querySelectorAll('#events td:last-child')]"
        width = await page.run(f"Math.min(...{cells}.map((cell) => cell.offsetWidth))")
        return width, await shape(page)

    width, found = seen(f"{url}?job=failed", look, 390, 844, mobile=True)
    assert width > 300
    assert found == {"page": 390, "wide": [], "small": [], "overlapping": []}


def test_the_page_shows_the_job_and_an_incident_opens_from_the_time_that_it_cost(served):
    async def look(page):
        parts = ("answers", "nodes", "scalars", "account", "checkpoints", "events")
        texts = {part: await page.run(f"document.getElementById('{part}').innerText")
                 for part in parts}  # fmt: skip
        button = "document.querySelector(`#account-body button[data-key$='/2']`)"
        await page.until(button)
        await page.run(f"{button}.click()")
        await page.until(
            "document.getElementById('incident-head').innerText.startsWith('Incident 2')"
        )
        await page.until("document.getElementById('incident-body').innerText.includes('node-d')")
        return texts

    # Written now: a job without a line for a minute is silent.
    job = write_job(served[1].parent, "training")
    texts = seen(f"{served[0]}?job={job.name}", look)
    assert "Training" in texts["answers"] and "Goodput" in texts["answers"]
    assert "The save of step" in texts["answers"], "what needs a person"
    for curve in ("loss", "learning_rate", "accuracy", "up to step"):
        assert curve in texts["scalars"]
    assert "4 nodes, 16 workers" in texts["nodes"] and "node-d lost" in texts["nodes"]
    assert "15 workers wait 66 ms in each step for rank 9 on node-c" in texts["nodes"]
    assert "284 ms 1.29×" in texts["nodes"], "the slowest worker of node-c"
    for cause in ("productive", "rebuilding", "starting", "detecting"):
        assert cause in texts["account"]
    assert "3 saved, 1 failed" in texts["checkpoints"]
    assert "storage-unreachable" in texts["checkpoints"]
    assert "events" in texts["events"]


def test_a_chart_of_what_the_script_logs_reads_out_and_grows(served):
    url, job = served
    shutil.copytree(job, job.parent / "learning")
    note = "document.getElementById('scalars-note').innerText"
    chart = "document.querySelector(`svg[data-name='loss']`)"

    async def look(page):
        await page.until(chart)
        await page.run(f"{chart}.focus()")
        await page.run(f"{chart}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'ArrowLeft'}}))")
        told = await page.run(note)
        with (job.parent / "learning" / "scalars.node-a.jsonl").open("a") as file:
            file.write('{"step": 9000, "time": 4e9, "loss": 1.25, "<b>late": -0.001891}\n')
        await page.until(f"{chart}.getAttribute('aria-label').startsWith('loss: 1.25 at step 9')")
        await page.until("document.querySelectorAll('#scalars figure').length === 4")
        cut = await page.run(CUT)
        return told, await page.run("document.getElementById('scalars-body').innerText"), cut

    told, text, cut = seen(f"{url}?job=learning", look)
    assert cut == []
    assert re.fullmatch(r"loss \S+ at step 7,\d{3}", told)
    assert "<b>late" in text


def test_the_heat_map_works_by_keyboard_and_opens_the_output_of_a_worker(served):
    url, job = served
    write_job(job.parent, "slow")
    output = job.parent / "slow" / "round_6" / "attempt_0" / "rank_9"
    output.mkdir(parents=True)
    (output / "worker.jsonl").write_text('{"node": "node-c", "local_rank": 1}\n')
    (output / "stderr.log").write_text("its clock is throttled\n")
    strip = "[...document.querySelectorAll('.heat-row')]"
    slow = f"{strip}.filter((row) => row.querySelector('.t-warn'))"

    async def look(page):
        await page.until(f"{strip}.length > 0")
        names = await page.run(f"{strip}.map((row) => row.children[0].innerText)")
        named = await page.run(f"{slow}.map((row) => row.innerText)")
        told = await page.run("document.querySelector('.heat').getAttribute('aria-label')")
        colours = await page.run(f"{slow}[0].querySelector('.strip').style.background")
        read = []
        # The newest cells are empty: the job logs nothing more while the browser starts.
        for key in ("ArrowDown", *["ArrowLeft"] * 8):
            await page.run("document.querySelector('.heat').focus()")
            await page.run(
                "document.querySelector('.heat').dispatchEvent(new KeyboardEvent('keydown',"
                f" {{key: '{key}'}}))"
            )
            read.append(await page.run("document.getElementById('heat-note').innerText"))
        await page.run(f"{slow}[0].querySelector('button').click()")
        await page.until("document.getElementById('drawer').innerText.includes('is throttled')")
        return names, named, told, colours, read

    names, [named], told, colours, read = seen(f"{url}?job=slow", look)
    assert len(names) == 20, "those of the node that was lost, too"
    assert names[0] == "node-a · 0" and named.startswith("node-c · 1")
    assert re.search(r"1\.[23]\d×", named) and "slow now: node-c · 1" in told
    assert "var(--h0)" in colours and "var(--h3)" in colours, "1.6 times as long for a while"
    assert read[0].startswith("node-a · 1: ") and "× the median at " in read[-1]


def test_the_page_follows_the_job_without_a_reload(served):
    url, job = served

    async def look(page):
        await page.run("window.mine = 1")
        ended = event("job-ended", "node-a", "all workers succeeded", ok=True, time_s=4e9)
        with (job.parent / "moving" / "events.h.jsonl").open("ab") as file:
            file.write(encode_line(ended))
        await page.until("document.title.startsWith('✓ done')", DEADLINE_S)
        return await page.run("window.mine")

    shutil.copytree(job, job.parent / "moving")
    assert seen(f"{url}?job=moving", look) == 1


def test_the_page_shows_another_run_of_the_job_and_nothing_that_was_chosen_of_the_last(served):
    """Its agents were killed, so that the log has no end of the run before."""
    url, job = served
    nodes, again = ("node-a", "node-f"), job.parent / "again"

    async def look(page):
        await page.until("document.getElementById('incident-body').innerText.includes('node-d')")
        now_s = time.time()
        with (again / "events.h.jsonl").open("ab") as file:
            for node in nodes:
                file.write(encode_line(event("agent-started", node, time_s=now_s)))
            file.write(encode_line(event("coordinator-started", "node-f", time_s=now_s)))
            file.write(encode_line(settled(1, " ".join(nodes), 8, time_s=now_s)))
            for node in nodes:
                at = {"round": 1, "attempt": 0, "time_s": now_s}
                file.write(encode_line(started(node, 1, 2, 3, 4, **at)))
        await page.until("document.getElementById('about').innerText.includes('run 2')")
        await page.until("document.getElementById('incident-head').innerText === 'Incidents'")
        parts = ("answers", "nodes", "incident-body")
        texts = [await page.run(f"document.getElementById('{one}').innerText") for one in parts]
        return *texts, await page.run("location.search")

    shutil.copytree(job, again)
    answers, shown, incident, address = seen(f"{url}?job=again&incident=2&from=1&to=2", look)
    assert "8 of 8 workers" in answers and "node-d" not in shown and "node-f" in shown
    assert incident == "No incident so far." and address == "?job=again"
