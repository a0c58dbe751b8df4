"""Runs the PTX of a kernel on a CPU: results, races, deadlocks, coverage; docs/verify.md."""
