"""What `kubectl logs` asks the node for, over TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from aiohttp import web

from bed.podrun import PodRun, logs_of
from bed.setting import Setting

LOOK_S = 0.1


async def serve_logs(setting: Setting, pods: dict[str, PodRun]) -> int:
    """Serve them as long as this process lives; returns the port."""

    def is_running(namespace: str, name: str) -> bool:
        runs = [run for run in pods.values() if (run.namespace, run.name) == (namespace, name)]
        return any(not run.is_done for run in runs)

    async def answer(request: web.Request) -> web.StreamResponse:
        namespace, name, container = (request.match_info[k] for k in ("ns", "pod", "container"))
        files = logs_of(setting.folder, namespace, name, container)
        place = -2 if request.query.get("previous") == "true" else -1
        if len(files) < -place:
            return web.Response(status=404, text=f"no log of {namespace}/{name}/{container}\n")
        response = web.StreamResponse()
        await response.prepare(request)
        follow = request.query.get("follow") == "true"
        data, seen = _tail(files[place], request.query.get("tailLines"))
        await response.write(data)
        while follow and is_running(namespace, name):
            await asyncio.sleep(LOOK_S)
            data, seen = _from(files[place], seen)
            await response.write(data)
        await response.write(_from(files[place], seen)[0])
        return response

    app = web.Application()
    app.router.add_get("/containerLogs/{ns}/{pod}/{container}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*setting.certificate)
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    return int(runner.addresses[0][1])


def _from(path: Path, seen: int) -> tuple[bytes, int]:
    with path.open("rb") as file:
        file.seek(seen)
        data = file.read()
    return data, seen + len(data)


def _tail(path: Path, lines: str | None) -> tuple[bytes, int]:
    data = path.read_bytes()
    if lines is None:
        return data, len(data)
    kept = data.splitlines(keepends=True)[-int(lines) :] if int(lines) else []
    return b"".join(kept), len(data)
