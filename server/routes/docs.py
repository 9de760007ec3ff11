"""GET /docs: the API's description as a page to try it from. All of it is served from here.

FastAPI's own page takes Swagger UI from a public CDN: it stays blank where there is no internet, tells a third party of
every visit, and runs what that party sends in a page that may use this server. The package fastapi-offline carries the
same files; only they are used. The page has no script in itself, so its policy can forbid all but them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

from fastapi import APIRouter, Response

_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # Swagger UI styles its elements
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Chairlift</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" href="data:,">
</head>
<body>
<div id="api"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/page.js"></script>
</body>
</html>
"""

_SCRIPT = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#api",
  deepLinking: true,
  validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis],
});
"""

_MEDIA_TYPES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}


def router() -> APIRouter:
    """The page and its files."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/docs")
    async def page() -> Response:
        return Response(_PAGE, media_type="text/html", headers={"Content-Security-Policy": _POLICY})

    @routes.get("/docs/page.js")
    async def script() -> Response:
        return Response(_SCRIPT, media_type="text/javascript")

    for name, media_type in _MEDIA_TYPES.items():
        routes.add_api_route(f"/docs/{name}", _serve_file(name, media_type), response_class=Response)
    return routes


def _serve_file(name: str, media_type: str) -> Callable[[], Response]:
    def serve() -> Response:  # in a worker thread: it reads
        content = (files("fastapi_offline") / "static" / name).read_bytes()
        return Response(content, media_type=media_type, headers={"Cache-Control": "max-age=86400"})

    return serve
