"""The registry of encoders that a server of the language model alone keeps, as SGLang 0.5.23's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from aiohttp import web


def registry(port: int) -> Callable[[web.Application], AsyncIterator[None]]:
    """A part of the server's life: it serves at `port`."""

    async def serving(application: web.Application) -> AsyncIterator[None]:
        known: list[str] = []

        async def register(http: web.Request) -> web.Response:
            known.append((await http.json())["url"])
            return web.Response(text="OK")

        async def unregister(http: web.Request) -> web.Response:
            known.remove((await http.json())["url"])
            return web.Response(text="OK")

        async def urls(http: web.Request) -> web.Response:
            return web.json_response({"encoder_urls": known})

        inner = web.Application()
        inner.router.add_post("/register_encoder_url", register)
        inner.router.add_delete("/unregister_encoder_url", unregister)
        inner.router.add_get("/list_encoder_urls", urls)
        runner = web.AppRunner(inner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        yield
        await runner.cleanup()

    return serving
