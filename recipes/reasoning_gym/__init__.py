"""The environments of the package reasoning-gym."""
