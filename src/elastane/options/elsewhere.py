"""Options of other launchers that torchrun never had, and what to write instead.

Those of `bagua.distributed.run` only set variables that Bagua reads in the workers, which inherit
the agent's environment.
"""

from __future__ import annotations

_ADVICE = {
    "use-env": "leave it out: workers always have LOCAL_RANK; only python -m elastane.launch "
    "takes it",
    "autotune-level": "set the variables BAGUA_AUTOTUNE and, above 0, AUTO_TUNE_SERVER_ADDR to "
    "MASTER_ADDR:BAGUA_SERVICE_PORT, which is all that the option did",
    "is-output-autotune-log": "set the variable BAGUA_IS_OUTPUT_AUTOTUNE_LOG to 1, which is all "
    "that the option did; leave it unset for no",
    "enable-bagua-net": "put the folder .data/bagua-net of bagua_core first in LD_LIBRARY_PATH, "
    "which is all that the option did",
}
_VARIABLES = {
    "bagua-service-port": "BAGUA_SERVICE_PORT",
    "default-bucket-size": "BAGUA_DEFAULT_BUCKET_SIZE",
    "autotune-max-samples": "BAGUA_AUTOTUNE_MAX_SAMPLES",
    "autotune-sampling-confidence-time": "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
    "autotune-warmup-time": "BAGUA_AUTOTUNE_WARMUP_TIME_S",
}


def advice(name: str) -> str:
    """Return what to write instead of `--name`; empty if no launcher has this option."""
    if name in _ADVICE:
        return _ADVICE[name]
    variable = _VARIABLES.get(name, "")
    return f"set the variable {variable}, which is all that the option did" if variable else ""
