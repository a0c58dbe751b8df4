"""Block masks for training and serving: composable mask mods, layouts, block lists and routes."""
