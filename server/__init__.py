"""The sidecar: sets the threshold of a deployment while it serves, and shows what that did."""
