"""Rollouts that agents outside of the loop drive: sessions, the programs that talk to them, and their endpoint."""
