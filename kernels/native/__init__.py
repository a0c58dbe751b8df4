"""The CPU implementation's compiled tile loop: C sources, their build, and how they are called."""
