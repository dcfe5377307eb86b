"""The client side: the mod that makes any ClientApp compressed, and built-in tasks."""

from clients.mod import kimad_mod

__all__ = ["kimad_mod"]
