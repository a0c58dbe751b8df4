"""RULER at thresholds: tasks, runner, sweep and report, over any OpenAI-compatible server."""
