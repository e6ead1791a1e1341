"""Environments behind a server of the package openenv-core."""
