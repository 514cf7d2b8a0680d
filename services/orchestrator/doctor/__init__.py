"""`mvp-orchestrator doctor`: what this machine lacks for the configured run, and what to do about it (issue 7).

Nothing is started and nothing is changed: ports are bound and let go, the kernels are compiled into a folder that is
removed; only the header of a model on a hub stays in the cache. Each check has a time limit of its own, so that a hung
Docker engine or file system is a finding, too.
"""
