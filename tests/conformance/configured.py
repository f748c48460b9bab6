"""Operators that take attributes and inputs in one call."""

from __future__ import annotations

from backnorm.dialects import onednn_graph as graph
from backnorm.dialects import onednn_spec as spec


def onednn_graph(src, mean, variance, gamma, beta, epsilon, momentum, data_format):
    operator = graph.BatchNormForwardTraining(epsilon, momentum, data_format)
    return operator(src, mean, variance, gamma, beta)


def onednn_spec(src, mean, variance, gamma, beta, epsilon, momentum, data_format):
    operator = spec.BatchNormForwardTraining(epsilon, momentum, data_format)
    return operator(src, mean, variance, gamma, beta)
