"""The dashboard and the metrics: an optional process that only reads (S1 7.15, 8.11; design.md 4).

A subscriber of the collector's stream socket, or a reader of an archive file. asyncio lives here and nowhere in the
collector itself; whatever this process does or suffers, the run goes on.
"""
