"""Options of other launchers that torchrun never had, and what to write in their place.

Those of `bagua.distributed.run` are nothing but variables that Bagua reads in the workers, which
inherit the agent's environment.
"""

from __future__ import annotations

_VARIABLES = {
    "bagua-service-port": "BAGUA_SERVICE_PORT",
    "default-bucket-size": "BAGUA_DEFAULT_BUCKET_SIZE",
    "autotune-level": "BAGUA_AUTOTUNE",
    "autotune-max-samples": "BAGUA_AUTOTUNE_MAX_SAMPLES",
    "autotune-sampling-confidence-time": "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
    "autotune-warmup-time": "BAGUA_AUTOTUNE_WARMUP_TIME_S",
    "is-output-autotune-log": "BAGUA_IS_OUTPUT_AUTOTUNE_LOG",
}


def advice(name: str) -> str:
    """Return what to write in place of `--name`; empty where it is no launcher's option."""
    if name == "use-env":
        return (
            "leave it out: workers always have LOCAL_RANK; only python -m elastane.launch takes it"
        )
    variable = _VARIABLES.get(name, "")
    return f"set the variable {variable}, which is all that the option did" if variable else ""
