"""The HTTP API's shapes, as pydantic models and nothing else: what may be sent, and what is answered.

They know JSON. What a request means, its defaults and its refusals are in `server.convert`; how answers are made is in
`server.render` (by hand, since a stream has one for each token: the tests hold its output against these models).
"""
