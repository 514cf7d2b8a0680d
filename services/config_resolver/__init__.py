"""Config resolver: the configuration, resolved once and served in slices (S1 7.1; design.md 2)."""
