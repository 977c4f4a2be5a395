"""A server of one engine: the protocols that clients speak, over HTTP.

`app` answers requests by the table in `protocols`: a protocol is a file, and its request fields are
a table. What a client may send and how much of it stands in `limits`, `bodies` and `security`, how
an engine's answer goes out in `answering` and `sse`, who listens in `server`.
"""
