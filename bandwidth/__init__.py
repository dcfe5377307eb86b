"""Bandwidth: links, samples, estimators, the budget rule and the arithmetic of a simulated round; pure functions."""

from bandwidth.budget import (
    asymmetric_budget_bytes,
    one_rate_budget_bytes,
    smallest_time_budget_s,
    uplink_budget_bytes,
)
from bandwidth.clock import Arrival, Upload, arrival, split_round
from bandwidth.estimators import (
    ESTIMATORS,
    Estimate,
    Estimator,
    clip_report,
    make_estimator,
    safe_rate_bps,
)
from bandwidth.links import LINK_KINDS, ClientLinks, ConstantLink, Link, MarkovLink, make_links
from bandwidth.samples import Sample

__all__ = [
    "ESTIMATORS",
    "LINK_KINDS",
    "Arrival",
    "ClientLinks",
    "ConstantLink",
    "Estimate",
    "Estimator",
    "Link",
    "MarkovLink",
    "Sample",
    "Upload",
    "arrival",
    "asymmetric_budget_bytes",
    "clip_report",
    "make_estimator",
    "make_links",
    "one_rate_budget_bytes",
    "safe_rate_bps",
    "smallest_time_budget_s",
    "split_round",
    "uplink_budget_bytes",
]
