"""RankLost: the error of a group that has lost a rank. This module does not import torch."""

from __future__ import annotations


class RankLost(Exception):
    """A rank of the group died, hung or made another call. The group cannot be used any more."""
