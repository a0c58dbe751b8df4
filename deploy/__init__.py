"""Putting blasst on machines: packaging aids now, containers and manifests later."""
