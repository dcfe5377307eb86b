"""Tests of the bandwidth package."""
