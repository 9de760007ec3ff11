"""A load client for servers that speak OpenAI's HTTP API.

    python -m loadtest --url http://127.0.0.1:8000 -c 32 -n 200
    python -m loadtest.compare --a http://127.0.0.1:8000 --b http://127.0.0.1:8001 -c 1 8 32 64

It knows nothing of Chairlift but its URL, so that it measures any server in the same way. On one machine it shares the
cores with the server that it measures, so its own cost per token is kept low (see `wire`) and reported.

    cli, compare    the two commands               stream, sse     what the body of a response means
    measure         one load, jobs to figures      wire            one request and its response
    runner          in a closed or an open loop    record          what is noted of a request
    workload        the requests themselves        report, view    figures, and how they are shown
"""
