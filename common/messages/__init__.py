"""The message catalogue: the protocol document. One file a subject; each type says who sends it to whom, what answers
it, and what repeats it. Tags are append-only (tests/golden/tags.toml): never renumbered, never reused.

Tag ranges: 1 bus, 40 service, 50 config, 60 provision, 80 orchestrator, 110 reports, 130 node agent, 160 prompt,
180 serve, 200 membership, 220 stream, 240 engine.
"""
