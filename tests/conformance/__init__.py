"""Our functions against the reference's own numbers: see __main__.py."""
