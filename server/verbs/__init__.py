"""The verbs of the `blasst` program that belong to the server."""
