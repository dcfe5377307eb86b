"""Bandwidth: links, samples, estimators, the budget rule and the arithmetic of a simulated round; pure functions."""

from bandwidth.budget import (
    asymmetric_budget_bytes,
    one_rate_budget_bytes,
    smallest_time_budget_s,
    uplink_budget_bytes,
)
from bandwidth.clock import Arrival, Upload, arrival, split_round
from bandwidth.drift import DriftLink, mobile_link, stable_link
from bandwidth.estimators import (
    ESTIMATORS,
    Estimate,
    Estimator,
    clip_report,
    make_estimator,
    safe_rate_bps,
)
from bandwidth.kinds import LINK_KINDS, LinkPlan, link_problems, make_links, plan_links
from bandwidth.link_file import LinkFile, read_link_file
from bandwidth.links import ClientLinks, ConstantLink, Link
from bandwidth.markov import MarkovLink
from bandwidth.outages import OutageLink
from bandwidth.samples import Sample
from bandwidth.sinusoid import SinusoidLink
from bandwidth.trace import Trace, TraceLink
from bandwidth.trace_files import Columns, read_trace
from compression.arguments import arguments

__all__ = [
    "ESTIMATORS",
    "LINK_KINDS",
    "Arrival",
    "ClientLinks",
    "Columns",
    "ConstantLink",
    "DriftLink",
    "Estimate",
    "Estimator",
    "Link",
    "LinkFile",
    "LinkPlan",
    "MarkovLink",
    "OutageLink",
    "Sample",
    "SinusoidLink",
    "Trace",
    "TraceLink",
    "Upload",
    "arguments",
    "arrival",
    "asymmetric_budget_bytes",
    "clip_report",
    "link_problems",
    "make_estimator",
    "make_links",
    "mobile_link",
    "one_rate_budget_bytes",
    "plan_links",
    "read_link_file",
    "read_trace",
    "safe_rate_bps",
    "smallest_time_budget_s",
    "split_round",
    "stable_link",
    "uplink_budget_bytes",
]
