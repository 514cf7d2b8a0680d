"""Edges: reliable byte streams of MO01 records between stages (design.md 3). core.py is pure, port.py moves bytes."""
