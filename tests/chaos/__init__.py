"""Processes of a real local run are killed at random moments; what comes out must be what an undisturbed run gives."""
