"""Checks of the values that users give to `elastane kubernetes`, before anything is made of them.

The API server refuses such a value too, but later, and in an answer that names no option. Each
check fails with a UsageError that names the option, its value and what it can be.
"""

from __future__ import annotations

import re

from elastane.errors import UsageError
from elastane.kubernetes.model.names import is_label, is_subdomain

_PORT_MAX = 65535
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?", re.ASCII)


def check_namespace(option: str, name: str) -> None:
    """Refuse what can be no namespace; "" is none."""
    if name and not is_label(name):
        raise wrong_value(
            option,
            name,
            "at most 63 characters of a-z, 0-9 and -, with a letter or digit at both ends",
            "kubectl get namespaces",
        )


def check_object(option: str, name: str, resource: str) -> None:
    """Refuse what no object of the resource can be named."""
    if not is_subdomain(name):
        raise wrong_value(
            option,
            name or "''",
            "at most 253 characters of a-z, 0-9, - and ., with a letter or digit at both ends",
            f"kubectl get {resource}",
        )


def check_image(option: str, image: str) -> None:
    """Refuse an image with spaces; "" is none."""
    if image != "".join(image.split()):
        raise wrong_value(option, image, "the name of an image, without spaces")


def check_quantity(option: str, amount: str, example: str) -> None:
    """Refuse what is no quantity; "" is none."""
    if amount and not _QUANTITY.fullmatch(amount):
        raise wrong_value(option, amount, f"a quantity of Kubernetes, such as {example}")


def check_least(option: str, number: int | None, least: int) -> None:
    """Refuse a number that is too small; None is none."""
    if number is not None and number < least:
        raise wrong_value(option, str(number), f"{least} or more")


def check_port(option: str, port: int | None) -> None:
    """Refuse what is no port; None is none."""
    if port is not None and not 0 <= port <= _PORT_MAX:
        raise wrong_value(option, str(port), f"0 to {_PORT_MAX}; 0 takes a free port")


def wrong_value(option: str, value: str, expected: str, next_step: str = "") -> UsageError:
    """Return the error of an option with a value that it cannot take."""
    return UsageError(
        f"{option} {value}",
        slug="bad-option-value",
        expected=expected,
        next_step=next_step or "elastane kubernetes ACT --help",
    )
