"""Drills of a whole deployment: python -P -m blasst.deploy.drills --help."""
