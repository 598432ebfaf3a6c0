"""A class that decides where each worker's output goes: --logs-specs, as in torchrun.

The class is found among the installed entry points `torchrun.logs_specs` and used as torch does:
created once, then asked by `reify` before each attempt. It may import torch, which the agent then
holds too (0.2 GB); without the option nothing is loaded. Its errors become a ConfigurationError
with its own message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoints, entry_points
from typing import Any

from elastane.errors import ConfigurationError
from elastane.options.parser import Options
from elastane.options.spelling import nearest
from elastane.process.streams.plan import (
    ChooseFiles,
    GroupFiles,
    StreamChoice,
    WorkerFiles,
    parse_ranks,
    parse_std_map,
)

GROUP = "torchrun.logs_specs"


def load_logs_specs(name: str, options: Options, local_world_size: int) -> ChooseFiles:
    """Return a function that asks the named class; ConfigurationError if there is none."""
    found = entry_points(group=GROUP)
    if name not in found.names:
        raise _no_such_class(name, found)
    try:
        specs = found[name].load()(
            log_dir=options.text("log_dir") or None,
            redirects=_streams(options, "redirects", local_world_size),
            tee=_streams(options, "tee", local_world_size),
            local_ranks_filter=set(parse_ranks(options.text("local_ranks_filter"))) or None,
        )
    except Exception as error:
        raise _failed(name, "cannot be made", error) from error
    return _Specs(name, specs)


@dataclass(frozen=True)
class _Specs:
    name: str
    specs: Any

    def __call__(self, envs: Mapping[int, Mapping[str, str]]) -> GroupFiles:
        changed = {local_rank: dict(env) for local_rank, env in envs.items()}
        try:
            dest = self.specs.reify(changed)
            workers = {
                local_rank: _files(dest, local_rank, _changes(env, changed[local_rank]))
                for local_rank, env in envs.items()
            }
            filtered = {
                StreamChoice.OUT: dest.filtered_stdout,
                StreamChoice.ERR: dest.filtered_stderr,
            }
        except Exception as error:
            raise _failed(self.name, "does not say where output goes", error) from error
        return GroupFiles(workers, {std: path for std, path in filtered.items() if path})


def _files(dest: Any, local_rank: int, env: Mapping[str, str]) -> WorkerFiles:
    """Return one worker's files of torch's LogsDest; KeyError if the worker is missing."""
    paths = {StreamChoice.OUT: dest.stdouts[local_rank], StreamChoice.ERR: dest.stderrs[local_rank]}
    tees = StreamChoice.NONE
    for std, teed in ((StreamChoice.OUT, dest.tee_stdouts), (StreamChoice.ERR, dest.tee_stderrs)):
        if teed.get(local_rank) and paths[std] not in ("", os.devnull):
            tees |= std
    error_file = dest.error_files.get(local_rank, "")
    return WorkerFiles(paths, tees, "" if error_file == os.devnull else error_file, env)


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return what the class set in a worker's environment, without the error file's variable."""
    return {
        name: str(value)
        for name, value in after.items()
        if before.get(name) != value and name != "TORCHELASTIC_ERROR_FILE"
    }


def _streams(options: Options, dest: str, local_world_size: int) -> dict[int, StreamChoice]:
    return parse_std_map(options.text(dest), local_world_size, option=f"--{dest}")


def _no_such_class(name: str, found: EntryPoints) -> ConfigurationError:
    names = sorted(found.names)
    near = nearest(name, names)
    return ConfigurationError(
        f"--logs-specs {name}: nothing that is installed has an entry point {GROUP}: {name}",
        slug="logs-specs",
        expected=(f"one of {', '.join(names)}" if names else "none is installed")
        + (f"; did you mean {near}?" if near else ""),
        next_step=f'install the package whose pyproject.toml has it under entry-points."{GROUP}"',
    )


def _failed(name: str, what: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"--logs-specs {name}: it {what}: {type(error).__name__}: {error}",
        slug="logs-specs",
        expected="a class with the constructor and the reify() of torch's LogsSpecs",
    )
