"""One benchmark command for every kernel."""
