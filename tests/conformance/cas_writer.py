"""Adds 1 to a counter COUNT times through compare_and_set, and prints each success."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "shared"))

from store_connect import connect

from elastane.protocol.limits import STORE_TIMEOUT_S
from elastane.stores.etcd import gateway
from elastane.stores.protocol import ConflictError

gateway.ATTEMPT_TIMEOUT_S = STORE_TIMEOUT_S  # as in conftest.py


async def main(specification: str, key: str, count: int) -> None:
    store = connect(specification)
    done = 0
    while done < count:
        begun = time.monotonic()
        entry = await store.get(key)
        number, version = (int(entry.value), entry.version) if entry else (0, 0)
        read = time.monotonic()
        try:
            written = await store.compare_and_set(key, str(number + 1).encode(), version)
        except ConflictError as conflict:
            assert conflict.current is None or conflict.current.version != version
            continue
        done += 1
        print(
            json.dumps(
                {
                    "begun": begun,
                    "read": read,
                    "ended": time.monotonic(),
                    "saw": version,
                    "version": written.version,
                    "value": number + 1,
                }
            ),
            flush=True,
        )


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
