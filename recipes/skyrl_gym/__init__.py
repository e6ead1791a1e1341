"""The environments of the package skyrl-gym."""
