"""Putting blasst on machines: packaging aids, containers, manifests, rules and a dashboard."""
