"""The server side: the Flower strategy, its networks and its grids."""

from strategies.inprocess import InProcessGrid
from strategies.kimad import Kimad
from strategies.network import LinkSettings, SimulatedNetwork
from strategies.settings import Settings

__all__ = ["InProcessGrid", "Kimad", "LinkSettings", "Settings", "SimulatedNetwork"]
