"""The routes, a file each, as functions that make them: `router(serving) -> APIRouter`.

A handler is short: parse -> convert -> generate -> render. What it needs it is given; there is no global state.
"""
