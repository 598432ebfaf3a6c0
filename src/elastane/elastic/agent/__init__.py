"""Agents in the user's own process. Source: torch.distributed.elastic.agent."""

from elastane.elastic.agent import server

__all__ = ["server"]
