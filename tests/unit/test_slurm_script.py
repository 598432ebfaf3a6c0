"""`elastane slurm`: the text of the batch script."""

import argparse
import shutil
import subprocess

import pytest

from elastane.cli.main import main
from elastane.cli.slurm import Parser, configure, script_of
from elastane.errors import UsageError

GOLDEN = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1-4
#SBATCH --time=12:00:00
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --mail-type=END

# The shell waits for the agents, which save and leave when Slurm ends the job.
trap : TERM
# Slurm hands the CPUs of a task to steps only by this variable.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
fi
# A secret for this run: no agent of the run before a requeue can join.
ELASTANE_TOKEN=$(head -c 32 /dev/urandom | base64 --wrap=0)
export ELASTANE_TOKEN
report="slurm-$SLURM_JOB_ID.outcome.json"
rm -f -- "$report"

# One agent on each node. The loss of one ends neither the others nor the step.
srun --export=ALL --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \\
    --ntasks-per-node=1 --cpu-bind=none --no-kill --kill-on-bad-exit=0 --wait=0 \\
    elastane run --nnodes "1:$SLURM_JOB_NUM_NODES" --report-file "$report" \\
    --max-restarts 100 --in-place --drain-timeout 75 train.py --lr 0.1 'two words'
code=$?
# srun reports the worst end of an agent, the report says how the job ended.
told=$(sed -n 's/^  "exit_code": \\([0-9]*\\).*/\\1/p' "$report" 2>/dev/null)
code=${told:-$code}
case "$code" in
69|75|137|143)
    # Drained, or stopped by the loss of a node. A job that Slurm ends is not running.
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null)
    restarts=${SLURM_RESTART_COUNT:-0}
    if [ "$state" = RUNNING ] && [ "$restarts" -lt 100 ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$code"
"""
WORDS = ["--nodes", "1:4", "--time", "12:00:00", "--gpus-per-node", "8", "--exclusive"]


def script(*words):
    parser = Parser(prog="elastane slurm", allow_abbrev=False)
    configure(parser)
    return script_of(parser.parse_args(list(words)), ("elastane",))


def test_the_whole_script_is_as_expected():
    more = ["--max-restarts", "100", "--in-place", "--sbatch=--mail-type=END"]
    assert script(*WORDS, *more, "train.py", "--lr", "0.1", "two words") == GOLDEN


def run(text, tmp_path, outcome, code=0, state="RUNNING", **environ):
    """Run a script with fake Slurm commands; return its exit code and their arguments."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    report = f"printf '{{\\n  \"exit_code\": {outcome}\\n}}\\n' > slurm-7.outcome.json"
    programs = {
        "srun": f'for w in "$@"; do echo "$w"; done > argv\n'
        f"{report if outcome is not None else ':'}\nexit {code}",
        "squeue": f"echo {state}",
        "scontrol": "echo $* > requeued",
    }
    for name, program in programs.items():
        (tools / name).write_text(f"#!/bin/bash\n{program}\n")
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    done = subprocess.run(
        ["bash", "-u"], input=text, text=True, cwd=tmp_path, env=env | environ, check=False,
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    requeued = (tmp_path / "requeued").exists()
    return done.returncode, requeued, (tmp_path / "argv").read_text().splitlines()


@pytest.mark.parametrize(
    ("outcome", "code", "state", "ends", "requeued"),
    [
        (0, 137, "RUNNING", 0, False),  # one agent was killed, and the job is done
        (1, 137, "RUNNING", 1, False),
        (143, 143, "RUNNING", 143, True),
        (143, 143, "COMPLETING", 143, False),
        (75, 75, "RUNNING", 75, True),
        (None, 137, "RUNNING", 137, True),
        (None, 2, "RUNNING", 2, False),
    ],
)
def test_the_script_requeues_a_run_that_can_continue(
    tmp_path, outcome, code, state, ends, requeued
):
    told = run(script(*WORDS, "train.py"), tmp_path, outcome, code, state)
    assert told[:2] == (ends, requeued)


def test_the_script_requeues_as_often_as_requested(tmp_path):
    text = script("--requeues", "2", "train.py")
    assert run(text, tmp_path, 143, SLURM_RESTART_COUNT="1")[1]
    (tmp_path / "requeued").unlink()
    assert not run(text, tmp_path, 143, SLURM_RESTART_COUNT="2")[1]


def test_words_of_the_user_reach_the_agents_as_they_are(tmp_path):
    odd = ["a b", "it's", "$HOME", "`id`", "{x}", "\\", "*", ";", '"', "", "--x={}", "\n"]
    told = run(script("--log-dir", "/l o/g$s", "train.py", *odd), tmp_path, 0)[2]
    assert "/l o/g$s" in told
    assert "\n".join(told).endswith("\n".join(["train.py", *odd]))


def test_a_store_keeps_the_secret_and_a_size_that_is_given_stays():
    words = ["--rdzv-backend", "file", "--rdzv-endpoint", "/s", "--nnodes", "2:4", "--nodes=1:4"]
    text = script(*words, "train.py")
    assert "ELASTANE_TOKEN" not in text and '"1:$SLURM' not in text and "--nnodes 2:4" in text
    assert "report='o ut.json'" in script("--report-file", "o ut.json", "train.py")
    assert "--nodes=4\n" in script("--nodes", "4", "t.py") and "--nnodes" not in script("t.py")


def test_the_notice_leaves_time_to_save():
    assert "--drain-timeout 105" in script("--notice", "150", "t.py")
    assert "--drain-timeout 10 t.py" in script("--notice", "30", "--shutdown-timeout", "5", "t.py")
    assert "--drain-timeout 7 t.py" in script("--drain-timeout", "7", "t.py")
    with pytest.raises(UsageError, match="--notice 49") as refused:
        script("--notice", "49", "t.py")
    assert "at least 50 seconds" in refused.value.expected


@pytest.mark.parametrize(
    "limit",
    ["3", "2:01", "0:02:01", "12:00:00", "2-00", "1-12:30", "1-12:30:10", "0", "-1", "UNLIMITED"],
)
def test_a_time_limit_that_sbatch_accepts_is_kept(limit):
    assert f"#SBATCH --time={limit}\n" in script(f"--time={limit}", "t.py")


@pytest.mark.parametrize("limit", ["2", "2:00", "0:02:00", "0-0:2"])
def test_a_time_limit_that_the_notice_fills_is_refused(limit):
    with pytest.raises(UsageError, match=r"is 120 s, and --notice 120"):
        script("--time", limit, "t.py")


@pytest.mark.parametrize(
    "words",
    [
        *(["--time", text, "t.py"] for text in ("never", "1h", "1:2:3:4", "2-", "1-2:3:4:5")),
        ["--partition", "a b", "t.py"],
        ["--partition", "a\n#SBATCH --uid=0", "t.py"],
        ["--job-name", "x#y", "t.py"],
        ["--sbatch", "mail-type=END", "t.py"],
        ["--sbatch=--comment='a b'", "t.py"],
        ["--nodes", "4:1", "t.py"],
        ["--notice", "soon", "t.py"],
        ["--show-config", "t.py"],
        ["--json", "t.py"],
        [],
    ],
)
def test_values_that_a_script_cannot_have_are_refused(words):
    with pytest.raises(UsageError) as refused:
        script(*words)
    assert refused.value.expected


def test_bash_accepts_the_script(capsys):
    bash = shutil.which("bash")
    assert main(["slurm", *WORDS, "--cpus-per-task=8", "train.py", "it's"]) == 0
    text = capsys.readouterr().out
    assert " -m elastane run --nnodes " in text
    subprocess.run([bash, "-n"], input=text, text=True, check=True, timeout=60)


def test_help_names_the_options(capsys):
    assert main(["slurm", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--notice S" in shown and "--nproc-per-node" in shown and "sbatch" in shown


def test_the_namespace_of_the_parser_is_plain():
    assert isinstance(Parser(prog="x").parse_args(["t.py"]), argparse.Namespace)
