"""The user's code on its way to nodes: what goes (survey), as one content-addressed file (archive)."""
