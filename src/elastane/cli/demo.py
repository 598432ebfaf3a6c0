"""`elastane demo`: train a real classifier while workers and nodes die, and say what it cost.

Two agents on this machine, two workers each, run examples/digits_in_place.py, which recovers in
place; or with --restart examples/digits.py, which knows nothing of elastane. By the training's
progress a worker is killed, then a node with its agent, then a new node comes. Exit code 0: the job
ended by itself and the held-out accuracy is as promised.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import elastane
from elastane.cli._demo_result import Result
from elastane.errors import ConfigurationError, ElastaneError, ExitCode

ACCURACY_MIN = 0.97
# Longer than the slowest machine that should watch this; a job that takes so long is stuck.
TIMEOUT_S = 300.0
EPOCHS, STEP_DELAY_S = 20, 0.03
EPOCHS_FAST, STEP_DELAY_FAST_S = 10, 0.05


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--fast", action="store_true", help="half the training")
    parser.add_argument(
        "--restart",
        action="store_true",
        help="with a script that knows nothing of elastane: all workers restart after a fault",
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON; talk on stderr")
    parser.add_argument("--keep", metavar="DIR", help="a new folder for data, logs and checkpoints")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="give up after this long (%(default)g)",
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo; return its exit code."""
    check_packages()
    from elastane.cli._demo_cluster import Cluster
    from elastane.cli._demo_show import Show
    from elastane.dashboard.terminal import face_for
    from elastane.runtime import environment

    stream = sys.stderr if args.json else sys.stdout
    begun = time.monotonic()
    with working_folder(args.keep) as folder, ending_on_signals():
        environ = launch_environment(environment.snapshot())
        with Cluster(folder, script_command(folder, args), environ) as cluster:
            show = Show(cluster)
            with face_for(stream, "elastane demo") as face:
                show.play(face.show, args.timeout)
            costs = show.costs()
    result = Result(
        accuracy=show.view.final_accuracy or 0.0,
        accuracy_min=ACCURACY_MIN,
        steps=show.view.step,
        total_s=time.monotonic() - begun,
        acts=costs,
        kept=args.keep or "",
    )
    print(result.as_json() if args.json else result.as_text())
    return int(ExitCode.DONE if result.ok else ExitCode.WORKER_FAILED)


def check_packages() -> None:
    """Raise ConfigurationError where the script's own packages are not installed."""
    missing = [name for name in ("torch", "numpy", "sklearn") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"demo: {', '.join(missing)} cannot be imported",
            slug="demo-packages",
            where=sys.executable,
            expected="the packages of elastane's extra `demo`",
            next_step="pip install 'elastane[demo]'",
        )


def launch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without settings that were meant for another job."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(("PET_", "ELASTANE_", "TORCHELASTIC_"))
    }
    return {**kept, "OMP_NUM_THREADS": "1"}


def script_command(folder: Path, args: argparse.Namespace) -> list[str]:
    """Return the training script and its arguments."""
    epochs, delay_s = (EPOCHS_FAST, STEP_DELAY_FAST_S) if args.fast else (EPOCHS, STEP_DELAY_S)
    options = ["--dir", str(folder), "--epochs", str(epochs), "--step-delay", str(delay_s)]
    name = "digits.py" if args.restart else "digits_in_place.py"
    return [str(Path(elastane.__file__).parent / "examples" / name), *options]


@contextmanager
def working_folder(keep: str | None) -> Iterator[Path]:
    """Give a folder: one to keep, or one that goes away at the end if all went well."""
    if keep is not None:
        folder = Path(keep)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError(
                f"demo: --keep {keep}: {error.strerror}",
                slug="demo-folder",
                expected="a folder that can be made and does not exist yet",
            ) from error
        yield folder.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="elastane-demo-"))
    try:
        yield folder
    except ElastaneError:
        raise  # It names files of the folder.
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the demo as Ctrl-C does: through every context's end."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
