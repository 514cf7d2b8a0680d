"""The datastream collector: ingest, archive, and cursors for whoever watches (S1 2.8, 3.9, 3.11, 7.12, 7.13, 8)."""
