"""The shell commands; each `scripts/*.py` calls one `main` from here."""
