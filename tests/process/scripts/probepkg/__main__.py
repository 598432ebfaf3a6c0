# ruff: noqa: E402 - what the module begins with is noted before the first import
"""The probe as a package that runs."""

start = list(globals())

import runpy

if __name__ == "__main__":
    import json
    import sys

    import probe

    spec = globals()["__spec__"]
    print(
        json.dumps(
            {
                "keys": start,
                "spec": [spec.name, spec.origin],
                "package": __package__,
                "file": __file__,
                "argv": sys.argv,
                "interpreter": probe.interpreter(),
                "runpy": runpy.__name__,
            }
        )
    )
