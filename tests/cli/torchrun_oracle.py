"""Prints the installed torchrun's result for each command line, as JSON.

Each case is `[entry, argv, variables]`. Each result has the values or the error of the parser, and
the launch that would follow. The tests run this program in a folder of their own.
"""

import contextlib
import io
import json
import os
import sys
import warnings

import torch.distributed.launch as legacy
import torch.distributed.run as torchrun

CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}


def judge(entry, argv, variables):
    os.environ.clear()
    os.environ.update(CLEAN | {"OMP_NUM_THREADS": "1"} | variables)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            args = (legacy if entry == "launch" else torchrun).parse_args(argv)
        except SystemExit as stop:
            return {"help": True} if stop.code == 0 else {"error": said.getvalue()[-300:]}
        except ValueError as error:  # the variable of a flag is no integer
            return {"error": f"ValueError: {error}"}
        answer = {"values": dict(vars(args))}
        try:
            answer["launch"] = launch_of(args, entry)
        except (Exception, SystemExit) as error:
            answer["launch_error"] = f"{type(error).__name__}: {error}"
    return answer


def launch_of(args, entry):
    if entry == "launch" and args.no_python and not args.use_env:
        raise ValueError("no_python without use_env")
    config, command, words = torchrun.config_from_args(args)
    logs = config.logs_specs
    return {
        "nodes": [config.min_nodes, config.max_nodes],
        "nproc": config.nproc_per_node,
        "max_restarts": config.max_restarts,
        "role": config.role,
        "redirects": streams(logs._redirects, config.nproc_per_node),
        "tee": streams(logs._tee, config.nproc_per_node),
        "console_ranks": sorted(logs._local_ranks_filter or ()),
        "command": [command if isinstance(command, str) else "run_script_path", *words],
    }


def streams(std, count):
    if isinstance(std, dict):
        return [int(std.get(rank, 0)) for rank in range(count)]
    return [int(std)] * count


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump([judge(*case) for case in json.load(sys.stdin)], sys.stdout)
